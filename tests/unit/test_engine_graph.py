"""The causal graph: its roots are the verdict's culprits, it stays small in any job, and no name gets out of it."""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner, Result

from controller.cli.main import ExitCode, app
from diagnosis.contracts.incident import Floats, Incident
from diagnosis.contracts.verdict import Culprit
from diagnosis.drill import Drill, Limits, files, kinds
from diagnosis.engine.graph.draft import CAUSAL, NODES_MAX, CausalGraph, Draft, Link, Node
from diagnosis.engine.graph.explain import explain
from diagnosis.engine.graph.layout import lay_out
from diagnosis.engine.graph.sheet import CULPRITS_MAX
from diagnosis.engine.graph.svg import to_svg, width_of, wrap
from diagnosis.engine.graph.text import to_dot, to_json
from diagnosis.engine.verdict import Analysis, analyse
from tests.fleet import Fault, job
from tests.incidents import incidents
from tests.judged import read

SEEDS: Final = (11, 12)
SVG: Final = "{http://www.w3.org/2000/svg}"
HOSTILE: Final = '"]; <script>alert(1)</script> & \\" \n\x00\u202e'


@functools.cache
def analysed(seed: int, kind: str) -> Analysis:
    return analyse(read(files(Drill(seed, kind, Limits(world_max=64)))))


def where_it_ends(culprit: Culprit, analysis: Analysis) -> str:
    """Where waiting ends: at a rank, also where its GPU is to blame, unless what is slow is the network."""
    named = analysis.blame.ranks if analysis.blame is not None else []
    late = analysis.stall is not None or culprit.rank in named
    if culprit.rank is not None and (culprit.kind == "rank" or (culprit.kind == "gpu" and late)):
        return f"rank:{culprit.rank}"
    if culprit.kind in ("gpu", "nic"):
        return f"{culprit.kind}:{culprit.node}/{culprit.gpu if culprit.kind == 'gpu' else culprit.nic}"
    return f"{culprit.kind}:{culprit.node or culprit.link or culprit.switch or 'the whole job'}"


@pytest.mark.parametrize("kind", kinds())
def test_the_roots_are_the_culprits_of_the_verdict(kind: str) -> None:
    for seed in SEEDS:
        analysis = analysed(seed, kind)
        ends = [where_it_ends(culprit, analysis) for culprit in analysis.verdict.culprits]
        roots = set(explain(analysis).roots)
        assert ("culprits:more" in roots) == (len(ends) > CULPRITS_MAX), seed
        assert set(ends[:CULPRITS_MAX]) <= roots - {"culprits:more"} <= set(ends), seed


def test_a_rank_that_the_verdict_does_not_name_is_a_root_all_the_same() -> None:
    stuck = analysed(SEEDS[0], "process_stuck")
    innocent = next(rank for rank in range(64) if rank != stuck.verdict.culprits[0].rank)
    wrong = replace(
        stuck, verdict=msgspec.structs.replace(stuck.verdict, culprits=[Culprit(kind="rank", rank=innocent)])
    )
    assert f"rank:{stuck.verdict.culprits[0].rank}" in explain(wrong).roots
    assert f"rank:{innocent}" not in explain(wrong).roots

    throttled = analyse(job(128, dp=8, fault=Fault(slow=(5, 1.5))))
    assert throttled.blame is not None
    blind = replace(throttled, blame=replace(throttled.blame, ranks=[6]))
    wrong = replace(blind, verdict=msgspec.structs.replace(throttled.verdict, culprits=[Culprit(kind="rank", rank=6)]))
    assert "rank:5" in explain(wrong).roots


@pytest.mark.parametrize("kind", kinds())
def test_the_graph_is_sound_small_and_the_same_again(kind: str) -> None:
    analysis = analysed(SEEDS[0], kind)
    graph = explain(analysis)
    check(graph)
    assert explain(analysis) == graph
    assert (not graph.nodes) or analysis.verdict.anomaly != "none"
    for limit in (1, 5, 12):
        small = explain(analysis, nodes_max=limit)
        check(small, limit)
        assert set(small.roots) <= set(graph.roots)
        assert len(small.nodes) + small.pruned == len(graph.nodes)


