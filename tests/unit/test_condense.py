"""Events condensed: whose time it is, what was hidden, which phase it was, and how resources were used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.contracts.summary import COMM, COMPUTE, FUNCTION_DTYPE, HOST, KINDS, MEMCPY, PARTS, table
from diagnosis.evidence.condense import Condensed, Events, Phase, Window, condense
from diagnosis.evidence.resource_use import Samples, critical_part, mean_and_deviation

MS = 1_000_000
Row = tuple[str, int, int, int, str, Phase]
"""Name, kind, start and end in ms, lane ("gpu..." does not nest), phase."""


def events(rows: list[Row]) -> Events:
    """Columns of the rows."""
    names = list(dict.fromkeys(row[0] for row in rows))
    lanes = list(dict.fromkeys(row[4] for row in rows))
    return Events(
        names=tuple(names),
        name=np.array([names.index(row[0]) for row in rows], np.int64),
        kind=np.array([row[1] for row in rows], np.int64),
        start=np.array([row[2] * MS for row in rows], np.int64),
        end=np.array([row[3] * MS for row in rows], np.int64),
        lane=np.array([lanes.index(row[4]) for row in rows], np.int64),
        nests=np.array([not row[4].startswith("gpu") for row in rows], np.bool_),
        phase=np.array([row[5] for row in rows], np.int64),
        bytes=np.full(len(rows), np.nan),
        members=np.full(len(rows), np.nan),
    )


def told(condensed: Condensed, column: str) -> dict[str, float]:
    """A column by the name of the function."""
    rows, _ = table(condensed.summary)
    return {condensed.names[int(row["name"])][1]: float(row[column]) for row in rows}


STEP: list[Row] = [
    ("train", HOST, 0, 100, "main", Phase.OTHER),
    ("load", HOST, 0, 10, "main", Phase.DATA),
    ("fwd", COMPUTE, 10, 30, "gpu 7", Phase.FORWARD),
    ("bwd", COMPUTE, 30, 70, "gpu 7", Phase.BACKWARD),
    ("nccl:AllReduce", COMM, 50, 90, "gpu 8", Phase.BACKWARD),
    ("Memcpy HtoD", MEMCPY, 85, 95, "gpu 9", Phase.OTHER),
    ("adam", COMPUTE, 92, 98, "gpu 7", Phase.OPTIMIZER),
]


def test_the_critical_path_goes_by_the_order_of_kinds() -> None:
    done = condense(events(STEP), Window(0, 100 * MS, 1, 5, 5), 0)
    beta = {name: value / PARTS for name, value in told(done, "beta").items()}
    assert beta == pytest.approx(
        {
            "load": 0.10,
            "fwd": 0.20,
            "bwd": 0.40,
            "nccl:AllReduce": 0.15,  # 70 to 85: what neither the backward pass nor the copy hides
            "Memcpy HtoD": 0.07,  # 85 to 92
            "adam": 0.06,
            "train": 0.02,  # 98 to 100
        }
    )


def test_phases_are_the_step_and_overlap_is_what_both_did() -> None:
    done = condense(events(STEP), Window(0, 100 * MS, 1, 5, 5), 0)
    assert done.summary.phases == pytest.approx(
        {
            "forward_compute_ms": 27,  # with the copy
            "backward_compute_ms": 40,
            "optimizer_step_ms": 6,
            "comm_barrier_wait_ms": 15,
            "data_ms": 10,
            "checkpoint_ms": 0,
            "host_ms": 2,
            "idle_ms": 0,
        }
    )
    assert done.summary.overlap is not None
    assert (done.summary.overlap.compute_ms, done.summary.overlap.comm_ms, done.summary.overlap.both_ms) == (66, 40, 20)


def test_what_the_window_cuts_counts_with_what_is_inside() -> None:
    done = condense(events(STEP), Window(20 * MS, 60 * MS, 2), 0)
    assert told(done, "total_ns") == {
        "train": 40 * MS,
        "fwd": 10 * MS,
        "bwd": 30 * MS,
        "nccl:AllReduce": 10 * MS,
    }
    assert done.summary.step_ms == 20
    assert sum(done.summary.phases.values()) == pytest.approx(20)


def test_a_function_that_waits_for_what_it_called_does_nothing() -> None:
    rows: list[Row] = [
        ("accumulate", COMPUTE, 0, 10, "main", Phase.BACKWARD),
        ("allreduce", HOST, 2, 9, "main", Phase.BACKWARD),
        ("gloo:all_reduce", COMM, 4, 8, "gpu-like", Phase.OTHER),
    ]
    done = condense(events(rows), Window(0, 10 * MS, 1), 0)
    assert told(done, "total_ns") == {"accumulate": 3 * MS, "allreduce": 7 * MS, "gloo:all_reduce": 4 * MS}
    assert told(done, "beta") == {"accumulate": 0.3 * PARTS, "allreduce": 0.3 * PARTS, "gloo:all_reduce": 0.4 * PARTS}


def test_without_steps_times_are_of_the_window() -> None:
    done = condense(events(STEP), Window(0, 200 * MS), 0)
    assert done.summary.step_ms is None
    assert done.summary.steps is None
    assert done.summary.phases["idle_ms"] == 100


def test_nothing_seen_is_idle() -> None:
    done = condense(events([]), Window(0, 50 * MS, 5), 0)
    assert done.summary.phases["idle_ms"] == 10
    assert len(table(done.summary)[0]) == 0


_rows = st.lists(
    st.builds(
        lambda name, kind, at, lasts, lane: (name, kind, at, at + lasts, lane, Phase.OTHER),
        st.sampled_from("abc"),
        st.integers(0, 3),
        st.integers(-5, 30),
        st.integers(0, 20),
        st.sampled_from(["main", "other", "gpu 1"]),
    ),
    max_size=30,
)


@given(_rows)
def test_every_moment_has_one_owner(rows: list[Row]) -> None:
    done = condense(events(rows), Window(0, 30 * MS, 1), 0)
    covered = sum(any(row[2] <= now < row[3] for row in rows) for now in range(30))
    beta = told_sum(done) / PARTS
    assert beta == pytest.approx(covered / 30, abs=1e-5)
    assert sum(done.summary.phases.values()) == pytest.approx(30)


def told_sum(done: Condensed) -> float:
    """All shares of the critical path."""
    return float(table(done.summary)[0]["beta"].astype(np.float64).sum())


def test_a_collectives_edges_are_not_its_critical_duration() -> None:
    waits_then_moves = np.array([0, 0.01, 0, 0, 0, 0, 0, 0.9, 0.8, 0, 0.9, 0.9, 0, 0, 0])
    part = critical_part(waits_then_moves)
    assert (part.start, part.stop) == (7, 12)
    assert critical_part(np.zeros(4)) == slice(0, 4)


@given(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=40))
def test_a_critical_duration_holds_most_work_with_the_least_idle_run(use: list[float]) -> None:
    values = np.array(use)
    part = critical_part(values)
    if values.sum() == 0:
        return
    assert values[part].sum() >= 0.8 * values.sum() - 1e-9
    assert values[part][0] > 0 < values[part][-1]

    def longest_idle(piece: np.ndarray) -> int:
        runs = "".join("0" if one == 0 else "1" for one in piece).split("1")
        return max(map(len, runs))

    bridged = longest_idle(values[part])
    for first in range(len(values)):
        for last in range(first + 1, len(values) + 1):
            piece = values[first:last]
            if piece.sum() >= 0.8 * values.sum() + 1e-9:
                assert longest_idle(np.trim_zeros(piece)) >= bridged


def test_mu_and_sigma_are_of_the_kinds_resource() -> None:
    at = np.arange(0, 100 * MS, MS)
    use = np.where((at >= 50 * MS) & (at < 90 * MS), 0.5, 0.0)
    done = condense(events(STEP), Window(0, 100 * MS, 1), 0, samples={COMM: Samples(at, use)})
    assert told(done, "mu")["nccl:AllReduce"] == 0.5 * PARTS
    assert told(done, "sigma")["nccl:AllReduce"] == 0
    assert told(done, "mu")["bwd"] == np.iinfo(FUNCTION_DTYPE["mu"]).max


def test_short_executions_take_the_use_at_their_ends() -> None:
    samples = Samples(np.array([0, 100]), np.array([0.0, 1.0]))
    mu, sigma = mean_and_deviation(samples, np.array([0, 1, 2]), 4, np.array([40, 50, 500]), np.array([60, 50, 600]))
    assert mu[:2].tolist() == [0.5, 0.5]
    assert sigma[:2] == pytest.approx([0.1, 0.0])
    assert np.isnan(mu[2:]).all()  # after the last sample; no execution


def test_kinds_keep_their_order() -> None:
    assert KINDS == ("compute", "memcpy", "comm", "host")
