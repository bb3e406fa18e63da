"""Fixtures that more than one test directory uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.cluster import Lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A running throw-away cluster of eight nodes, shared by the tests of one file."""
    with Lab() as running:
        yield running