def check(graph: CausalGraph, limit: int = NODES_MAX) -> None:
    """What holds of every graph and of every way to write it."""
    ids = [node.id for node in graph.nodes]
    assert len(set(ids)) == len(ids) <= limit
    assert {end for link in graph.links for end in (link.source, link.target)} <= set(ids)
    assert set(graph.roots) <= set(ids)
    assert not {link.source for link in graph.links if link.kind in CAUSAL} & set(graph.roots)
    again = msgspec.json.decode(to_json(graph), type=CausalGraph)
    assert again == graph
    plain = msgspec.json.decode(to_json(graph))
    assert nx.node_link_graph(plain, edges="links").number_of_edges() == len(graph.links)
    assert to_dot(graph).count(" -> ") >= len(graph.links)
    drawn = ET.fromstring(to_svg(graph))
    assert drawn.findtext(f"{SVG}title") == graph.title
    assert {element.tag.removeprefix(SVG) for element in drawn.iter()} <= {
        *("svg", "title", "desc", "style", "rect", "g", "text", "path")
    }


def test_victims_are_counted_each_once() -> None:
    analysis = analyse(job(512, dp=8, fault=Fault(stuck=77)))
    graph = explain(analysis)
    assert sum(node.count for node in graph.nodes if node.role == "victim") == 511
    assert [node.id for node in graph.nodes if node.role == "culprit"] == ["rank:77"]


def test_the_same_victims_in_two_communicators_are_one_crowd() -> None:
    analysis = analyse(job(8, dp=1, fault=Fault(slow=(3, 1.5))))
    graph = explain(analysis)
    assert graph.roots == ["rank:3"]
    (crowd,) = (node for node in graph.nodes if node.count > 1)
    assert crowd.count == 5
    assert len({link.target for link in graph.links if link.source == crowd.id}) == 2


def test_the_size_of_the_graph_does_not_grow_with_the_job() -> None:
    for fault in (Fault(stuck=700), Fault(slow=(700, 1.5))):
        sizes = [len(explain(analyse(job(world, dp=8, fault=fault))).nodes) for world in (1024, 16_384)]
        assert sizes[0] == sizes[1] <= 32


def test_a_throttled_gpu_is_explained_by_its_clock_and_by_the_functions_that_grew() -> None:
    graph = explain(analysed(SEEDS[0], "gpu_clock_throttle"))
    kind_of = {node.id: node.kind for node in graph.nodes}
    (root,) = graph.roots
    after = defaultdict(set)
    for link in graph.links:
        after[link.source, link.kind].add(link.target)
    (gpu,) = after[root, "runs-on"]
    assert {kind_of[key] for key in after[gpu, "runs-on"]} == {"node"}
    assert {kind_of[key] for key in after[gpu, "explained-by"]} == {"finding"}
    assert {kind_of[key] for key in after[root, "explained-by"]} <= {"function"}


def test_a_link_is_reached_through_nics_and_leads_to_its_switches() -> None:
    graph = explain(analysed(SEEDS[0], "link_fault"))
    kind_of = {node.id: node.kind for node in graph.nodes}
    through = {(kind_of[link.source], kind_of[link.target]) for link in graph.links if link.kind == "passes-through"}
    assert through == {("communicator", "nic"), ("nic", "link"), ("link", "switch")}
    flows = [node for node in graph.nodes if node.kind == "finding"]
    assert flows
    assert all("flows through" in node.details[0] for node in flows)


def test_more_victims_than_there_is_room_for_are_counted_with_their_like() -> None:
    draft = Draft()
    comm = draft.add("communicator:c", "communicator", "between", "c", importance=1)
    draft.add("rank:0", "rank", "culprit", "rank 0", importance=0)
    draft.link(comm, "rank:0", "waits-for", float("nan"), "s")
    others = draft.add(f"ranks:{comm}", "rank", "victim", "and 3 more ranks", importance=2, count=3)
    draft.link(others, comm, "waits-for")
    for rank in range(1, 5):
        draft.link(
            draft.add(f"rank:{rank}", "rank", "victim", f"rank {rank}", importance=3), comm, "waits-for", 1.5, "s"
        )
    graph = draft.finish("", nodes_max=4)
    assert [(node.label, node.count) for node in graph.nodes] == [
        ("c", 1),
        ("rank 0", 1),
        ("and 6 more ranks", 6),
        ("rank 1", 1),
    ]
    assert graph.links[0] == Link(source=comm, target="rank:0", kind="waits-for")
    assert (graph.roots, graph.pruned) == (["rank:0"], 3)


