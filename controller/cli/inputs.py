"""Paths that a person names as (name, bytes in chunks): directories, archives, compressed and plain files.

What is opened comes from people, but what is inside it may come from anywhere. So below a path that was named no link
is followed and nothing but regular files is opened, whatever happens to the directory meanwhile; an archive is read as
a stream, its members' names are labels and nothing is written; and what unpacks to absurdly more than it was is left
alone.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, Protocol

import zstandard

from diagnosis.contracts.errors import AgentFault, OperatorFault

CHUNK_BYTES: Final = 1 << 18
DEPTH_MAX: Final = 16
FILES_MAX: Final = 200_000
UNPACKED_BYTES_MAX: Final = 8 << 30
RATIO_MAX: Final = 200
RATIO_COUNTS_FROM_BYTES: Final = 64 << 20
WINDOW_BYTES_MAX: Final = 128 << 20
TAR_HEADER_BYTES_MAX: Final = 1 << 16
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
_SUFFIXES: Final = (".gz", ".tgz", ".zst", ".tzst")
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error, zstandard.ZstdError, ValueError, RecursionError)

Refuse = Callable[[str, str], None]
"""Told (name, why) of what is not read."""
Named = tuple[str, Iterator[bytes]]


def read_inputs(paths: Sequence[Path], refuse: Refuse) -> Iterator[Named]:
    """All files below the paths, in order. Each must be read before the next is asked for.

    Raises: OperatorFault (a path does not exist).
    """
    for path in paths:
        if not path.exists():
            raise OperatorFault(f"{path}: no such file or directory")
    for path in paths:
        label = f"{path.name}/" if len(paths) > 1 else ""
        if path.is_dir():
            with _opened(path.name, _At(str(path), os.O_DIRECTORY), refuse) as fd:
                if fd is not None:
                    yield from _directory(fd, label, 0, _Counter(), refuse)
        else:
            yield from _file(path.name, _At(str(path)), refuse)


def read_packed(name: str, content: bytes, refuse: Refuse) -> Iterator[Named]:
    """The files of an archive that is in memory, within the same bounds."""
    return _content(name, io.BytesIO(content), refuse)


class _Counter:
    files = 0


@dataclass(frozen=True)
class _At:
    """What is to be opened: a path, below an open directory where there is one. Opening never waits for a pipe."""

    path: str
    flags: int = 0
    dir_fd: int | None = None

    def open(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | self.flags, dir_fd=self.dir_fd)


@contextmanager
def _opened(name: str, at: _At, refuse: Refuse) -> Iterator[int | None]:
    try:
        fd = at.open()
    except OSError as error:
        refuse(name, f"cannot be opened: {error.strerror}")
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _directory(fd: int, label: str, depth: int, counter: _Counter, refuse: Refuse) -> Iterator[Named]:
    try:
        names = sorted(os.listdir(fd))
    except OSError as error:
        refuse(label, f"cannot be listed: {error.strerror}")
        return
    for name in names:
        counter.files += 1
        if counter.files > FILES_MAX:
            refuse(label, "more files than the reader's limit: the rest is left out")
            return
        try:
            kind = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
        except OSError as error:
            refuse(label + name, f"cannot be looked at: {error.strerror}")
            continue
        at = _At(name, os.O_NOFOLLOW, fd)
        if stat.S_ISLNK(kind):
            refuse(label + name, "a link is not followed")
        elif stat.S_ISREG(kind):
            yield from _file(label + name, at, refuse)
        elif not stat.S_ISDIR(kind):
            refuse(label + name, "not a regular file")
        elif depth >= DEPTH_MAX:
            refuse(label + name, "nested deeper than the reader's limit")
        else:
            with _opened(label + name, replace(at, flags=os.O_NOFOLLOW | os.O_DIRECTORY), refuse) as below:
                if below is not None:
                    yield from _directory(below, f"{label}{name}/", depth + 1, counter, refuse)


def _file(name: str, at: _At, refuse: Refuse) -> Iterator[Named]:
    with _opened(name, at, refuse) as fd:
        if fd is None:
            return
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            refuse(name, "not a regular file")
            return
        with open(fd, "rb", closefd=False) as raw:
            yield from _content(name, raw, refuse)


def _content(name: str, raw: IO[bytes], refuse: Refuse) -> Iterator[Named]:
    """The file itself, or what it unpacks to, or the members if that is an archive."""
    magic = raw.read(4)
    raw.seek(0)
    try:
        if magic.startswith(_GZIP):
            stream = _Unpacking(gzip.GzipFile(fileobj=raw), raw)
        elif magic == _ZSTD:
            unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
            stream = _Unpacking(unpacker.stream_reader(raw, read_across_frames=True, closefd=False), raw)
        else:
            stream = _Unpacking(raw, raw)
        packed = magic.startswith(_GZIP) or magic == _ZSTD
        if stream.peek(_TAR_MAGIC_AT + len(_TAR_MAGIC))[_TAR_MAGIC_AT:] == _TAR_MAGIC:
            yield from _members(name, stream, refuse)
        else:
            yield _bare(name) if packed else name, _chunks(name, stream, refuse)
    except _BROKEN as error:
        refuse(name, f"cannot be unpacked: {error}"[:300])


def _bare(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Unpacking:
    """A stream that gives up where it has unpacked too much."""

    def __init__(self, source: _Readable, packed: IO[bytes]) -> None:
        self._source = source
        self._packed = packed
        self._head = b""
        self._unpacked = 0
        self._is_packed = source is not packed

    def peek(self, size: int) -> bytes:
        """The first bytes, which `read` gives again."""
        while len(self._head) < size and (more := self._source.read(size - len(self._head))):
            self._head += more
        return self._head

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, empty at the end.

        Raises: AgentFault (too much), and what the decompressor raises.
        """
        if self._head:
            part, self._head = self._head[:size], self._head[size:]
        else:
            part = self._source.read(size)
        self._unpacked += len(part)
        if self._is_packed and self._unpacked > min(UNPACKED_BYTES_MAX, self._allowed()):
            raise AgentFault("it unpacks to absurdly more than it is", reason="bomb")
        return part

    def _allowed(self) -> int:
        return max(RATIO_COUNTS_FROM_BYTES, RATIO_MAX * self._packed.tell())


