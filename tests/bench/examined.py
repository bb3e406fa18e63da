"""One drill examined: what a table needs of it, small enough to travel between processes."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.incident import Incident
from diagnosis.drill import Drill, Limits, draw
from tests.bench.baselines import METHODS, Blamed, engine
from tests.grading import Grade
from tests.judged import judge_drill

ENGINE: Final = "tocsin"
PLACED: Final = ("rank", "nic", "gpu", "node", "link", "switch")


class Progress:
    """A line on standard error now and then that says how far a part is."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.done, self.began = name, count, 0, time.monotonic()

    def step(self, failed: str) -> None:
        """One more drill; `failed`: what went wrong with it, "" nothing."""
        self.done += 1
        if failed or self.done == self.count or self.done % max(1, self.count // 20) == 0:
            spent = time.monotonic() - self.began
            sys.stderr.write(f"{self.name}: {self.done} of {self.count} drills, {spent:.0f} s {failed}\n")


@dataclass(frozen=True, slots=True)
class Task:
    """A drill to be made. `kind` None: drawn by weight. `limits`: arguments of `Limits`. `point`: of a curve."""

    seed: int
    kind: str | None
    limits: dict[str, Any]
    peers: bool = False
    point: tuple[str, float] = ("", 0.0)


@dataclass(frozen=True, slots=True)
class Score:
    """How one method did where ranks or nodes are guilty: `exact`: named these and no others; `named`: named them, and
    perhaps others; `class_ok`; `innocents`: ranks that were named and are not guilty."""

    exact: bool
    named: bool
    class_ok: bool
    innocents: int


@dataclass(frozen=True, slots=True)
class Row:
    """A drill with its grade. `class_`: of the truth ("job-wide", "no fault" where it has none); `place`: what is
    guilty ("" nobody); `said`: cause of the first culprit ("nobody"); `somebody`: a place was named; `lost`: share of
    the step that the fault really cost; `to_drain`, `drained`: a drain is right, and exactly the guilty nodes would be
    drained; `failed`: what went wrong where there is no verdict."""

    task: Task
    kind: str = ""
    class_: str = ""
    place: str = ""
    causes: tuple[str, ...] = ()
    anomaly: str = ""
    said_anomaly: str = ""
    said: str = ""
    somebody: bool = False
    lost: float = np.nan
    to_drain: bool = False
    drained: bool = False
    grade: Grade | None = None
    scores: tuple[tuple[str, Score], ...] = ()
    failed: str = ""


def examine(task: Task) -> Row:
    """The drill, read, judged and graded; a job that cannot have this fault is a row that says so."""
    try:
        limits = Limits(**task.limits)
        drill = draw(task.seed, limits) if task.kind is None else Drill(task.seed, task.kind, limits)
    except OperatorFault as fault:
        return Row(task, task.kind or "", failed=f"no such drill: {fault}")
    done = judge_drill(drill)
    truth = drill.truth
    guilty = bool(truth["ranks"] or truth["nodes"] or truth["links"])
    scores: list[tuple[str, Score]] = []
    if task.peers:
        said = {ENGINE: engine(done.incident, done.verdict)}
        said |= {name: method(done.incident) for name, method in METHODS.items()}
        scores = [(name, _score(truth, done.incident, blamed)) for name, blamed in said.items()]
    culprits = done.verdict.culprits
    return Row(
        task=task,
        kind=drill.kind,
        class_=truth["class"] or ("no fault" if truth["anomaly"] == "none" else "job-wide"),
        place=truth["kind"] if guilty else "",
        causes=tuple(truth["causes"]),
        anomaly=truth["anomaly"],
        said_anomaly=done.verdict.anomaly,
        said=culprits[0].cause if culprits else "nobody",
        somebody=any(culprit.kind in PLACED for culprit in culprits),
        lost=_lost(drill),
        to_drain=truth["action"] == "drain",
        drained=set(done.verdict.action.nodes) == set(truth["nodes"]),
        grade=done.grade,
        scores=tuple(scores),
    )


def _lost(drill: Drill) -> float:
    """Share of the step time that is lost on the whole from the onset on; NaN where steps do not go on."""
    starts = np.array([start.max() for start in drill.timeline.starts])
    onset = drill.timeline.onset
    before, after = np.diff(starts[1 : onset + 1]), np.diff(starts[onset:])
    if drill.truth["anomaly"] != "slow" or not len(before) or not len(after) or not np.isfinite(after).all():
        return np.nan
    return float(1.0 - before.mean() / after.mean())


def _score(truth: dict[str, Any], incident: Incident, blamed: Blamed) -> Score:
    guilty, named = set(truth["ranks"]), set(blamed.ranks)
    if truth["kind"] == "node" and truth["nodes"]:
        node = incident.job.node
        names = {incident.job.node_names[node[rank]] for rank in named if node[rank] >= 0}
        guilty = {
            rank for rank in range(incident.job.world_size) if incident.job.node_names[node[rank]] in truth["nodes"]
        }
        exact, found = names == set(truth["nodes"]), names >= set(truth["nodes"])
    else:
        exact, found = named == guilty, named >= guilty
    somebody = bool(guilty)
    class_ok = truth["class"] is None or blamed.class_ == truth["class"] or blamed.class_ in truth["any_of"]
    return Score(exact and somebody, found and somebody, class_ok, len(named - guilty))


def examine_all(tasks: list[Task], processes: int, progress: Progress) -> list[Row]:
    """All drills, in the order of `tasks`. A crash is a row that says so."""
    rows: dict[int, Row] = {}
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(examine, task): at for at, task in enumerate(tasks)}
        for future in as_completed(futures):
            at = futures[future]
            fault = future.exception()
            rows[at] = future.result() if fault is None else Row(tasks[at], failed=f"crash: {fault!r}")
            progress.step(rows[at].failed)
    return [rows[at] for at in range(len(tasks))]
