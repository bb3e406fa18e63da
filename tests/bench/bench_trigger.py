"""When a job is taken for slower: false alarms on healthy jobs and steps until a fault is seen, beside published rules.

EROICA's: the mean of the latest 50 steps over the shortest of the latest 200 by 5 %. Robust z: one step 3 deviations
above the middle of the latest 200. Moving average: one step 1.8 times the mean of the latest 50. Those three see every
single step; ours is asked with single steps, and with windows of ten as nodes tell them. An alarm is one that comes
after at least 50 steps without. A fault counts as seen within 300 steps; a rule that has rung in the 50 steps before it
begins does not tell it.
Then the time that one look takes with many ranks. `python -m tests.bench.bench_trigger [SEEDS]`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from diagnosis.engine.pace import Bools, Floats
from diagnosis.engine.profiling_rules import TriggerRules
from diagnosis.engine.trigger import WINDOW_DTYPE, JobTrigger
from tests.bench.tables import table
from tests.stepseries import HEALTHY, Teller, slower

SEEDS = 4
STEPS = 4000
BEGIN = 1000
SEEN_WITHIN = 300
QUIET = 50
FACTORS = (1.05, 1.1, 1.3, 2.0, 5.0)
Alarms = Sequence[int]
"""How many steps had been seen each time a rule rang."""


def ours(size: int) -> Callable[[Floats, int], Alarms]:
    """The trigger, with windows of so many steps."""

    def alarms(steps: Floats, seed: int) -> Alarms:
        trigger, found, told = JobTrigger(TriggerRules(again_s=0.0)), [], 0
        for now, windows in Teller(ranks=2, size=size).tell(steps, np.random.default_rng(seed)):
            told += size
            trigger.observe(windows)
            if trigger.look(now) is not None:
                found.append(told)
        return found

    return alarms


def _after(first: int, rang: Bools) -> Alarms:
    return (first + np.flatnonzero(rang)).tolist()


def eroica(steps: Floats, seed: int) -> Alarms:
    """Mean of the latest 50 over the shortest of the latest 200."""
    del seed
    recent = np.lib.stride_tricks.sliding_window_view(steps, 200)
    return _after(200, recent[:, -50:].mean(axis=1) > 1.05 * recent.min(axis=1))


def robust_z(steps: Floats, seed: int) -> Alarms:
    """One step over the middle of the 200 before."""
    del seed
    recent = np.lib.stride_tricks.sliding_window_view(steps, 200)
    middle = np.median(recent, axis=1)
    apart = 1.4826 * np.median(np.abs(recent - middle[:, None]), axis=1)
    return _after(201, steps[200:] > (middle + 3 * apart)[:-1])


def moving_average(steps: Floats, seed: int) -> Alarms:
    """One step over the mean of the 50 before."""
    del seed
    recent = np.lib.stride_tricks.sliding_window_view(steps, 50)
    return _after(51, steps[50:] > 1.8 * recent.mean(axis=1)[:-1])


RULES: dict[str, Callable[[Floats, int], Alarms]] = {
    "ours, windows of 10": ours(10),
    "ours, single steps": ours(1),
    "EROICA's mean of 50": eroica,
    "robust z > 3": robust_z,
    "1.8 x moving average": moving_average,
}


def healthy(rule: Callable[[Floats, int], Alarms], kind: str, seeds: int) -> str:
    """False alarms in 10,000 steps; and for how much of the time the rule rings, where it does for long."""
    alarms, ringing = 0, 0
    for seed in range(seeds):
        rang = np.array(rule(HEALTHY[kind](np.random.default_rng(seed), STEPS), seed))
        alarms += int((np.diff(rang, prepend=-QUIET) >= QUIET).sum())
        ringing += len(rang)
    share = ringing / seeds / STEPS
    return f"{alarms / seeds / STEPS * 10_000:.1f}" + (f" (rings {100 * share:.0f} %)" if share > 0.1 else "")


def seen(rule: Callable[[Floats, int], Alarms], kind: str, factor: float, seeds: int) -> str:
    """Steps until a fault is seen: the middle and the longest; how often it was not, or the rule had rung before."""
    delays, before = [], 0
    for seed in range(seeds):
        steps = HEALTHY[kind](np.random.default_rng(seed), BEGIN + SEEN_WITHIN)
        rang = np.array(rule(slower(steps, BEGIN, factor), seed), np.int64) - BEGIN
        if ((rang > -QUIET) & (rang <= 0)).any():
            before += 1
        elif (rang > 0).any():
            delays.append(int(rang[rang > 0].min()))
    words = [f"{np.median(delays):.0f} ({max(delays)})"] if delays else []
    missed = seeds - len(delays) - before
    words += [f"{missed} of {seeds} missed"] * bool(missed) + [f"{before} of {seeds} rang before"] * bool(before)
    return ", ".join(words)


def cost(ranks: int) -> str:
    """Milliseconds for a window of each rank and a look, while nothing is wrong."""
    trigger, rng, spent = JobTrigger(), np.random.default_rng(0), []
    for at in range(20):
        windows = np.zeros(ranks, WINDOW_DTYPE)
        windows["rank"], windows["steps"], windows["first_step"] = np.arange(ranks), 10, 10 * at
        windows["ms_per_step"] = rng.normal(1000, 20, ranks)
        windows["ended_at"] = 10.0 * at + 10
        begin = perf_counter()
        trigger.observe(windows)
        trigger.look(10.0 * at + 10)
        spent.append(1e3 * (perf_counter() - begin))
    return f"{np.median(spent):.1f} ms, at most {max(spent):.1f} ms"


def main() -> None:
    """Print the tables."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    lines = [[name, *(healthy(rule, kind, seeds) for kind in HEALTHY)] for name, rule in RULES.items()]
    sys.stdout.write(f"False alarms in 10,000 healthy steps ({seeds} jobs of {STEPS} steps each):\n\n")
    sys.stdout.write(table(("", *HEALTHY), lines))
    for kind in ("steady", "noisy", "uneven"):
        sys.stdout.write(f"\nSteps until a fault is seen, {kind}: middle (longest) of {seeds} jobs\n\n")
        rows = [[name, *(seen(rule, kind, factor, seeds) for factor in FACTORS)] for name, rule in RULES.items()]
        sys.stdout.write(table(("", *(f"{factor} x" for factor in FACTORS)), rows))
    sys.stdout.write("\n")
    for ranks in (8, 1_000, 100_000):
        sys.stdout.write(f"{ranks:,} ranks, one window of each, and a look: {cost(ranks)}\n")


if __name__ == "__main__":
    main()
