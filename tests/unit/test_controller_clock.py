"""The controller's clock against a system clock that is moved."""

from __future__ import annotations

from controller.clock import SteadyClock


def test_a_step_of_the_wall_clock_moves_nothing() -> None:
    wall, running = [1_000_000.0], [50.0]
    clock = SteadyClock(lambda: wall[0], lambda: running[0])
    assert clock() == 1_000_000.0
    wall[0] -= 3600.0
    running[0] += 5.0
    assert clock() == 1_000_005.0
    wall[0] += 86_400.0
    assert clock() == 1_000_005.0
