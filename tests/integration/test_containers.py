"""Both probes in a container, and the daemon outside that must know whom they speak of."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from node_daemon.arming import EVENTS
from node_daemon.collectors.event_mask import ask_for_events
from node_daemon.collectors.frames import FrameReader, FrameSample
from node_daemon.collectors.process import STATE_GONE, Processes
from tests.integration import gloo_double, nccl_double
from tests.integration.containers import children_of, contained
from tests.integration.gloo_double import DEADLINE_S, probe_library
from tests.lab.system import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
NODE, JOB = "gpu001", "42.0"
NOBODY = 65534


class Node:
    """Frames of one job, what is compiled for it, and the daemon's reader."""

    def __init__(self, base: Path, programs: Path) -> None:
        self.base, self.root = base, base / "frames"
        self.frames = self.root / NODE / JOB
        self.frames.mkdir(parents=True)
        self.nccl, self.gloo = nccl_double.build(programs), gloo_double.build(programs)
        self.reader = FrameReader(self.root, NODE, Processes(), gone_keep_s=900, idle_keep_s=900)
        for path in (base, self.root):
            path.chmod(0o755)

    def samples(self) -> list[FrameSample]:
        return [frame for job in self.reader.collect().jobs for frame in job.frames]

    def states(self) -> dict[int, int]:
        """By the number of the process here."""
        return {sample.pid: sample.state for sample in self.samples()}

    def own(self, uid: int) -> None:
        """Makes the job's directory that user's."""
        os.chown(self.frames, uid, uid)
        self.frames.chmod(0o700)

    @contextmanager
    def rank(
        self, name: str, *, gloo: bool = False, frames: bool = True, proc: bool = True, uid: int = 0
    ) -> Iterator[Driver]:
        """A rank that has done one collective, in a container called `name`."""
        double = self.gloo.directory if gloo else self.nccl.driver.parent
        library = probe_library() if gloo else self.nccl.plugin
        bound = [double, library.parent, *([self.root] if frames else [])]
        env = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "TOCSIN_FRAME_DIR": str(self.frames),
            "FAKE_NCCL_VERSION": "23203",
        }
        command: tuple[object, ...] = (self.nccl.driver, library, 7)
        if gloo:
            env |= {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(double)}
            command = (double / "driver",)
        with contained(self.base / name, bound, *command, env=env, proc=proc, uid=uid) as process:
            driver = (gloo_double.Driver if gloo else nccl_double.Driver)(process, self.frames)
            if gloo:
                for line in ("group world 0 2 0,1", "enqueue world w 1 6 8", "start w", "finish w"):
                    driver.ask(line)
            else:
                driver.ask("comm a 0xBEEF 4 1")
                driver.ask("allreduce a 1 2 2")
            yield driver


Driver = gloo_double.Driver


@pytest.fixture
def node(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Node:
    programs = tmp_path_factory.getbasetemp()
    programs.chmod(0o755)
    tmp_path.parent.chmod(0o755)
    return Node(tmp_path, programs)


@pytest.mark.parametrize("gloo", [True, False], ids=["gloo", "NCCL"])
@pytest.mark.parametrize("uid", [0, NOBODY], ids=["root", "user"])
def test_ranks_that_have_the_same_number_in_their_containers_are_told_apart_and_known(
    node: Node, gloo: bool, uid: int
) -> None:
    node.own(uid)
    with ExitStack() as stack:
        drivers = [stack.enter_context(node.rank(name, gloo=gloo, uid=uid)) for name in ("one", "two")]
        (one,), (two,) = (children_of(driver.pid) for driver in drivers)
        samples = {sample.pid: sample for sample in node.samples()}
        assert samples.keys() == {one, two}
        assert {int(sample.header["pid"]) for sample in samples.values()} == {1}
        os.kill(one, signal.SIGSTOP)
        eventually(lambda: node.states()[one] in (ord("T"), ord("t")), DEADLINE_S, "the one that was stopped")
        eventually(lambda: node.states()[two] == ord("S"), DEADLINE_S, "the other waits for a command")
        os.kill(one, signal.SIGKILL)
        eventually(lambda: node.states()[one] == STATE_GONE, DEADLINE_S, "the one that was killed")
        assert node.states()[two] == ord("S")


def test_a_rank_in_a_container_can_be_asked_for_more_events(node: Node) -> None:
    with node.rank("one") as driver:
        (sample,) = node.samples()
        assert sample.namespace
        ask_for_events(node.root, NODE, JOB, int(sample.header["pid"]), EVENTS, 60, namespace=sample.namespace)
        for _ in range(2):
            driver.ask("allreduce a 1 2 2")
        (sample,) = node.samples()
        assert int(sample.header["event_mask"]) & EVENTS == EVENTS


def test_a_daemon_that_was_not_there_before_finds_them_too_and_a_dead_one_is_dead(node: Node) -> None:
    with node.rank("one") as driver:
        (outer,) = children_of(driver.pid)
    reader = FrameReader(node.root, NODE, Processes(), gone_keep_s=900, idle_keep_s=900)
    (frame,) = [frame for job in reader.collect().jobs for frame in job.frames]
    assert (frame.pid, frame.state) == (1, STATE_GONE) and outer != 1


@pytest.mark.parametrize("gloo", [True, False], ids=["gloo", "NCCL"])
def test_where_the_frames_cannot_be_seen_the_job_goes_on_and_is_told_once(node: Node, gloo: bool) -> None:
    with node.rank("one", gloo=gloo, frames=False) as driver:
        driver.ask("allreduce a 1 2 2") if not gloo else driver.ask("enqueue world x 1 6 8")
        errors = driver.finish()
    assert errors.count("tocsin: not watched: not there (in a container: not mounted)") == 1
    assert node.samples() == []


def test_without_proc_in_there_a_frame_is_written_and_nobody_is_taken_for_its_process(node: Node) -> None:
    with node.rank("one", proc=False) as driver:
        (sample,) = node.samples()
        assert (sample.pid, sample.start_ticks, sample.state) == (1, 0, STATE_GONE)
        driver.ask("allreduce a 1 2 2")
        (sample,) = node.samples()
        assert sample.state != STATE_GONE  # it moves
        driver.finish()