# -- hostile ---------------------------------------------------------------------------------------------------------


@given(incident=incidents())
@settings(max_examples=30, deadline=None)
def test_any_incident_has_a_graph(incident: Incident) -> None:
    check(explain(analyse(incident)))


@pytest.mark.parametrize("kind", kinds())
def test_an_incident_of_nonsense_has_a_graph(kind: str) -> None:
    incident = analysed(SEEDS[0], kind).lanes.incident
    for seed in range(4):
        check(explain(analyse(scrambled(incident, np.random.default_rng(seed)))))


def scrambled(incident: Incident, random: np.random.Generator) -> Incident:
    """The same with a part of all measured values replaced by those of other rows, unknowns and absurdities."""
    frames, world = incident.frames, incident.job.world_size

    def some(column: Floats) -> Floats:
        other = random.choice([np.nan, 0.0, 1.0, 1e6, 1e15], len(column))
        other = np.where(random.random(len(column)) < 0.5, random.permutation(column), other)
        return np.where(random.random(len(column)) < 0.15, other, column)

    numbers = ("seq", "done_seq", "age_ms", "send", "recv", "rounds", "dur_ms", "dur_min_ms", "gap_ms")
    odd = random.random(len(frames.frame)) < 0.15
    states = np.where(odd, random.integers(0, 5, len(odd)), frames.state).astype(np.uint8)
    peers = np.where(odd, random.integers(-1, world, len(odd)), frames.peer).astype(np.int32)
    columns: dict[str, Any] = {name: some(getattr(frames, name)) for name in numbers}
    return replace(
        incident,
        frames=replace(frames, state=states, peer=peers, **columns),
        process_state={int(rank): "TZXR"[int(rank) % 4] for rank in random.integers(0, world, 3)},
    )


def named_hostile(incident: Incident) -> Incident:
    """The same with names that try to get out of their text."""
    job_, comms = incident.job, incident.communicators
    return replace(
        incident,
        job=replace(job_, node_names=tuple(f"{HOSTILE}{name}" for name in job_.node_names)),
        communicators=replace(
            comms,
            ids=tuple(f"{HOSTILE}{name}" for name in comms.ids),
            algo=(HOSTILE,) * len(comms.ids),
            transport=(HOSTILE,) * len(comms.ids),
        ),
    )


@pytest.mark.parametrize("kind", ["gpu_clock_throttle", "process_stuck", "nic_degraded", "link_fault"])
def test_names_stay_text(kind: str) -> None:
    graph = explain(analyse(named_hostile(read(files(Drill(SEEDS[0], kind, Limits(world_max=64)))))))
    assert any("<script>" in node.label for node in graph.nodes)
    check(graph)
    assert "<script" not in to_svg(graph)
    assert all(text.isprintable() for node in graph.nodes for text in (node.id, node.label, *node.details))
    for line in to_dot(graph).splitlines():
        assert outside_quotes(line).isascii()
        assert "script" not in outside_quotes(line)


def outside_quotes(line: str) -> str:
    """What DOT reads as syntax: everything but quoted strings, in which only a bare quote ends the string."""
    kept, quoted, at = [], False, 0
    while at < len(line):
        if quoted and line[at] == "\\":
            at += 1
        elif line[at] == '"':
            quoted = not quoted
        elif not quoted:
            kept.append(line[at])
        at += 1
    assert not quoted
    return "".join(kept)


