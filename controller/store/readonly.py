"""A state file, or a copy of one, read without changing it: no lock, no migration, nothing left beside it.

Works beside a running controller too: SQLite's readers and its writer do not disturb each other.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from controller.store.base import Incident
from diagnosis.contracts.errors import OperatorFault

TABLES_MIN: Final = 2
"""`user_version` from which inputs are kept."""
_INCIDENT: Final = msgspec.json.Decoder(Incident)


class StateCopy:
    """Incidents and their inputs. Use as a context. Raises OperatorFault (reason `store`) for whatever is wrong."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise OperatorFault(f"{path}: no such file", reason="store")
        log = path.with_name(path.name + "-wal")
        # Without a log the file is whole, and SQLite need not make one; so a copy may lie where nobody may write.
        whole = not log.exists() or log.stat().st_size == 0
        self._path = path
        self._uri = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if whole else ''}"

    def __enter__(self) -> StateCopy:
        try:
            self._connection = sqlite3.connect(self._uri, uri=True, isolation_level=None)
        except sqlite3.Error as error:
            raise self._fault(error) from error
        try:
            ((version,),) = self._read("PRAGMA user_version")
        except OperatorFault:
            self._connection.close()
            raise
        self._has_inputs = version >= TABLES_MIN
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()

    def incidents(self, limit: int) -> list[Incident]:
        """Newest first, without their timelines."""
        return self._incidents("ORDER BY opened_at DESC, id LIMIT ?", limit)

    def incident(self, number: str) -> Incident | None:
        """One, without its timeline."""
        found = self._incidents("WHERE id = ?", number)
        return found[0] if found else None

    def inputs(self, number: str) -> bytes | None:
        """What its verdict was given on, as `.tar.zst`. None: not kept."""
        rows = self._read("SELECT payload FROM inputs WHERE incident = ?", number) if self._has_inputs else []
        return rows[0][0] if rows else None

    def _incidents(self, which: str, *values: object) -> list[Incident]:
        rows = self._read(f"SELECT body FROM incident {which}", *values)  # noqa: S608
        try:
            return [_INCIDENT.decode(body) for (body,) in rows]
        except (msgspec.DecodeError, TypeError, RecursionError) as error:
            raise self._fault(error) from error

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with closing(self._connection.execute(query, values)) as cursor:
                return cursor.fetchall()
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def _fault(self, error: Exception) -> OperatorFault:
        return OperatorFault(f"{self._path} is no state file of tocsin, or a damaged one: {error}", reason="store")
