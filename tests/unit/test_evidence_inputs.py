"""What `tocsin diagnose` opens: directories, archives and files, and nothing that leads out of them."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from controller.cli.diagnose import NothingReadable, diagnose_paths, verdict_lines
from controller.cli.inputs import read_inputs
from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.verdict import Action, Culprit, EvidenceItem, Verdict
from tests.unit.test_evidence_flight import dump, entry

ROOT = Path(__file__).parents[2]
SECRET = b"a secret"
MIB = 1 << 20


def read(*paths: Path) -> tuple[dict[str, bytes], list[str]]:
    refused: list[str] = []
    found = {
        name: b"".join(chunks)
        for name, chunks in read_inputs(paths, lambda name, why: refused.append(f"{name}: {why}"))
    }
    return found, refused


def bundle_of(directory: Path) -> Path:
    directory.mkdir()
    row = {"comm": "c", "seq": 3, "state": "done", "rounds": 3, "dur_ms": 9, "gap_ms": 60}
    frames = [{"rank": rank, "t_ms": at, "comms": [row]} for rank in (0, 1) for at in (1000, 2000)]
    (directory / "frames.jsonl").write_text("\n".join(json.dumps(line) for line in frames))
    (directory / "job.json").write_text(json.dumps({"world_size": 2, "job_id": 5, "nodes": ["gpu001", "gpu002"]}))
    return directory


def tar_of(path: Path, fill: Callable[[tarfile.TarFile], None], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        fill(archive)
    return path


def member(archive: tarfile.TarFile, name: str, content: bytes = b"", **more: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in more.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(content))


def test_a_directory_an_archive_and_a_compressed_archive_hold_the_same(tmp_path: Path) -> None:
    directory = bundle_of(tmp_path / "b")
    plain = tar_of(tmp_path / "b.tar", lambda archive: archive.add(directory, "b"))
    tar_of(tmp_path / "b.tar.gz", lambda archive: archive.add(directory, "b"), "w:gz")
    (tmp_path / "b.tar.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    of_directory, refused = read(directory)
    assert refused == [] and sorted(of_directory) == ["frames.jsonl", "job.json"]
    for name in ("b.tar", "b.tar.gz", "b.tar.zst"):
        found, refused = read(tmp_path / name)
        assert refused == [] and found == {f"b/{file}": content for file, content in of_directory.items()}


def test_compressed_files_in_a_directory_are_read_under_their_own_name(tmp_path: Path) -> None:
    directory = bundle_of(tmp_path / "b")
    content = (directory / "frames.jsonl").read_bytes()
    (directory / "frames.jsonl").unlink()
    (directory / "frames.jsonl.gz").write_bytes(gzip.compress(content))
    (directory / "more.zst").write_bytes(zstandard.compress(content) * 2)
    found, refused = read(directory)
    assert refused == [] and found["frames.jsonl"] == content and found["more"] == content * 2


def test_several_paths_are_told_apart_by_their_names(tmp_path: Path) -> None:
    one, two = bundle_of(tmp_path / "one"), bundle_of(tmp_path / "two")
    found, _ = read(one, two, one / "job.json")
    assert sorted(found) == ["job.json", "one/frames.jsonl", "one/job.json", "two/frames.jsonl", "two/job.json"]


def test_no_link_is_followed_and_nothing_but_files_is_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    directory = bundle_of(tmp_path / "b")
    (directory / "health.jsonl").symlink_to(tmp_path / "secret")
    (directory / "up").symlink_to(tmp_path)
    (directory / "loop").symlink_to(directory)
    os.mkfifo(directory / "pipe")
    begin = time.monotonic()
    found, refused = read(directory)
    assert time.monotonic() - begin < 5
    assert sorted(found) == ["frames.jsonl", "job.json"]
    assert refused == [
        "health.jsonl: a link is not followed",
        "loop: a link is not followed",
        "pipe: not a regular file",
        "up: a link is not followed",
    ]


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_not_read(path: str) -> None:
    assert read(Path(path)) == ({}, [f"{Path(path).name}: not a regular file"])


def test_a_pipe_that_is_named_does_not_make_it_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read(tmp_path / "pipe") == ({}, ["pipe: not a regular file"])


def test_a_file_that_was_swapped_for_a_link_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    directory = bundle_of(tmp_path / "b")
    looked_at = os.stat

    def swap(name: str, **more: object) -> os.stat_result:
        result = looked_at(name, **more)  # type: ignore[arg-type]
        if name == "frames.jsonl":
            (directory / name).unlink()
            (directory / name).symlink_to(tmp_path / "secret")
        return result

    monkeypatch.setattr(os, "stat", swap)
    found, refused = read(directory)
    assert SECRET not in found.values() and sorted(found) == ["job.json"]
    assert refused == ["frames.jsonl: cannot be opened: Too many levels of symbolic links"]


def test_members_that_lead_out_of_an_archive_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)

    def fill(archive: tarfile.TarFile) -> None:
        member(archive, "../../etc/passwd", SECRET)
        member(archive, "/etc/passwd", SECRET)
        member(archive, "b/../../x", SECRET)
        member(archive, "link", type=tarfile.SYMTYPE, linkname=str(tmp_path / "secret"))
        member(archive, "hard", type=tarfile.LNKTYPE, linkname="../secret")
        member(archive, "pipe", type=tarfile.FIFOTYPE)
        member(archive, "zero", type=tarfile.CHRTYPE, devmajor=1, devminor=5)
        member(archive, "job.json", b"{}")

    found, refused = read(tar_of(tmp_path / "x.tar", fill))
    assert found == {"job.json": b"{}"} and len(refused) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "x.tar"]


@pytest.mark.parametrize("form", ["zst", "gz"])
def test_a_bomb_is_given_up(tmp_path: Path, form: str) -> None:
    bomb = tmp_path / f"frames.jsonl.{form}"
    pack = zlib.compressobj(level=1, wbits=31) if form == "gz" else zstandard.ZstdCompressor().compressobj()
    with bomb.open("wb") as out:
        for _ in range(400):
            out.write(pack.compress(b"\0" * MIB))
        out.write(pack.flush())
    taken = 0
    refused: list[str] = []
    for _, chunks in read_inputs([bomb], lambda _, why: refused.append(why)):
        taken = sum(len(chunk) for chunk in chunks)
    assert taken <= max(65 * MIB, 201 * bomb.stat().st_size)
    assert refused == ["cannot be read to its end: it unpacks to absurdly more than it is"]


def test_a_bomb_in_an_archive_is_given_up_even_where_it_is_skipped(tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        member(archive, "../out", b"\0" * (300 * MIB))
        member(archive, "job.json", b"{}")

    found, refused = read(tar_of(tmp_path / "x.tar.gz", fill, "w:gz"))
    assert found == {} and "absurdly more" in refused[-1]


def test_a_huge_header_in_an_archive_is_not_held(tmp_path: Path) -> None:
    content = io.BytesIO()
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2 * MIB
    content.write(info.tobuf(tarfile.GNU_FORMAT) + b"a" * (2 * MIB))
    (tmp_path / "x.tar").write_bytes(content.getvalue() + b"\0" * 1024)
    found, refused = read(tmp_path / "x.tar")
    assert found == {} and "a header is larger than the reader's limit" in refused[0]


@pytest.mark.parametrize("cut", [0.3, 0.9])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_an_archive_that_ends_too_soon_gives_what_it_has(tmp_path: Path, cut: float, suffix: str) -> None:
    plain = tar_of(tmp_path / "b.tar", lambda archive: member(archive, "frames.jsonl", os.urandom(MIB))).read_bytes()
    packed = gzip.compress(plain) if suffix == "gz" else zstandard.compress(plain)
    path = tmp_path / f"b.tar.{suffix}"
    path.write_bytes(packed[: int(len(packed) * cut)])
    found, refused = read(path)
    assert len(found.get("frames.jsonl", b"")) < MIB
    assert refused or suffix == "zst"  # a zstd stream may end at any block without saying that it is not whole


def test_paths_that_do_not_exist_are_the_operator_s_fault(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="no such file"):
        read(tmp_path / "nothing")


def test_nothing_readable_says_why(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").write_text("")
    with pytest.raises(NothingReadable) as nothing:
        diagnose_paths([tmp_path])
    assert str(nothing.value).splitlines()[1:] == ["empty: empty", "notes.txt: not recognised"]


def test_a_verdict_says_what_was_not_seen(tmp_path: Path) -> None:
    directory = bundle_of(tmp_path / "b")
    (directory / "x").symlink_to("y")
    (directory / "notes.txt").write_text("hello")
    verdict = diagnose_paths([directory])
    assert verdict.job_id == 5 and verdict.elapsed_ms is not None
    assert {"x: a link is not followed", "notes.txt: not recognised"} <= set(verdict.unseen)


def test_dumps_of_a_job_that_hangs_give_a_verdict(tmp_path: Path) -> None:
    for rank in range(4):
        content = dump(entry(1, True), *([] if rank == 2 else [entry(2, False)]))
        (tmp_path / f"rank_{rank}").write_text(json.dumps(content))
    (tmp_path / "job.json").write_text(json.dumps({"world_size": 4, "job_id": 9, "nodes": ["a", "a", "b", "b"]}))
    verdict = diagnose_paths([tmp_path])
    assert (verdict.anomaly, verdict.class_, verdict.job_id) == ("hang", "H1", 9)
    assert [(culprit.rank, culprit.node) for culprit in verdict.culprits] == [(2, "b")]


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_is_told_how_far_reading_is(
    tmp_path: Path, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.cli.diagnose.PROGRESS_EVERY_S", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    diagnose_paths([bundle_of(tmp_path / "b")])
    told = capsys.readouterr().err
    assert ("reading frames.jsonl, 0 MB" in told) == terminal
    assert told.endswith("\r\x1b[K") == terminal


def test_words_of_a_verdict_cannot_drive_the_terminal() -> None:
    verdict = Verdict(
        job_id=4,
        anomaly="slow",
        class_="S1",
        culprits=[
            Culprit(kind="rank", rank=3, node="gpu\x1b[2J", cause="unknown", confidence=0.5, lost_ms_per_step=4.0)
        ],
        action=Action(kind="requeue", requeue=True, exclude=["gpu001"]),
        summary="a\x1b[31mb",
        evidence=[EvidenceItem(kind="x", text="seen\n", against=True)],
        unseen=["file\r"],
    )
    lines = list(verdict_lines(verdict))
    assert not any(ord(letter) < 32 for line in lines for letter in line)
    assert "action    requeue the job; without gpu001" in lines
    assert "who       rank 3, node gpu?[2J: unknown (unknown), 50 % sure, 4 ms lost per step" in lines


def _diagnose(*arguments: str) -> tuple[int, str, str]:
    program = "from controller.cli.main import main; main()"
    command = [sys.executable, "-c", program, "diagnose", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return run.returncode, run.stdout, run.stderr


def test_the_command_s_exit_codes_and_output(tmp_path: Path) -> None:
    directory = bundle_of(tmp_path / "b")
    code, out, err = _diagnose(str(directory), "--json")
    assert (code, err) == (0, "") and json.loads(out)["schema"] == "tocsin.verdict/1"
    code, out, err = _diagnose(str(directory))
    assert code == 0 and "what      none" in out
    (tmp_path / "notes").write_text("hello")
    code, out, err = _diagnose(str(tmp_path / "notes"), "--json")
    assert (code, out) == (3, "") and "notes: not recognised" in err
    assert _diagnose(str(tmp_path / "none"))[0] == 2
    assert _diagnose("--nonsense")[0] == 2
