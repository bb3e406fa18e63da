"""`health.jsonl` as one table per source: GPUs (NVML), NICs, hosts; states of processes; lines of the kernel log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from diagnosis.contracts.incident import WORLD_MAX, HealthTable, KernelLine
from diagnosis.evidence.bundle import files
from diagnosis.evidence.limits import Limits, Names
from diagnosis.evidence.notes import Notes
from diagnosis.evidence.values import MALFORMED, ODD_VALUE, integer, loose, number, text

_LINK: Final = {"up": 1.0, "down": 0.0}


@dataclass
class _Source:
    """One source's columns while they are collected. `entity`: the field that names the part of the node."""

    fields: tuple[str, ...]
    counters: tuple[str, ...]
    entity_field: str
    nodes: list[int] = field(default_factory=list)
    entities: list[int | str] = field(default_factory=list)
    values: list[list[float | None]] = field(default_factory=list)

    def build(self) -> HealthTable | None:
        if not self.nodes:
            return None
        values = np.array(self.values, np.float64).reshape(-1, len(self.fields))
        columns = {name: np.ascontiguousarray(values[:, at]) for at, name in enumerate(self.fields)}
        return HealthTable(np.array(self.nodes, np.int32), tuple(self.entities), columns)


class HealthTables:
    """Collects lines; `nodes` is shared with the job: a node without a rank may be observed too."""

    def __init__(self, nodes: Names, limits: Limits, notes: Notes) -> None:
        self._nodes = nodes
        self._limits = limits
        self._notes = notes
        self._rows = 0
        self._kernel: list[KernelLine] = []
        self._processes: dict[int, str] = {}
        self._sources = {
            "nvml": _Source(files.NVML, files.NVML_COUNTERS, "gpu"),
            "ib": _Source(files.IB, files.IB_COUNTERS, "nic"),
            "host": _Source(files.HOST, (), ""),
        }

    def read(self, file: str, lines: Iterable[tuple[int, bytes]]) -> None:
        """All lines of the file."""
        for at, content in lines:
            try:
                line = msgspec.json.decode(content)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                try:
                    line = loose(content)
                except ValueError:
                    line = None
            if not isinstance(line, dict):
                self._notes.skip(file, MALFORMED, at)
            elif self._rows >= self._limits.observations_max:
                self._notes.skip(file, "more observations than the reader's limit: skipped", at)
            else:
                self._add(file, at, line)

    def _add(self, file: str, at: int, line: dict[str, object]) -> None:
        node, source = text(line.get("node")), line.get("source")
        if source == "process":
            self._add_process(file, at, line)
            return
        index = self._nodes.index(node)
        if node is None or index < 0:
            self._notes.skip(file, "an observation without a node is skipped", at)
        elif source == "kmsg":
            self._add_kernel_line(file, at, node, line.get("line"))
        elif isinstance(source, str) and source in self._sources:
            self._add_row(file, at, index, self._sources[source], line)
        else:
            self._notes.add(file, "an observation of a source that is not known is skipped", at)

    def _add_kernel_line(self, file: str, at: int, node: str, content: object) -> None:
        if not isinstance(content, str):
            self._notes.skip(file, "a kernel line without text is skipped", at)
        elif len(self._kernel) >= self._limits.kernel_lines_max:
            self._notes.skip(file, "more kernel lines than the reader's limit: skipped", at)
        else:
            self._kernel.append(KernelLine(node, content[: self._limits.kernel_line_chars_max]))

    def _add_process(self, file: str, at: int, line: dict[str, object]) -> None:
        rank, state = integer(line.get("rank")), line.get("state")
        if rank is None or not 0 <= rank < WORLD_MAX or not isinstance(state, str) or not _is_letter(state):
            self._notes.skip(file, "a process without a possible rank or state is skipped", at)
            return
        self._rows += 1
        self._processes[rank] = state

    def _add_row(self, file: str, at: int, node: int, source: _Source, line: dict[str, object]) -> None:
        entity: int | str | None = ""
        if source.entity_field == "gpu":
            entity = integer(line.get("gpu"))
        elif source.entity_field:
            entity = text(line.get(source.entity_field))
        if entity is None or (isinstance(entity, int) and entity < 0):
            self._notes.skip(file, f"an observation without a {source.entity_field} is skipped", at)
            return
        old = line.get("since") is not None
        values: list[float | None] = []
        for name in source.fields:
            raw = line.get(name)
            value = _value(name, raw)
            if raw is not None and value is None:
                self._notes.add(file, ODD_VALUE, at)
            if old and value and name in source.counters:
                self._notes.add(file, f"{name} counts since before the incident and says nothing of it", at)
                value = None
            values.append(value)
        self._rows += 1
        source.nodes.append(node)
        source.entities.append(entity[: self._limits.name_chars_max] if isinstance(entity, str) else entity)
        source.values.append(values)

    def tables(self) -> dict[str, HealthTable | None]:
        """By source."""
        return {name: source.build() for name, source in self._sources.items()}

    def process_states(self, world: int) -> dict[int, str]:
        """Letter by rank."""
        known = {rank: state for rank, state in sorted(self._processes.items()) if rank < world}
        beyond = len(self._processes) - len(known)
        self._notes.add(files.HEALTH, "a process of a rank beyond the world's size is left out", count=beyond)
        return known

    def kernel_log(self) -> tuple[KernelLine, ...]:
        """In the order of the file."""
        return tuple(self._kernel)


def _is_letter(state: str) -> bool:
    return len(state) == 1 and state.isascii() and state.isprintable() and state != " "


def _value(name: str, raw: object) -> float | None:
    if name == "link":
        return _LINK.get(raw) if isinstance(raw, str) else None
    if name in files.YES_OR_NO and isinstance(raw, bool):
        return float(raw)
    value = number(raw)
    return None if value is not None and value < 0 and name not in files.BELOW_ZERO else value
