"""Log lines as short words with key=values, for journald and people: `level=warning event="refused" reason=replayed`.

The standard library's logging with a formatter of its own; structlog would cost 4 MB of memory on every node.
Values may come from jobs and peers, so all that is not plain is quoted and escaped and every value is cut.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from typing import Final

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:/+-]{1,200}", re.ASCII)
_VALUE_CHARS_MAX: Final = 300
_KEYS_REMEMBERED: Final = 1024


def _value(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text[:_VALUE_CHARS_MAX])


class KeyValueFormatter(logging.Formatter):
    """One line a record; the fields of `EventLog` follow the event."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without a time stamp, which the journal adds."""
        fields = {"level": record.levelname.lower(), "event": record.getMessage(), **getattr(record, "fields", {})}
        line = " ".join(f"{key}={_value(value)}" for key, value in fields.items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class EventLog:
    """Writes events. `clock` in seconds, for `sparsely`."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logging.getLogger(name)
        self._clock = clock
        self._said_at: dict[str, float] = {}

    def info(self, event: str, **fields: object) -> None:
        """Something that is as it should be."""
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        """Something that a person should know."""
        self._logger.warning(event, extra={"fields": fields})

    def sparsely(self, key: str, event: str, *, every_s: float = 60.0, **fields: object) -> None:
        """A warning that is said at most once per `every_s` for each `key`; a fault that stays must not fill a disk."""
        now = self._clock()
        if now - self._said_at.get(key, -every_s) < every_s:
            return
        if len(self._said_at) >= _KEYS_REMEMBERED:
            self._said_at.clear()
        self._said_at[key] = now
        self.warning(event, **fields)


def configure() -> None:
    """Send all records from `info` upwards to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(KeyValueFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
