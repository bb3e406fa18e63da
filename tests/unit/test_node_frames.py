"""The frame reader against everything that a user may put below the node's directory."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis.contracts import probeframe
from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.report import JOBS_MAX, RANKS_MAX
from node_daemon.collectors import frames
from node_daemon.collectors.frame_root import open_node_directory
from node_daemon.collectors.frames import FrameReader, Sweep
from node_daemon.collectors.process import STATE_UNKNOWN, Processes
from tests.nodeframes import NODE, FrameImage, idle_process

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
NOBODY = 65534
GONE_PID = 4_194_303  # the greatest the kernel gives out, practically never in use


class Place:
    """A node's directory with its reader; both clocks are set by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root / "frames"
        os.close(open_node_directory(self.root, NODE))
        self.node = self.root / NODE
        self.now_s = 1_000_000.0
        self.reader = FrameReader(
            self.root,
            NODE,
            Processes(),
            gone_keep_s=900,
            idle_keep_s=86_400,
            clock_ns=lambda: int(self.now_s * 1e9),
            wall_s=lambda: self.now_s,
        )

    def job(self, name: str = "7.0", owner: int | None = None) -> Path:
        """A job directory as its TaskProlog makes it."""
        directory = self.node / name
        directory.mkdir(mode=0o700)
        if owner is not None:
            os.chown(directory, owner, owner)
        return directory

    def look(self, ticks: int = 1) -> Sweep:
        """The last of so many looks, a second apart."""
        for _ in range(ticks - 1):
            self.reader.collect()
            self.now_s += 1
        sweep = self.reader.collect()
        self.now_s += 1
        return sweep


@pytest.fixture
def place(tmp_path: Path) -> Place:
    tmp_path.chmod(0o755)
    return Place(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    before = set(Path("/proc/self/fd").iterdir())
    yield
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_a_sound_frame_is_read_with_its_process_state(place: Place) -> None:
    with idle_process() as child:
        frame = FrameImage(child.pid, rank=3)
        frame.join()
        frame.step()
        frame.save(place.job("4242.1"))
        sweep = place.look()
    (job,) = sweep.jobs
    assert (job.job_id, job.restart, job.uid) == (4242, 1, os.geteuid())
    (sample,) = job.frames
    assert sample.pid == child.pid
    assert chr(sample.state) in "RS"
    assert sample.slots["comm_id"].tolist() == [0xC0FFEE]
    assert sweep.refused == {}


def test_the_node_directory_is_open_to_all_users_and_sticky(place: Place) -> None:
    assert stat.S_IMODE(place.node.stat().st_mode) == 0o1777
    assert stat.S_IMODE(place.root.stat().st_mode) == 0o755


def test_a_directory_made_by_somebody_else_in_our_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "file", "link"):
        with pytest.raises(OperatorFault, match=name):
            open_node_directory(tmp_path / name, NODE)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / NODE).symlink_to(tmp_path)
    with pytest.raises(OperatorFault, match=NODE):
        open_node_directory(tmp_path / "root", NODE)


@ROOT_ONLY
def test_a_node_directory_that_belongs_to_a_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root" / NODE).mkdir(parents=True)
    os.chown(tmp_path / "root" / NODE, NOBODY, NOBODY)
    with pytest.raises(OperatorFault, match="65534"):
        open_node_directory(tmp_path / "root", NODE)


def test_a_frame_behind_a_symbolic_link_is_refused_and_counted_once(place: Place, tmp_path: Path) -> None:
    outside = FrameImage(GONE_PID, 5).save(tmp_path)
    (place.job() / outside.name).symlink_to(outside)
    sweep = place.look(ticks=5)
    assert (sweep.jobs, sweep.refused) == ([], {"symlink": 1})


def test_a_job_directory_that_is_a_link_is_refused(place: Place, tmp_path: Path) -> None:
    FrameImage(GONE_PID, 5).save(tmp_path)
    (place.node / "7.0").symlink_to(tmp_path)
    assert place.look(ticks=2) == Sweep([], {"symlink": 1})


def test_a_fifo_or_a_socket_or_a_directory_does_not_block(place: Place) -> None:
    directory = place.job()
    os.mkfifo(directory / "11.frame")
    (directory / "12.frame").mkdir()
    (place.node / "8.0").write_text("")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(directory)  # the path of a socket is short
        try:
            listener.bind("13.frame")
        finally:
            os.chdir(here)
        sweep = place.look()
    assert (sweep.jobs, sweep.refused) == ([], {"unreadable": 4})


