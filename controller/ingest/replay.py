"""No request of a node is taken twice, not even across a restart of the controller.

A claim names the daemon's life (`epoch`) and a number within it (`counter`). An older life is refused; within the
newest life a sliding window (RFC 4303, section 3.4.3) lets the requests of a daemon's few connections overtake each
other while each number is taken once. Marks are written to disk before a request is answered.
"""

from __future__ import annotations

from typing import Final

from controller.store.base import REPLAY_WINDOW, NodeMark
from diagnosis.contracts.credential import Claim
from diagnosis.contracts.errors import AgentFault

_WINDOW_MASK: Final = (1 << REPLAY_WINDOW) - 1
_NUMBER_MAX: Final = (1 << 63) - 1


class ReplayGuard:
    """The newest mark of each node. Only proven claims may be shown to it."""

    def __init__(self, marks: dict[str, NodeMark]) -> None:
        self._marks = marks

    def take(self, claim: Claim, at: float) -> NodeMark:
        """The node's new mark, which the caller writes down. Raises AgentFault (reason `replayed`)."""
        if max(claim.epoch, claim.counter) > _NUMBER_MAX:
            raise AgentFault("epoch or counter out of range", reason="credential")
        known = self._marks.get(claim.node)
        if known is None or claim.epoch > known.epoch:
            mark = NodeMark(epoch=claim.epoch, counter=claim.counter, at=at)
        elif claim.epoch < known.epoch:
            raise AgentFault(f"epoch {claim.epoch} has ended, {known.epoch} is the newest", reason="replayed")
        else:
            mark = _advanced(known, claim.counter, at)
        self._marks[claim.node] = mark
        return mark


def _advanced(known: NodeMark, counter: int, at: float) -> NodeMark:
    ahead = counter - known.counter
    if ahead > 0:
        seen = (known.seen << ahead | 1) & _WINDOW_MASK if ahead < REPLAY_WINDOW else 1
        return known._replace(counter=counter, seen=seen, at=at)
    bit = 1 << -ahead
    if -ahead >= REPLAY_WINDOW or known.seen & bit:
        raise AgentFault(f"request {counter} was taken before", reason="replayed")
    return known._replace(seen=known.seen | bit, at=at)
