"""How the processes of a job ended, as the kernel of their node says.

Unknown is a value of its own: who was ended by a signal has no exit code, and where neither is told nobody saw how.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

GONE: Final = "GONE"
"""All processes have ended and Slurm still takes the job for running: its script goes on, or waits for something."""
REQUEUED: Final = "REQUEUED"
"""The attempt is over and Slurm has put the job back into its queue, for whatever reason."""
ENDED_BADLY: Final = frozenset({"FAILED", "NODE_FAIL", "OUT_OF_MEMORY"})
"""Slurm's words for a job that ended by itself. One that somebody cancelled, that was preempted, that had reached its
time limit or its end is none."""
ENDED_WORDS: Final = ENDED_BADLY | {GONE, REQUEUED}


class ExitFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's process that has ended. `ended_ms`: when, from any zero that is the same for all ranks; exact among
    those of one node, and between nodes as well as their reports' ages tell. `oom_kills`: processes of its cgroup that
    were ended for want of memory since it was first seen."""

    world_rank: int
    pid: int = 0
    ended_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, msgspec.Meta(ge=1, le=127)] | None = None
    oom_kills: Annotated[int, msgspec.Meta(ge=0)] | None = None
