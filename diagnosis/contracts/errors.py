"""Whose fault is it? The type of an error answers that, its text says what to do.

`AgentFault`     a node daemon or a training process sent something wrong (never trusted, never fatal)
`OperatorFault`  a person's configuration or command is wrong (all faults of a file are listed at once)
`SlurmFault`     Slurm refused, failed or did not answer in time (the state is then unknown, never assumed)
A plain Python exception is a bug in tocsin.
"""

from __future__ import annotations


class TocsinError(Exception):
    """Base of the three. `reason` is a short stable word for counters; `str(error)` is for people."""

    def __init__(self, text: str, *, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class AgentFault(TocsinError):
    """Input from a node or a job that this side must refuse. Counted by `reason`."""


class OperatorFault(TocsinError):
    """Wrong configuration or command; the text names file, line and key where there are any."""


class SlurmFault(TocsinError):
    """A call to Slurm failed or ran past its deadline; what it would have told is unknown."""
