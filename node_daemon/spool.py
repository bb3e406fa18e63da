"""Reports that the controller has not acknowledged, on disk: one file each, bounded in number and bytes.

Files are named by the report's identity (epoch, sample), so their order is the order of measurement, and come into
being by rename, so a crash leaves a whole report or none. Nothing is forced to the disk: after a crash of the node an
empty or torn file may remain, which is dropped and counted like any other garbage. A disk that is full or broken costs
reports, which are counted, and never the daemon.
"""

from __future__ import annotations

import bisect
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.contracts.report import WIRE_BYTES_MAX
from node_daemon.log import EventLog

_NAME: Final = re.compile(r"\d{19}-\d{10}\.report", re.ASCII)
_FILE_BYTES_MAX: Final = WIRE_BYTES_MAX + 4096
_log = EventLog("node_daemon.spool")


class Spooled(msgspec.Struct, array_like=True, frozen=True):
    """An encoded report and when it was measured: by the monotonic clock of the boot named, and by the wall clock."""

    epoch: int
    sample: int
    boot_id: str
    mono_ns: int
    wall_ns: int
    body: bytes

    def age_ms(self, boot_id: str, mono_ns: int, wall_ns: int) -> int:
        """Time since it was measured. Across a reboot only the wall clock tells."""
        age_ns = mono_ns - self.mono_ns if boot_id == self.boot_id else wall_ns - self.wall_ns
        return max(0, age_ns // 1_000_000)


def _name(report: Spooled) -> str:
    return f"{report.epoch:019d}-{report.sample:010d}.report"


class Spool:
    """See the module. `dropped`: reports lost since the start. Not safe for several threads at once."""

    def __init__(self, directory: Path, *, reports_max: int, bytes_max: int) -> None:
        self._directory, self._reports_max, self._bytes_max = directory, reports_max, bytes_max
        self._sizes: dict[str, int] = {}
        self._order: list[str] = []
        self.bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._order)

    def open(self) -> None:
        """Take up what a former life left. Raises OSError where the directory cannot be made or listed."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    self._enter(entry.name, entry.stat(follow_symlinks=False).st_size)
                elif entry.name.endswith(".part"):
                    self._delete(entry.name)
        self._shrink()

    def put(self, report: Spooled) -> None:
        """Keep a report; the oldest go when it is one too many."""
        name = _name(report)
        data = msgspec.msgpack.encode(report)
        part = self._directory / f"{name}.part"
        try:
            part.write_bytes(data)
            part.replace(self._directory / name)
        except OSError as error:
            self._drop("not written", error)
            self._delete(part.name)
            return
        if name not in self._sizes:
            self._enter(name, len(data))
        self._shrink()

    def oldest(self) -> Spooled | None:
        """The report measured first, None when there is none. What cannot be read is dropped on the way."""
        while self._order:
            name = self._order[0]
            try:
                with (self._directory / name).open("rb") as file:
                    report = msgspec.msgpack.decode(file.read(_FILE_BYTES_MAX), type=Spooled)
                if _name(report) == name:
                    return report
                self._drop("not its name", None)
            except (OSError, msgspec.DecodeError) as error:
                self._drop("not readable", error)
            self._forget(name)
        return None

    def remove(self, report: Spooled) -> None:
        """Forget a report that has been delivered or refused; nothing happens where it has gone already."""
        name = _name(report)
        if name in self._sizes:
            self._forget(name)

    def _enter(self, name: str, size: int) -> None:
        bisect.insort(self._order, name)
        self._sizes[name] = size
        self.bytes += size

    def _forget(self, name: str) -> None:
        self._order.remove(name)
        self.bytes -= self._sizes.pop(name)
        self._delete(name)

    def _shrink(self) -> None:
        while len(self._order) > self._reports_max or self.bytes > self._bytes_max:
            self._drop("full", None)
            self._forget(self._order[0])

    def _drop(self, why: str, error: Exception | None) -> None:
        self.dropped += 1
        _log.sparsely(f"dropped {why}", "report lost", why=why, error=error, dropped=self.dropped)

    def _delete(self, name: str) -> None:
        try:
            (self._directory / name).unlink(missing_ok=True)
        except OSError as error:
            _log.sparsely("delete", "file not removed", file=name, error=error.strerror)
