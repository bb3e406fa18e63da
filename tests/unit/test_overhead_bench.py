"""What the A/B of the overhead says of differences that are known."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.paired import difference

NOISE = 0.05


def measured(true: float, launches: int, rounds: int, seed: int = 1) -> list[list[tuple[float, float]]]:
    """Pairs whose second is greater by `true`, under noise that both share and noise that each has."""
    generator = np.random.default_rng(seed)
    shared = generator.lognormal(0.0, 10 * NOISE, (launches, rounds))
    without, with_ = (shared * generator.lognormal(0.0, NOISE, (launches, rounds)) for _ in range(2))
    return [list(zip(a.tolist(), (b * (1 + true)).tolist(), strict=True)) for a, b in zip(without, with_, strict=True)]


def test_a_difference_is_found_with_its_size() -> None:
    found = difference(measured(0.03, launches=20, rounds=30))
    assert found.low_pct > 0
    assert found.low_pct < 3 < found.high_pct
    assert found.smallest_seen_pct < 3


def test_no_difference_is_told_as_one_that_could_be_none() -> None:
    found = difference(measured(0.0, launches=20, rounds=30))
    assert found.low_pct < 0 < found.high_pct


def test_more_rounds_see_smaller_differences() -> None:
    few, many = (difference(measured(0.0, launches, rounds=10)).smallest_seen_pct for launches in (4, 40))
    assert many < few / 2


def test_rounds_that_other_work_came_into_say_nothing() -> None:
    pairs = measured(0.0, launches=10, rounds=20)
    disturbed = [[(a, 5 * b) if number == 3 else (a, b) for number, (a, b) in enumerate(rounds)] for rounds in pairs]
    assert abs(difference(disturbed).pct - difference(pairs).pct) < 1


def test_launches_that_differ_make_the_answer_less_sure_whatever_the_rounds_say() -> None:
    alike = measured(0.0, launches=6, rounds=50)
    apart = [[(a, b * factor) for a, b in rounds] for rounds, factor in zip(alike, (1, 1.2) * 3, strict=True)]
    assert difference(apart).error_pct > 3 * difference(alike).error_pct


def test_a_launch_that_tells_nothing_of_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than two"):
        difference([[(1.0, 1.0), (1.0, 1.0)], [(1.0, 1.0)]])
