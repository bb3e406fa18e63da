"""When a job's probes are asked for more events, and how seldom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts.probeframe import Transport, control_word
from diagnosis.evidence.steps import Step
from node_daemon.arming import ARMED_S, EVENTS, PACE_LOOKS_MIN, SHARE_MAX, SLOW_LOOKS, STILL_S, Arming, Request
from node_daemon.collectors.event_mask import armed_since, asked_until_s, to_be_asked
from node_daemon.collectors.frames import FrameSample, JobFrames
from node_daemon.native.nccl.masks import Event, masks_for
from node_daemon.summarise import Steps
from tests.nodeframes import FrameImage

PIDS = (70, 71)
AGAIN_S = ARMED_S / SHARE_MAX


class Node:
    """Two ranks of a job, and what the daemon asks of them; what it asks for is on from then until it is over."""

    def __init__(self, version: int = 23203, transport: Transport = Transport.NCCL) -> None:
        row = masks_for(version)
        standing = int(row.standing) if row and transport == Transport.NCCL else 0
        told = {"transport": transport, "library_version": version if standing else 0, "event_mask": standing}
        self.images = [FrameImage(pid, 5, rank=rank, **told) for rank, pid in enumerate(PIDS)]
        for image in self.images:
            image.join()
            image.enter()
        self.now_s = 1000.0
        self.arming = Arming(Path("/nowhere"), "n", clock_s=lambda: self.now_s)
        self.armed_at: list[float] = []

    def job(self) -> JobFrames:
        return JobFrames(7, 2, 1000, 1000, [self._sample(image) for image in self.images])

    def _sample(self, image: FrameImage) -> FrameSample:
        frame = probeframe.parse(image.tobytes())
        pid = int(frame.header["pid"])
        return FrameSample(pid, 5, ord("S"), int(self.now_s * 1e9), frame.header, frame.slots, frame.slots)

    def look(self, step_ms: float | None = None) -> list[Request]:
        steps: Steps = {}
        if step_ms is not None:
            steps = {(pid, 5): Step(int(step_ms * 1e6), None, 1, None) for pid in PIDS}
        requests = self.arming.due([self.job()], steps)
        for _ in requests:
            self.armed_at.append(self.now_s)
            for image in self.images:
                image.header["control"] = control_word(int(EVENTS), int(self.now_s + ARMED_S))
        return requests

    def move(self) -> None:
        for image in self.images:
            image.leave()
            image.enter()

    def pass_s(self, seconds: int, step_ms: float | None = None, moving: bool = True) -> list[Request]:
        requests: list[Request] = []
        for _ in range(seconds):
            self.now_s += 1.0
            if moving:
                self.move()
            requests += self.look(step_ms)
        return requests


def test_a_job_that_moves_as_ever_is_left_alone() -> None:
    assert Node().pass_s(100, step_ms=80.0) == []


def test_a_job_in_which_nothing_moves_is_armed_once() -> None:
    node = Node()
    node.look()
    node.pass_s(20)
    (request,) = node.pass_s(60, moving=False)
    assert request == Request("7.2", tuple((pid, 0) for pid in PIDS), "nothing moves")
    assert STILL_S <= node.armed_at[0] - 1020.0 <= STILL_S + 1


def test_a_job_whose_steps_take_longer_than_they_did_is_armed() -> None:
    node = Node()
    node.pass_s(PACE_LOOKS_MIN + SLOW_LOOKS, step_ms=80.0)
    assert node.pass_s(20, step_ms=90.0) == []  # within what steps vary by
    (request,) = node.pass_s(30, step_ms=120.0)
    assert request.why == "slower than it was"


def test_steps_of_an_armed_job_are_compared_with_nothing() -> None:
    node = Node()
    node.arming.due([node.job()], {})
    for image in node.images:
        image.header["control"] = control_word(int(EVENTS), int(node.now_s) + 60)
    node.pass_s(50, step_ms=80.0)
    node.now_s += AGAIN_S
    assert node.pass_s(SLOW_LOOKS, step_ms=160.0) == []  # nothing is known of how it was


def test_the_controller_is_heard_where_the_job_is() -> None:
    node = Node()
    node.look()
    node.arming.ask(8, 0)
    assert node.look() == []
    node.arming.ask(7, 2)
    assert [request.why for request in node.look()] == ["the controller asks"]


def test_whoever_asks_how_often_no_job_is_armed_more_than_its_share_of_the_time() -> None:
    node = Node()
    node.look()
    begun = node.now_s
    for _ in range(3000):
        node.now_s += 1.0
        node.arming.ask(7, 2)
        node.look()
    armed_s = ARMED_S * len(node.armed_at)
    assert ARMED_S * 10 < armed_s <= SHARE_MAX * (node.now_s - begun) + ARMED_S
    assert np.diff(node.armed_at).min() >= AGAIN_S


def test_a_daemon_that_starts_anew_asks_no_sooner() -> None:
    node = Node()
    node.look()
    node.arming.ask(7, 2)
    assert len(node.look()) == 1
    node.now_s += AGAIN_S / 2
    node.arming = Arming(Path("/nowhere"), "n", clock_s=lambda: node.now_s)
    node.look()
    node.arming.ask(7, 2)
    assert node.look() == []


@pytest.mark.parametrize(
    ("version", "transport", "wanted"),
    [
        (22707, Transport.NCCL, Event.PROXY_OP | Event.PROXY_STEP),
        (22907, Transport.NCCL, Event.PROXY_OP | Event.PROXY_STEP),
        (23007, Transport.NCCL, Event.NONE),
        (23203, Transport.NCCL, Event.KERNEL_CH | Event.PROXY_STEP),
        (23900, Transport.NCCL, Event.NONE),
        (0, Transport.GLOO, Event.NONE),
    ],
)
def test_nobody_is_asked_for_what_is_not_safe_or_is_on(version: int, transport: Transport, wanted: Event) -> None:
    node = Node(version, transport)
    node.look()
    assert to_be_asked(node.images[0].header[0], EVENTS) == wanted
    node.arming.ask(7, 2)
    assert len(node.look()) == (wanted != Event.NONE)


def test_a_frame_is_armed_while_its_time_runs_and_until_the_events_are_off() -> None:
    (header,) = Node().images[0].header
    assert not armed_since(header, 10**9)
    header["control"] = control_word(int(Event.KERNEL_CH), 50)
    assert armed_since(header, 49 * 10**9) and not armed_since(header, 51 * 10**9)
    header["event_mask"] |= int(Event.KERNEL_CH)  # the program has called nothing since
    assert armed_since(header, 99 * 10**9)
    header["control"] = control_word(int(Event.PROXY_OP), 50)  # stands anyway
    assert not armed_since(header, 49 * 10**9)


def test_a_job_that_claims_to_have_been_asked_in_a_far_future_is_not_believed() -> None:
    (header,) = Node().images[0].header
    header["control"] = control_word(int(EVENTS), 5000)
    assert asked_until_s(header, 4900.0) == 5000
    assert asked_until_s(header, 1000.0) == 0