def test_a_lease_on_the_file_does_not_block(place: Place) -> None:
    path = FrameImage(GONE_PID, 5).save(place.job())
    # The kernel tells the lease's holder, which is this process, by a signal that would end it.
    former = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        with path.open("r+b") as held:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            assert place.look().refused == {"unreadable": 1}
    finally:
        signal.signal(signal.SIGIO, former)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"magic": 0}, "magic"),
        ({"version": probeframe.VERSION + 1}, "version"),
        ({"slot_count": 4_000_000_000}, "sizes"),
        ({"slot_bytes": 0}, "sizes"),
        ({"header_bytes": 127}, "sizes"),
        ({"pid": GONE_PID - 1}, "name"),
    ],
)
def test_a_frame_that_lies_about_itself_is_refused_by_reason(place: Place, change: dict[str, int], reason: str) -> None:
    frame = FrameImage(GONE_PID, 5)
    for name, value in change.items():
        frame.header[name] = value
    path = frame.save(place.job())
    path.rename(path.with_name(f"{GONE_PID}.frame"))
    sweep = place.look(ticks=2)
    assert (sweep.jobs, sweep.refused) == ([], {reason: 1})


@pytest.mark.parametrize(("size", "reason"), [(0, "short"), (127, "short"), (19_071, "short"), (19_073, "sizes")])
def test_a_file_of_another_size_is_refused(place: Place, size: int, reason: str) -> None:
    path = FrameImage(GONE_PID, 5).save(place.job())
    os.truncate(path, size)
    assert place.look(ticks=2).refused == {reason: 1}


def test_an_oversized_file_is_not_read_at_all(place: Place) -> None:
    path = FrameImage(GONE_PID, 5).save(place.job())
    os.truncate(path, 1 << 40)
    assert place.look().refused == {"sizes": 1}


def test_a_frame_that_is_just_being_made_is_not_counted(place: Place) -> None:
    path = place.job() / f"{GONE_PID}.frame"
    path.write_bytes(b"")
    assert place.look().refused == {}
    os.truncate(path, probeframe.FILE_BYTES)
    assert place.look().refused == {}
    FrameImage(GONE_PID, 5).save(path.parent)
    sweep = place.look()
    assert (len(sweep.jobs), sweep.refused) == (1, {})


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "7",
        "7.",
        "7.0.0",
        "-7.0",
        "7.0 ",
        "12345678901.0",
        "7.123456",
        "٧.0",
        ".7.0",
        "07.0",
        "7.00",
        "7.01",
        "0.0",
    ],
)
def test_a_directory_of_another_name_is_refused(place: Place, name: str) -> None:
    place.job(name)
    assert place.look().refused == {"name": 1}


@pytest.mark.parametrize("name", ["1", "1.frame.bak", "a.frame", "01234567890.frame", ".frame", "-1.frame", "\x1b[2J"])
def test_a_file_of_another_name_is_refused(place: Place, name: str) -> None:
    (place.job() / name).write_bytes(FrameImage(1, 5).tobytes())
    assert place.look().refused == {"name": 1}


@pytest.mark.parametrize(
    "name", ["0077.frame", "77-0.frame", "77-04026.frame", "78-4026.frame", "77-.frame", "77-1-2.frame"]
)
def test_a_pid_or_namespace_in_other_words_is_no_second_frame(place: Place, name: str) -> None:
    (place.job() / name).write_bytes(FrameImage(77, 5).tobytes())
    assert place.look().refused == {"name": 1}


