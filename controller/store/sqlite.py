"""The store in one SQLite file: write-ahead log, synchronous=FULL, one thread that owns the only connection.

All calls run on that thread in the order of their arrival, so no two transactions ever meet. An exclusive `flock` on
`<file>.lock` keeps a second controller off the same state; the kernel drops it when the process dies, however it dies.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from controller.store.base import (
    EVIDENCE_ROWS_MAX,
    EVIDENCE_TOTAL_BYTES_MAX,
    INPUTS_BYTES_MAX,
    LINES_MAX,
    OUTBOX_WAITING_MAX,
    TEXT_CHARS_MAX,
    EvidenceRow,
    Incident,
    Message,
    NodeMark,
    OutboxCounts,
)
from diagnosis.contracts.control import EVIDENCE_BYTES_MAX
from diagnosis.contracts.errors import AgentFault, OperatorFault
from remediation.policy.case import ActRecord

T = TypeVar("T")
Row = tuple[object, ...]
_GATHER_S: Final = 0.02
"""Node marks that arrive within this time share one write."""
_INCIDENT: Final = msgspec.json.Decoder(Incident)
_ARGS: Final = msgspec.json.Decoder(dict[str, str])
_ACT_COLUMNS: Final = "seq, incident, kind, target, args, intent_at, outcome, detail, concluded_at, why"


class SqliteStore:
    """See `controller.store.base.Store`. Made by `open`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self._path = path
        self._lock_fd = lock_fd
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._connection: sqlite3.Connection
        self._marks: dict[str, NodeMark] = {}  # not yet written
        self._marks_written: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: Path) -> SqliteStore:
        """Open or create the file and bring its tables up to date.

        Raises OperatorFault: reason `locked` when another controller has it, `store` when it cannot be used.
        """
        store = cls(path, _lock(path))
        try:
            await store._run(store._connect)
        except OperatorFault:
            store._thread.shutdown()
            os.close(store._lock_fd)
            raise
        return store

    async def close(self) -> None:
        if self._marks_written is not None:
            await self._marks_written
        await self._run(lambda: self._connection.close())
        self._thread.shutdown()
        os.close(self._lock_fd)

    async def _run(self, work: Callable[[], T]) -> T:
        """Run `work` on the store's thread."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise OperatorFault(f"state file {self._path}: {error}; free or repair the disk", reason="store") from error
        except msgspec.DecodeError as error:
            text = f"state file {self._path}: an entry is damaged or of another version: {error}; restore a copy"
            raise OperatorFault(text, reason="store") from error

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction of its own."""

        def transaction() -> T:
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:
                return work(self._connection)

        return await self._run(transaction)

    async def _read(self, query: str, values: Row = ()) -> list[tuple[Any, ...]]:
        return await self._run(lambda: self._connection.execute(query, values).fetchall())

    def _connect(self) -> None:
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=True)
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "journal_size_limit=67108864"):
            self._connection.execute(f"PRAGMA {pragma}")
        _migrate(self._connection, self._path)

    # incidents

    async def add_incident(self, incident: Incident) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO incident (id, opened_at, closed_at, phase, body) VALUES (?, ?, ?, ?, ?)",
                (incident.id, incident.opened_at, incident.closed_at, incident.phase, _body(incident)),
            )
            lines = [(incident.id, at, text[:TEXT_CHARS_MAX]) for at, text in incident.timeline[:LINES_MAX]]
            connection.executemany("INSERT INTO line (incident, at, text) VALUES (?, ?, ?)", lines)

        try:
            await self._write(work)
        except sqlite3.IntegrityError as error:
            raise ValueError(f"incident {incident.id} exists already") from error

    async def save_incident(self, incident: Incident) -> None:
        values = (incident.closed_at, incident.phase, _body(incident), incident.id)
        changed = await self._write(
            lambda connection: (
                connection.execute(
                    "UPDATE incident SET closed_at = ?, phase = ?, body = ? WHERE id = ?", values
                ).rowcount
            )
        )
        if not changed:
            raise ValueError(f"incident {incident.id} is not known")

    async def incident(self, incident_id: str) -> Incident | None:
        found = await self._incidents("WHERE id = ?", (incident_id,))
        return found[0] if found else None

    async def incidents(self, limit: int, open_only: bool = False) -> list[Incident]:
        which = "WHERE phase <> 'closed' " if open_only else ""
        return await self._incidents(f"{which}ORDER BY opened_at DESC, id LIMIT ?", (limit,))

    async def incidents_open(self) -> int:
        rows = await self._read("SELECT count(*) FROM incident WHERE phase <> 'closed'")
        return int(rows[0][0])

    async def _incidents(self, which: str, values: Row) -> list[Incident]:
        def work() -> list[Incident]:
            bodies = self._connection.execute(f"SELECT body FROM incident {which}", values).fetchall()  # noqa: S608
            found = [_INCIDENT.decode(body) for (body,) in bodies]
            for incident in found:
                query = "SELECT at, text FROM line WHERE incident = ? ORDER BY seq"
                incident.timeline = self._connection.execute(query, (incident.id,)).fetchall()
            return found

        return await self._run(work)

    async def add_line(self, incident_id: str, at: float, text: str) -> None:
        values = (incident_id, at, text[:TEXT_CHARS_MAX], incident_id, LINES_MAX)
        await self._write(
            lambda connection: connection.execute(
                "INSERT INTO line (incident, at, text) SELECT ?, ?, ?"
                " WHERE (SELECT count(*) FROM line WHERE incident = ?) < ?",
                values,
            )
        )

    # ledger

    async def intend(self, incident: str, kind: str, target: str, args: dict[str, str], why: str, at: float) -> int:
        values = (incident, kind, target, msgspec.json.encode(args), why[:TEXT_CHARS_MAX], at)
        seq = await self._write(
            lambda connection: (
                connection.execute(
                    "INSERT INTO act (incident, kind, target, args, why, intent_at) VALUES (?, ?, ?, ?, ?, ?)", values
                ).lastrowid
            )
        )
        assert seq is not None
        return seq

    async def conclude(self, seq: int, outcome: Literal["ok", "failed"], detail: str, at: float) -> None:
        values = (outcome, detail[:TEXT_CHARS_MAX], at, seq)
        changed = await self._write(
            lambda connection: (
                connection.execute(
                    "UPDATE act SET outcome = ?, detail = ?, concluded_at = ? WHERE seq = ? AND outcome IS NULL", values
                ).rowcount
            )
        )
        if not changed:
            raise ValueError(f"act {seq} is not open")

    async def acts(self, incident: str) -> list[ActRecord]:
        return await self._acts("WHERE incident = ? ORDER BY seq", (incident,))

    async def acts_since(self, at: float) -> list[ActRecord]:
        return await self._acts("WHERE intent_at >= ? ORDER BY seq", (at,))

    async def _acts(self, which: str, values: Row) -> list[ActRecord]:
        query = f"SELECT {_ACT_COLUMNS} FROM act {which}"  # noqa: S608
        return await self._run(lambda: [_act(row) for row in self._connection.execute(query, values)])

    # evidence

    async def add_evidence(self, incident: str, node: str, kind: str, payload: bytes, at: float) -> None:
        if len(payload) > EVIDENCE_BYTES_MAX:
            raise AgentFault(f"{len(payload)} bytes, at most {EVIDENCE_BYTES_MAX} are taken", reason="limits")

        def work(connection: sqlite3.Connection) -> None:
            if connection.execute("SELECT 1 FROM incident WHERE id = ?", (incident,)).fetchone() is None:
                raise AgentFault(f"no incident {incident} is known", reason="incident")
            query = "SELECT count(*), coalesce(sum(length(payload)), 0) FROM evidence WHERE incident = ?"
            rows, total_bytes = connection.execute(query, (incident,)).fetchone()
            if rows >= EVIDENCE_ROWS_MAX or total_bytes + len(payload) > EVIDENCE_TOTAL_BYTES_MAX:
                raise AgentFault(f"incident {incident} has all the evidence it may have", reason="limits")
            connection.execute(
                "INSERT INTO evidence (incident, node, kind, at, payload) VALUES (?, ?, ?, ?, ?)",
                (incident, node, kind, at, payload),
            )

        await self._write(work)

    async def evidence(self, incident: str) -> list[EvidenceRow]:
        rows = await self._read(
            "SELECT node, kind, at, payload FROM evidence WHERE incident = ? ORDER BY seq", (incident,)
        )
        return [EvidenceRow(node=node, kind=kind, at=at, payload=payload) for node, kind, at, payload in rows]

    async def keep_inputs(self, incident: str, payload: bytes, at: float) -> None:
        if len(payload) > INPUTS_BYTES_MAX:
            raise AgentFault(f"{len(payload)} bytes, at most {INPUTS_BYTES_MAX} are kept", reason="limits")
        statement = "INSERT OR REPLACE INTO inputs (incident, at, payload) VALUES (?, ?, ?)"
        try:
            await self._execute(statement, (incident, at, payload))
        except sqlite3.IntegrityError as error:
            raise AgentFault(f"no incident {incident} is known", reason="incident") from error

    async def inputs(self, incident: str) -> bytes | None:
        rows = await self._read("SELECT payload FROM inputs WHERE incident = ?", (incident,))
        return rows[0][0] if rows else None

    # outbox

    async def enqueue(self, key: str, incident: str, body: bytes, at: float, *, target: str = "") -> bool:
        values = (key, incident, target, body, at, at, OUTBOX_WAITING_MAX)
        added = await self._write(
            lambda connection: (
                connection.execute(
                    "INSERT OR IGNORE INTO outbox (key, incident, target, body, at, next_at) SELECT ?, ?, ?, ?, ?, ?"
                    " WHERE (SELECT count(*) FROM outbox WHERE state = 'waiting') < ?",
                    values,
                ).rowcount
            )
        )
        return added > 0

    async def due(self, now: float, limit: int) -> list[Message]:
        rows = await self._read(
            "SELECT id, key, incident, target, body, at, attempts FROM"
            " (SELECT *, row_number() OVER (PARTITION BY target ORDER BY id) AS place FROM outbox"
            " WHERE state = 'waiting' AND next_at <= ?) WHERE place <= ? ORDER BY id",
            (now, limit),
        )
        names = Message.__struct_fields__
        return [Message(**dict(zip(names, row, strict=True))) for row in rows]

    async def sent(self, message_id: int, at: float) -> None:
        await self._execute(
            "UPDATE outbox SET state = 'sent', ended_at = ? WHERE id = ? AND state = 'waiting'", (at, message_id)
        )

    async def failed(self, message_id: int, next_at: float | None, error: str, at: float) -> None:
        await self._execute(
            "UPDATE outbox SET attempts = attempts + 1, error = ?, next_at = coalesce(?, next_at),"
            " state = CASE WHEN ? IS NULL THEN 'dead' ELSE 'waiting' END,"
            " ended_at = CASE WHEN ? IS NULL THEN ? END WHERE id = ? AND state = 'waiting'",
            (error[:TEXT_CHARS_MAX], next_at, next_at, next_at, at, message_id),
        )

    async def outbox_counts(self) -> OutboxCounts:
        rows = await self._read(
            "SELECT coalesce(sum(state = 'waiting'), 0), coalesce(sum(state = 'sent'), 0),"
            " coalesce(sum(state = 'dead'), 0),"
            " coalesce((SELECT error FROM outbox WHERE error <> '' ORDER BY id DESC LIMIT 1), '') FROM outbox"
        )
        waiting, sent, dead, last_error = rows[0]
        return OutboxCounts(waiting=waiting, sent=sent, dead=dead, last_error=last_error)

    # nodes

    async def node_seen(self, node: str) -> NodeMark | None:
        if node in self._marks:
            return self._marks[node]
        rows = await self._read("SELECT epoch, counter, seen, at FROM node WHERE name = ?", (node,))
        return NodeMark(*rows[0]) if rows else None

    async def nodes_seen(self) -> dict[str, NodeMark]:
        rows = await self._read("SELECT name, epoch, counter, seen, at FROM node")
        return {name: NodeMark(*mark) for name, *mark in rows} | self._marks

    async def see_node(self, node: str, mark: NodeMark) -> None:
        self._marks[node] = mark
        if self._marks_written is None:
            self._marks_written = asyncio.create_task(self._write_marks())
        await asyncio.shield(self._marks_written)

    async def _write_marks(self) -> None:
        await asyncio.sleep(_GATHER_S)
        rows = [(node, *mark) for node, mark in self._marks.items()]
        self._marks = {}
        self._marks_written = None  # whoever comes from here on waits for the next write
        await self._write(
            lambda connection: connection.executemany(
                "INSERT OR REPLACE INTO node (name, epoch, counter, seen, at) VALUES (?, ?, ?, ?, ?)", rows
            )
        )

    # housekeeping

    async def prune(self, *, evidence_before: float, incidents_before: float) -> int:
        def work(connection: sqlite3.Connection) -> int:
            before = connection.total_changes
            old = "WHERE incident IN (SELECT id FROM incident WHERE closed_at < ?)"
            connection.execute(f"DELETE FROM evidence {old}", (evidence_before,))  # noqa: S608
            connection.execute(f"DELETE FROM inputs {old}", (evidence_before,))  # noqa: S608
            connection.execute("DELETE FROM outbox WHERE ended_at < ?", (evidence_before,))
            connection.execute("DELETE FROM incident WHERE closed_at < ?", (incidents_before,))
            return connection.total_changes - before

        return await self._write(work)

    async def _execute(self, statement: str, values: Row) -> None:
        await self._write(lambda connection: connection.execute(statement, values))


