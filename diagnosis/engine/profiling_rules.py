"""When a job is profiled, and how much of it. All settable while jobs run; times in seconds, shares in 0..1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TriggerRules:
    """When a job's steps look ill enough to be profiled (`engine.trigger`).

    Slower: over the newest `confirm_steps` steps, in at least `confirm_blocks` blocks, a step takes some times what it
    took at best lately, and `z_min` deviations more. Blocks are of `block_steps` steps, which sees great changes soon
    (`soon_ratio` times), and of `long_block_steps` (EROICA's N = 50), which sees small ones (`slower_ratio` times). The
    level before is known after `learn_blocks` blocks; the first `warmup_steps` of each rank say nothing. A deviation is
    never taken to be less than `spread_min` of a step.
    Stalled: nothing has moved for `stall_ratio` steps (EROICA's 5) inside a step; between two steps, where evaluation
    and checkpoints are, for `pause_steps` and `pause_factor` times the longest pause that ended so far. Never before
    `stall_floor_s`. Words older than `stale_s` say nothing of what stands.
    One event: what ranks say within `gather_s`, or `long_block_steps` steps, is one; `share_min` of them must say it.
    For `again_s` another is one only where steps have become `again_ratio` times as long as in the last.
    """

    slower_ratio: float = 1.05
    soon_ratio: float = 1.15
    z_min: float = 3.0
    spread_min: float = 0.01
    block_steps: int = 5
    long_block_steps: int = 50
    confirm_steps: int = 25
    confirm_blocks: int = 3
    learn_blocks: int = 6
    warmup_steps: int = 10
    stall_ratio: float = 5.0
    stall_floor_s: float = 10.0
    pause_steps: float = 30.0
    pause_factor: float = 1.5
    stale_s: float = 15.0
    share_min: float = 0.1
    gather_s: float = 30.0
    again_s: float = 600.0
    again_ratio: float = 1.2


@dataclass(frozen=True, slots=True)
class WindowRules:
    """Which steps of a job are profiled, and how often that may be (`engine.windows`).

    A window lasts about `window_s`, in `steps_min` to `steps_max` steps, and never longer than `window_max_s` where
    that leaves a step; a person may ask for `steps_asked_max`. It begins when the nodes had `lead_s` and `lead_steps`
    steps to arm their ranks. It is over when all have answered; `grace_s` after a share of `quorum` of those whose
    nodes report has; or at last `answer_s` after it should have ended, were all of it `slack` times as slow. Words
    older than `stale_s` say nothing.
    Budget: the first `free_windows` of a job, then `budget_share` of the steps that it made in the last `budget_s`.
    What a person asks for is never refused for its cost, and does not count.
    """

    window_s: float = 2.0
    window_max_s: float = 600.0
    steps_min: int = 3
    steps_max: int = 10
    steps_asked_max: int = 100
    lead_s: float = 3.0
    lead_steps: float = 2.0
    quorum: float = 0.9
    grace_s: float = 10.0
    answer_s: float = 30.0
    slack: float = 3.0
    stale_s: float = 15.0
    free_windows: int = 3
    budget_share: float = 0.002
    budget_s: float = 86_400.0