def test_ten_thousand_files_cost_one_bounded_look(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = place.job()
    data = FrameImage(1, 5).tobytes()
    for number in range(10_000):
        os.close(os.open(directory / f"{number}.frame", os.O_CREAT | os.O_WRONLY))
    (directory / "1.frame").write_bytes(data)
    opened = 0
    really = os.open

    def counting(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        nonlocal opened
        opened += 1
        return really(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", counting)
    refused = place.look(ticks=2).refused
    assert refused["too_many"] == 1
    assert opened <= 2 * (RANKS_MAX + 10) * 2


def test_ten_thousand_directories_do_not_push_out_a_job_that_is_known(place: Place) -> None:
    FrameImage(GONE_PID, 5).save(place.job("4242.0"))
    assert [job.job_id for job in place.look().jobs] == [4242]
    for number in range(10_000):
        directory = place.job(f"9{number:05d}.0")
        if number < 200:
            FrameImage(GONE_PID, 5).save(directory)
    sweep = place.look()
    assert 4242 in [job.job_id for job in sweep.jobs]
    assert len(sweep.jobs) <= JOBS_MAX
    assert sweep.refused["too_many"] > 0


@ROOT_ONLY
def test_one_owner_cannot_crowd_out_another(place: Place) -> None:
    for number in range(JOBS_MAX + 10):
        FrameImage(GONE_PID, 5).save(place.job(f"{9000 + number}.0", owner=4001))
    greedy = place.job("9999.0", owner=4001)
    for number in range(RANKS_MAX + 50):
        (greedy / f"{number + 1}.frame").write_bytes(FrameImage(number + 1, 5).tobytes())
    modest = place.job("1.0", owner=4002)
    FrameImage(GONE_PID, 5).save(modest)
    for path in place.node.glob("*/*.frame"):
        owner = path.parent.stat().st_uid
        os.chown(path, owner, owner)
    sweep = place.look()
    assert (1, 4002) in [(job.job_id, job.uid) for job in sweep.jobs]
    assert sum(len(job.frames) for job in sweep.jobs) <= RANKS_MAX


@ROOT_ONLY
def test_a_frame_of_another_owner_than_its_directory_is_refused(place: Place) -> None:
    path = FrameImage(GONE_PID, 5).save(place.job(owner=NOBODY))
    path.chmod(0o644)
    assert place.look().refused == {"owner": 1}


@ROOT_ONLY
def test_root_reads_nothing_that_the_owner_could_not_read(place: Place) -> None:
    directory = place.job(owner=NOBODY)
    path = FrameImage(GONE_PID, 5).save(directory)
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o000)
    assert place.look().refused == {"unreadable": 1}
    path.chmod(0o400)
    assert [job.uid for job in place.look().jobs] == [NOBODY]
    directory.chmod(0o000)
    assert place.look().jobs == []
    assert place.look().refused == {"unreadable": 2}


@ROOT_ONLY
def test_the_reading_thread_is_root_again_afterwards(place: Place) -> None:
    FrameImage(GONE_PID, 5).save(place.job(owner=NOBODY))
    place.look()
    probe = place.root / "made_by_root"
    probe.write_text("")
    assert probe.stat().st_uid == 0


def test_a_process_that_has_ended_is_told_for_a_while_and_then_its_frame_is_removed(place: Place) -> None:
    path = FrameImage(GONE_PID, 5).save(place.job())
    assert [chr(f.state) for f in place.look().jobs[0].frames] == ["X"]
    place.now_s += 890
    assert len(place.look().jobs) == 1
    place.now_s += 20
    assert place.look().jobs == []
    assert not path.exists()


@ROOT_ONLY
def test_frames_are_removed_as_their_owner(place: Place) -> None:
    directory = place.job(owner=NOBODY)
    path = FrameImage(GONE_PID, 5).save(directory)
    os.chown(path, NOBODY, NOBODY)
    directory.chmod(0o500)  # the owner may not remove from it, so neither may the daemon
    place.look()
    place.now_s += 1000
    place.look()
    assert path.exists()
    directory.chmod(0o700)
    place.look()
    place.now_s += 1000
    place.look()
    assert not path.exists()


def test_a_process_number_given_to_another_process_means_that_ours_is_gone(place: Place) -> None:
    with idle_process() as child:
        FrameImage(child.pid, 12345).save(place.job())
        assert [chr(f.state) for f in place.look().jobs[0].frames] == ["X"]


@ROOT_ONLY
def test_a_job_that_names_somebody_elses_process_learns_nothing_of_it(place: Place) -> None:
    path = FrameImage(os.getpid()).save(place.job(owner=NOBODY))
    os.chown(path, NOBODY, NOBODY)
    assert [f.state for f in place.look().jobs[0].frames] == [STATE_UNKNOWN]


def test_a_frame_that_moves_without_a_process_belongs_to_one_that_we_cannot_see(place: Place) -> None:
    directory = place.job()
    frame = FrameImage(GONE_PID, 5)
    frame.join()
    frame.step()
    frame.save(directory)
    assert [chr(f.state) for f in place.look().jobs[0].frames] == ["X"]
    frame.step()
    path = frame.save(directory)
    assert [f.state for f in place.look().jobs[0].frames] == [STATE_UNKNOWN]
    place.now_s += 1000
    assert [f.state for f in place.look().jobs[0].frames] == [STATE_UNKNOWN]
    place.now_s += 90_000
    place.look()
    assert not path.exists()


def test_an_empty_job_directory_waits_for_its_first_collective_and_is_removed_long_after(place: Place) -> None:
    directory = place.job()
    place.now_s = directory.stat().st_mtime + 10
    place.look(ticks=3)
    FrameImage(GONE_PID, 5).save(directory)
    assert len(place.look().jobs) == 1
    place.now_s += 1000
    place.look()
    place.now_s = directory.stat().st_mtime + 3600
    place.look(ticks=3)
    assert directory.exists()
    place.now_s = directory.stat().st_mtime + 90_000
    place.look(ticks=3)
    assert not directory.exists()


def test_a_directory_that_goes_away_is_made_again(place: Place) -> None:
    place.node.rmdir()
    assert place.look().jobs == []
    assert stat.S_IMODE(place.node.stat().st_mode) == 0o1777


def test_a_communicator_that_changes_between_both_readings_waits_a_tick(place: Place) -> None:
    frame = FrameImage(GONE_PID, 5)
    frame.join(0, comm_id=1)
    frame.join(1, comm_id=2)
    first = probeframe.parse(frame.tobytes()).slots
    frame.join(1, comm_id=3)
    second = probeframe.parse(frame.tobytes()).slots
    left, right = frames._same_communicators(first, second)
    assert left["comm_id"].tolist() == right["comm_id"].tolist() == [1]