class _BoundedInfo(tarfile.TarInfo):
    """A member whose extended headers (long names, attributes) are small; larger ones would be held in memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) and self.size > TAR_HEADER_BYTES_MAX:
            raise tarfile.ReadError("a header is larger than the reader's limit")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return member


def _members(name: str, stream: _Unpacking, refuse: Refuse) -> Iterator[Named]:
    count = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_BoundedInfo, bufsize=CHUNK_BYTES) as archive:  # type: ignore[call-overload]
            for member in archive:
                count += 1
                if count > FILES_MAX:
                    refuse(name, "more members than the reader's limit: the rest is left out")
                    return
                if member.isdir():
                    continue
                label = member.name
                if label.startswith("/") or ".." in label.split("/"):
                    refuse(label, "its name leads out of the archive: not read")
                elif not member.isreg() or member.issparse():
                    refuse(label, "a link or special member of the archive is not followed")
                elif (content := archive.extractfile(member)) is not None:
                    yield label, _chunks(label, content, refuse)
                archive.members = []  # a long archive is not kept
    except (*_BROKEN, AgentFault) as error:
        refuse(name, f"cannot be read to its end: {error}"[:300])


def _chunks(name: str, stream: _Readable, refuse: Refuse) -> Iterator[bytes]:
    while True:
        try:
            chunk = stream.read(CHUNK_BYTES)
        except (*_BROKEN, AgentFault) as error:
            refuse(name, f"cannot be read to its end: {error}"[:300])
            return
        if not chunk:
            return
        yield chunk
