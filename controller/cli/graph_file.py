"""`tocsin diagnose --graph FILE`: the causal graph as a file; the ending of its name says in which form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from diagnosis.contracts.errors import OperatorFault
from diagnosis.engine.graph.draft import CausalGraph
from diagnosis.engine.graph.explain import explain
from diagnosis.engine.graph.svg import to_svg
from diagnosis.engine.graph.text import to_dot, to_json
from diagnosis.engine.verdict import Analysis

FORMS: Final = (".svg", ".json", ".dot")


def graph_writer(path: Path) -> Callable[[Analysis | None], None]:
    """Writes the graph of an analysis, over what the file held before.

    Raises: OperatorFault: at once where no form has such a name, later where there is nothing to draw or the file
    cannot be written.
    """
    if path.suffix not in FORMS:
        raise OperatorFault(f"{path}: the graph's file must end in {', '.join(FORMS)}")

    def write(analysis: Analysis | None) -> None:
        if analysis is None:
            raise OperatorFault(f"{path}: not written, the inputs tell of no ranks that could be drawn")
        try:
            path.write_bytes(_content(explain(analysis), path.suffix))
        except OSError as error:
            raise OperatorFault(f"{path}: cannot be written: {error.strerror}") from None

    return write


def _content(graph: CausalGraph, form: str) -> bytes:
    if form == ".json":
        return to_json(graph)
    return (to_svg(graph) if form == ".svg" else to_dot(graph)).encode()