def _body(incident: Incident) -> bytes:
    """The incident as JSON without its timeline, which has a table of its own."""
    fields = msgspec.structs.asdict(incident)
    fields["timeline"] = []
    return msgspec.json.encode(fields)


def _act(row: tuple[Any, ...]) -> ActRecord:
    seq, incident, kind, target, args, intent_at, outcome, detail, concluded_at, why = row
    return ActRecord(seq, incident, kind, target, _ARGS.decode(args), intent_at, outcome, detail, concluded_at, why)


def _lock(path: Path) -> int:
    """An exclusive lock beside the state file, as an open file descriptor."""
    place = path.with_name(path.name + ".lock")
    try:
        fd = os.open(place, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OperatorFault(f"{place}: {error.strerror}", reason="store") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise OperatorFault(
            f"another controller (pid {owner}) works on {path}; two on one state would act twice", reason="locked"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Run the numbered scripts that the file has not seen, each in a transaction with its number."""
    folder = resources.files("controller.store") / "migrations"
    scripts = sorted((item for item in folder.iterdir() if item.name.endswith(".sql")), key=lambda item: item.name)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(scripts):
        raise OperatorFault(
            f"{path} was written by a newer tocsin (tables {version}, known {len(scripts)}); upgrade this one",
            reason="store",
        )
    for number, script in enumerate(scripts[version:], version + 1):
        connection.executescript(f"BEGIN IMMEDIATE;\n{script.read_text()}\nPRAGMA user_version = {number};\nCOMMIT;")