# -- picture ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["process_stuck", "wrong_order", "nic_down", "link_fault", "two_slow", "mixed"])
def test_nothing_in_the_picture_overlaps_and_links_pass_no_box(kind: str) -> None:
    for seed in SEEDS:
        graph = explain(analysed(seed, kind))
        layout = lay_out(graph, {node.id: (120.0, 40.0 + len(node.label)) for node in graph.nodes})
        boxes = list(layout.boxes.values())
        for number, one in enumerate(boxes):
            assert 0 <= one.x <= one.x + one.width <= layout.width + 0.01
            assert 0 <= one.y <= one.y + one.height <= layout.height + 0.01
            for other in boxes[:number]:
                apart_x = one.x + one.width < other.x or other.x + other.width < one.x
                assert apart_x or one.y + one.height < other.y or other.y + other.height < one.y
        for route in layout.routes:
            columns = [box.column for box in route.boxes]
            assert columns == list(range(columns[0], columns[0] + len(columns)))
            for passed in route.boxes[1:-1]:
                assert not any(
                    box.column == passed.column and box.y < passed.middle < box.y + box.height for box in boxes
                )


def test_effects_stand_left_of_causes() -> None:
    graph = explain(analysed(SEEDS[0], "process_stuck"))
    layout = lay_out(graph, {node.id: (100.0, 40.0) for node in graph.nodes})
    for link in graph.links:
        assert layout.boxes[link.source].x < layout.boxes[link.target].x


def test_ranks_that_wait_for_each_other_are_drawn_with_one_link_back() -> None:
    ring = ["rank:0", "communicator:a", "rank:1", "communicator:b"]
    nodes = [Node(id=key, kind=key.split(":")[0], role="victim", label=key) for key in ring]
    links = [Link(source=a, target=b, kind="waits-for") for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    graph = CausalGraph(title="a circle", nodes=nodes, links=links, roots=[])
    layout = lay_out(graph, dict.fromkeys(ring, (100.0, 40.0)))
    assert [route.turned for route in layout.routes].count(True) == 1
    check(graph)


def test_text_is_cut_to_fit() -> None:
    for text in ("", "a", "one two three four", "x" * 500, "指揮" * 40, "W" * 90):
        for lines in (1, 3):
            found = wrap(text, 100.0, 13.0, lines)
            assert len(found) <= lines
            assert all(width_of(line, 13.0) <= 100.0 for line in found)
            shown = "".join(found).removesuffix("…").replace(" ", "")
            assert text.replace(" ", "").startswith(shown)
    assert wrap("one two three four", 1000.0, 13.0, 2) == ["one two three four"]
    assert wrap("x" * 500, 100.0, 13.0, 2)[-1].endswith("…")


# -- command line ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    for name, content in files(Drill(SEEDS[0], "process_stuck", Limits(world_max=64))).items():
        (folder / name).write_bytes(content)
    return folder


def diagnose(bundle: Path, target: Path) -> Result:
    return CliRunner().invoke(app, ["diagnose", str(bundle), "--graph", str(target)])


@pytest.mark.parametrize("form", ["svg", "json", "dot"])
def test_diagnose_writes_the_graph_beside_the_verdict(bundle: Path, tmp_path: Path, form: str) -> None:
    target = tmp_path / f"graph.{form}"
    result = diagnose(bundle, target)
    assert result.exit_code == 0, result.output
    assert "process is stuck" in result.output
    graph = explain(analysed(SEEDS[0], "process_stuck"))
    assert target.read_text() == {"svg": to_svg(graph), "json": to_json(graph).decode(), "dot": to_dot(graph)}[form]


@pytest.mark.parametrize(("name", "why"), [("graph.png", "must end in"), ("missing/graph.svg", "cannot be written")])
def test_a_graph_that_cannot_be_written_is_the_callers_fault(bundle: Path, tmp_path: Path, name: str, why: str) -> None:
    result = diagnose(bundle, tmp_path / name)
    assert result.exit_code == ExitCode.USAGE
    assert why in result.output
    assert not (tmp_path / name).exists()


def test_an_unknown_weight_is_null_and_not_zero() -> None:
    incident = analysed(SEEDS[0], "process_stuck").lanes.incident
    silent = replace(incident, frames=replace(incident.frames, age_ms=np.full_like(incident.frames.age_ms, np.nan)))
    graph = explain(analyse(silent))
    waits = [link for link in graph.links if link.kind == "waits-for"]
    assert waits
    assert {(link.weight, link.unit) for link in waits} == {(None, None)}
