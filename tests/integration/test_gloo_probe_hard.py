"""The gloo probe where programs are not kind to it: threads that fork, torches that are loaded late or lack what it
needs, and, under ThreadSanitizer, many threads in one communicator."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from diagnosis.contracts import probeframe
from tests.integration.gloo_double import ALLREDUCE, DEADLINE_S, FLOAT, HERE, SOURCES, build, probe_library

COMPILE = ("g++", "-std=c++17", "-O1", "-Wall", "-Wextra")
PROGRAM = f"group world 1 4 0,1,2,3\nenqueue world w {ALLREDUCE} {FLOAT} 8\nstart w\nfinish w\n" * 2


def compiled(*arguments: str | Path) -> None:
    subprocess.run([*COMPILE, *map(str, arguments)], check=True, timeout=2 * DEADLINE_S)


def run(
    command: list[str | Path], frames: Path, text: str = PROGRAM, preload: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "TOCSIN_FRAME_DIR": str(frames), **environment}
    if preload is not None:
        env["LD_PRELOAD"] = str(preload)
    return subprocess.run(command, input=text, env=env, capture_output=True, text=True, timeout=2 * DEADLINE_S)


def frames_in(directory: Path) -> list[probeframe.Frame]:
    return [probeframe.parse(path.read_bytes()) for path in sorted(directory.iterdir())]


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    path = tmp_path / "frames"
    path.mkdir()
    return path


def test_a_process_may_fork_at_any_moment(tmp_path: Path, frames: Path) -> None:
    double = build(tmp_path)
    program = tmp_path / "forks"
    library = double.directory / "libtorch_cpu.so"
    compiled(HERE / "forks.cpp", library, f"-Wl,-rpath,{double.directory}", "-lpthread", "-o", program)
    done = run([program, "60"], frames, preload=probe_library())
    assert (done.returncode, done.stdout) == (0, "0 of 60 children failed\n"), done.stderr
    told = frames_in(frames)
    assert len({int(frame.header["pid"]) for frame in told}) == 61  # each child has its own, and so has the parent
    rounds = [(frame.slots["enqueued"].tolist(), frame.slots["done"].tolist()) for frame in told if len(frame.slots)]
    assert rounds == [([1], [1])] * 60  # the parent's groups have ended


@pytest.mark.parametrize("lacked", ["execute", "enqueue"])
def test_a_torch_without_what_the_probe_needs_turns_it_off(tmp_path: Path, frames: Path, lacked: str) -> None:
    rename = f"-D{lacked}=another_name"
    library, program = tmp_path / "libtorch_cpu.so", tmp_path / "driver"
    compiled("-fPIC", "-shared", "-Wl,-soname,libtorch_cpu.so", rename, HERE / "fake_torch.cpp", "-o", library)
    compiled(HERE / "driver.cpp", rename, library, f"-Wl,-rpath,{tmp_path}", "-lpthread", "-ldl", "-o", program)
    quiet = run([program], frames, preload=probe_library())
    assert (quiet.returncode, quiet.stderr, quiet.stdout.count("ok")) == (0, "", 8)
    told = run([program], frames, preload=probe_library(), TOCSIN_PROBE_DEBUG="1")
    assert (told.returncode, told.stdout) == (0, quiet.stdout)
    assert told.stderr.count("lacks a function that the probe must see") == 1
    assert told.stderr.count("\n") == 1
    assert list(frames.iterdir()) == []


@pytest.mark.parametrize("name", ["libtorch_cpu.so", "libtorch_of_another_name.so"])
def test_a_torch_that_is_loaded_late_and_privately(tmp_path: Path, frames: Path, name: str) -> None:
    library, program, loader = tmp_path / name, tmp_path / "driver.so", tmp_path / "loader"
    compiled("-fPIC", "-shared", f"-Wl,-soname,{name}", HERE / "fake_torch.cpp", "-o", library)
    source = tmp_path / "late.cpp"
    source.write_text(f'extern "C" int play_main();\n#include "{HERE / "driver.cpp"}"\n')
    compiled(
        "-fPIC",
        "-shared",
        "-Dmain=play_main",
        source,
        library,
        f"-Wl,-rpath,{tmp_path}",
        "-lpthread",
        "-ldl",
        "-o",
        program,
    )
    compiled(HERE / "late_loader.cpp", "-ldl", "-o", loader)
    plain = run([loader, program], frames)
    assert (plain.returncode, plain.stdout.count("ok")) == (0, 8), plain.stderr
    done = run([loader, program], frames, preload=probe_library())
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, "")
    if name == "libtorch_cpu.so":
        (frame,) = frames_in(frames)
        assert frame.header["symbols_missing"] == 0
        assert frame.header["last_leave_ns"] > 0
        assert frame.header["works_lost"] == 0
    else:
        assert list(frames.iterdir()) == []  # a torch that cannot be identified is left alone


def test_threads_in_one_communicator_race_for_nothing(tmp_path: Path, frames: Path) -> None:
    """The probe is built into the program, where its functions stand before torch's as a preloaded library's do."""
    library, program = tmp_path / "libtorch_cpu.so", tmp_path / "driver"
    compiled("-fPIC", "-shared", "-Wl,-soname,libtorch_cpu.so", HERE / "fake_torch.cpp", "-o", library)
    common = SOURCES.parent / "frame"
    objects: list[Path] = []
    for source in sorted(common.glob("*.c")):
        objects.append(tmp_path / f"{source.stem}.o")
        command: list[str | Path] = [
            "gcc",
            "-std=gnu11",
            "-O1",
            "-g",
            "-fsanitize=thread",
            "-c",
            source,
            "-o",
            objects[-1],
        ]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
    sources = sorted(SOURCES.glob("*.cpp"))
    for source in sources:
        objects.append(tmp_path / f"{source.stem}.o")
        compiled("-fsanitize=thread", "-g", "-fno-rtti", f"-I{common}", "-c", source, "-o", objects[-1])
    compiled(
        "-fsanitize=thread", "-g", "-rdynamic", HERE / "driver.cpp", *objects, library, f"-Wl,-rpath,{tmp_path}",
        "-lpthread", "-ldl", "-o", program,
    )  # fmt: skip
    text = "group a 1 4 0,1,2,3\ngroup b 1 2 0,1\nrealtime\nstorm a,b 4 2000 2\nend b\nstorm a 4 2000 1\n"
    done = run([program], frames, text, TSAN_OPTIONS="halt_on_error=0 exitcode=66")
    assert (done.returncode, done.stdout.count("ok")) == (0, 6), done.stderr[-4000:]
    (frame,) = frames_in(frames)
    assert (frame.slots["enqueued"] == frame.slots["done"]).all()
