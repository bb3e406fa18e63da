"""No request is taken twice; what comes in order, or a little out of it, is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.ingest.replay import ReplayGuard
from controller.store.base import REPLAY_WINDOW, NodeMark
from diagnosis.contracts.credential import Claim
from diagnosis.contracts.errors import AgentFault


def claim(epoch: int, counter: int, node: str = "gpu001") -> Claim:
    return Claim(node, epoch, counter, 0, "0" * 64)


def takes(guard: ReplayGuard, epoch: int, counter: int) -> bool:
    try:
        guard.take(claim(epoch, counter), 0.0)
    except AgentFault:
        return False
    return True


NUMBERS = st.tuples(st.integers(1, 3), st.integers(0, 3 * REPLAY_WINDOW))


@given(st.lists(NUMBERS, max_size=200), st.integers(0, 199))
def test_nothing_is_taken_twice_even_when_the_marks_are_read_back_in_between(
    requests: list[tuple[int, int]], restart_at: int
) -> None:
    marks: dict[str, NodeMark] = {}
    guard = ReplayGuard(marks)
    taken: list[tuple[int, int]] = []
    for number, (epoch, counter) in enumerate(requests):
        if number == restart_at:
            guard = ReplayGuard(dict(marks))
        if takes(guard, epoch, counter):
            taken.append((epoch, counter))
    assert len(set(taken)) == len(taken)
    epochs = [epoch for epoch, _ in taken]
    assert epochs == sorted(epochs)


@given(st.permutations(range(REPLAY_WINDOW)))
def test_all_requests_that_are_under_way_together_are_taken_in_any_order(order: list[int]) -> None:
    guard = ReplayGuard({})
    assert all(takes(guard, 1, counter) for counter in order)


def test_marks_fit_into_the_state() -> None:
    guard = ReplayGuard({})
    for counter in [*range(100), 2**63 - 1]:
        mark = guard.take(claim(2**63 - 1, counter), 0.0)
        assert 0 < mark.seen < 2**63
    with pytest.raises(AgentFault) as caught:
        guard.take(claim(2**63, 0), 0.0)
    assert caught.value.reason == "credential"


def test_nodes_do_not_disturb_each_other() -> None:
    guard = ReplayGuard({})
    guard.take(claim(5, 50), 0.0)
    assert guard.take(claim(1, 1, "gpu002"), 0.0).counter == 1
