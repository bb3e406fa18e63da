"""Logs: one JSON object a line on stderr, short words with keys, ours and the libraries' alike."""

from __future__ import annotations

import logging
import sys

import structlog

_QUIET = {
    "uvicorn.error": logging.ERROR,  # its warnings are hostile peers' to make
    "apscheduler": logging.ERROR,  # its warnings say every second that a cycle takes longer than its period
    "asyncio": logging.ERROR,
    "apprise": logging.CRITICAL,  # its warnings repeat secret addresses
}


def configure(level: str) -> None:
    """Set up both structlog and the standard library's logging. May be called again."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared, structlog.processors.format_exc_info],
            processor=structlog.processors.JSONRenderer(),
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name, quiet in _QUIET.items():
        logging.getLogger(name).setLevel(quiet)
