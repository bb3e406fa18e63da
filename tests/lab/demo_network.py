"""The stories of the demo about the network: a narrow path (S2), a black hole (H3), a narrow path and a slow GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.lab.wires import Wires

if TYPE_CHECKING:
    from tests.lab.demo import Demo
    from tests.lab.faults import RankProcess

MBIT = 200
EXTRA_MS = 60
CULPRIT = 5


def s2(demo: Demo) -> None:
    """The wire of a node becomes narrow."""
    job, victim, _ = _train(demo)
    Wires(demo.lab).slow(victim.node, MBIT)
    demo.story.tell(f"fault made: the wire of {victim.node} carries {MBIT} Mbit/s from now on")
    link = f"{victim.node}-fabric"
    incident = demo.act(job, victim.node, [link])
    _flagged(demo, incident["verdict"], "S2")
    demo.check(demo.lab.drain_reasons() == {}, "nothing is drained", demo.lab.drain_reasons())


def h3(demo: Demo) -> None:
    """What the ranks of a node send and should receive vanishes."""
    job, victim, pids = _train(demo)
    Wires(demo.lab).swallow(victim.node, pids)
    demo.story.tell(f"fault made: the switch swallows what the ranks on {victim.node} send and should receive")
    incident = demo.act(job, victim.node, [f"{victim.node}-fabric"])
    _flagged(demo, incident["verdict"], "H3")
    demo.check(demo.lab.drain_reasons() == {}, "nothing is drained", demo.lab.drain_reasons())


def s3(demo: Demo) -> None:
    """A narrow wire, and a throttled GPU on the same node."""
    job, victim, _ = _train(demo)
    Wires(demo.lab).slow(victim.node, MBIT)
    part = demo.lab.work / "sleep.part"
    part.write_text(f"{victim.rank} {EXTRA_MS}")
    part.replace(demo.lab.work / "sleep")
    demo.stack.gpus[victim.node].throttle(victim.rank % 2)
    demo.story.tell(
        f"faults made: the wire of {victim.node} carries {MBIT} Mbit/s; rank {victim.rank} there computes {EXTRA_MS} ms"
        f" longer, and NVML says GPU{victim.rank % 2} runs at 1080 of 1980 MHz for a hardware slow-down"
    )
    incident = demo.act(job, victim.node, [victim.rank, f"{victim.node}-fabric"])
    _flagged(demo, incident["verdict"], "S3")
    drained = list(demo.lab.drain_reasons())
    demo.check(drained == [victim.node], f"{victim.node} alone is drained, on two witnesses' word", drained)


def _train(demo: Demo) -> tuple[int, RankProcess, list[int]]:
    job = demo.train()
    ranks = demo.stack.ranks(job)
    victim = ranks[CULPRIT]
    demo.story.fault_at = time.time()
    return job, victim, [one.pid for one in ranks.values() if one.node == victim.node]


def _flagged(demo: Demo, verdict: dict[str, object], class_: str) -> None:
    action = verdict["action"]
    assert isinstance(action, dict)
    demo.check(verdict["class"] == class_, f"the class is {class_}", verdict["class"])
    demo.check(action["flag"] == "fabric", "the path is flagged to the owners of the network", action["flag"])
