"""Fixtures that more than one test directory uses, and the check that a run leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.cluster import Lab
from tests.lab.leaks import pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary

__all__ = ["lab", "pytest_sessionfinish", "pytest_sessionstart", "pytest_terminal_summary"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A running throw-away cluster of eight nodes, shared by the tests of one file."""
    with Lab() as running:
        yield running
