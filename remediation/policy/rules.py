"""The policy file: what tocsin may do by itself, how much of it, and when. Every key has a default that does less.

The defaults observe: decisions are made, written down and told, and nothing is done. Durations are seconds.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NODE_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Share = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Budget(_Section):
    """`[budget]`: how much may be done. What Slurm or a person holds does not count, what tocsin holds does."""

    nodes_held_max: int = Field(2, ge=0, description="nodes that tocsin may hold drained or down at one time")
    nodes_held_pct_max: float = Field(
        5.0, ge=0, le=100, description="and the share of all GPU nodes, rounded down: 5 % of 8 nodes is none"
    )
    requeues_per_job_max: int = Field(2, ge=0, description="requeues of one job in 24 hours")
    acts_per_hour_max: int = Field(12, ge=0, description="drains, downs and requeues together")


class Hang(_Section):
    """`[hang]`: a job of which nothing moves any more."""

    act: Literal["requeue", "notify"] = Field(
        "requeue", description="requeue away from the culprit's node, or only tell"
    )
    dwell_s: float = Field(30.0, ge=0, description="the verdict must have stood for so long")
    confidence_min: Share = Field(0.8, description="of every culprit that is acted upon")


class Slow(_Section):
    """`[slow]`: a job that moves, but too slowly. Ending it has a price, so there is more to ask."""

    act: Literal["drain_requeue", "notify"] = Field(
        "drain_requeue", description="drain convicted hardware and requeue without it, or only tell"
    )
    dwell_s: float = Field(120.0, ge=0, description="the verdict must have stood for so long")
    confidence_min: Share = Field(0.9, description="of every culprit that is acted upon")
    checkpoint_signal: Literal["none", "USR1", "USR2", "HUP", "INT", "TERM"] | None = Field(
        None, description="tells a job to save its state before it is requeued; the word none means without"
    )
    checkpoint_grace_s: float = Field(60.0, ge=0, description="time to save its state after that signal")
    restart_cost_s: float = Field(900.0, ge=0, description="what a restart costs: lost steps and starting up")
    horizon_s: float = Field(
        86_400.0, gt=0, description="act only where the time lost over so long exceeds restart_cost_s"
    )


class Completing(_Section):
    """`[completing]`: a requeued job cannot start while a node has not let go of its old processes."""

    down_after_s: float = Field(
        60.0,
        ge=1,
        description="then such a node is set DOWN, if only nodes to be avoided are left; longer than Slurm's KillWait",
    )


class Limits(_Section):
    """`[limits]`: when to stop waiting, and how old knowledge may be."""

    world_age_s_max: float = Field(15.0, gt=0, description="nothing is done on an older picture of the cluster")
    settle_s: float = Field(10.0, ge=0, description="an act of unknown outcome may still take effect for so long")
    tries_max: int = Field(3, ge=1, le=10, description="of one act, then a person must look")
    retry_after_s: float = Field(5.0, ge=0, description="before the second try; doubles with each")
    completing_s_max: float = Field(900.0, gt=0, description="a requeued job must have left its old nodes")
    start_s_max: float = Field(900.0, gt=0, description="and be running again, or it is left to Slurm's queue")
    stepping_s_max: float = Field(900.0, gt=0, description="and its ranks must have been seen to advance")
    old_ranks_s_max: float = Field(3600.0, gt=0, description="a node set DOWN is left to a person after so long")


class Policy(_Section):
    """The whole file."""

    mode: Literal["observe", "act"] = Field("observe", description="observe: decide and tell; act: also do it")
    paused: bool = Field(False, description="true: do nothing to the cluster, whatever the mode")
    protected_nodes: list[Annotated[str, Field(pattern=NODE_NAME)]] = Field(
        [], description="names of nodes that are never drained and never set DOWN"
    )
    budget: Budget = Budget()
    hang: Hang = Hang()
    slow: Slow = Slow()
    completing: Completing = Completing()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _price_is_known(self) -> Policy:
        if self.mode == "act" and self.slow.act == "drain_requeue" and self.slow.checkpoint_signal is None:
            raise ValueError(
                'slow.checkpoint_signal should be set where mode is "act" and slow.act "drain_requeue":'
                ' the signal on which jobs save their state, or "none"'
            )
        return self
