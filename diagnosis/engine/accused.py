"""Whose hardware a line of the kernel log is about.

The driver names a GPU by its PCI address, a job by its index, and an incident has no table of the two. But what makes
the driver speak leaves a trace in NVML as well: a GPU with uncorrectable memory errors counts them or waits to have a
row remapped, one with a dead NVLink says so, one that is lost answers nothing while the others of its node do. Where a
node's log speaks of one GPU only and one GPU only of that node has the trace that fits, they are the same. A trace
alone accuses nobody: a collector that read nothing is a tool's failure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from diagnosis.contracts.incident import HealthTable, Incident
from diagnosis.engine.lanes import Bools
from diagnosis.engine.witnesses import Finding, Witnesses
from diagnosis.evidence import kernel_log

MEMORY_XIDS: Final = frozenset({48, 64, 94, 95, 140})
"""Uncorrectable memory errors and rows that could not be remapped (NVIDIA, Xid catalogue)."""
MEMORY_FIELDS: Final = ("ecc_dbe", "row_remap_pending", "row_remap_failure")
NVLINK_FIELDS: Final = ("nvlink_down",)
LOST: Final = ()
"""No field at all: the trace is that none is told."""
CAUSES: Final = ("gpu_fault", "nvlink_fault")


def name_gpus(witnesses: Witnesses, incident: Incident) -> Witnesses:
    """The same findings; those of a kernel log about a GPU name it by its index where NVML tells which one it is."""
    if incident.nvml is None:
        return witnesses
    told: dict[str, set[tuple[str, tuple[str, ...]]]] = {}
    for line in incident.kernel_log:
        fact = kernel_log.read_line(line.line)
        trace = _trace(fact) if fact is not None else None
        if fact is not None and trace is not None:
            told.setdefault(line.node, set()).add((fact.entity, trace))
    of_node = dict(witnesses.of_node)
    for node, facts in told.items():
        marked = {gpu for _, trace in facts for gpu in _marked(incident, incident.nvml, node, trace)}
        if len({bus for bus, _ in facts}) == 1 and len(marked) == 1:
            gpu = marked.pop()
            of_node[node] = tuple(_about(finding, gpu) for finding in of_node.get(node, ()))
    return Witnesses(of_node)


def _trace(fact: kernel_log.KernelFact) -> tuple[str, ...] | None:
    """The fields of NVML in which a fact shows; None for a fact that is not about a GPU."""
    if fact.number in kernel_log.XID_OF_NVLINK and fact.kind == "xid":
        return NVLINK_FIELDS
    if fact.kind != "xid" or fact.number not in kernel_log.XID_FATAL:
        return None
    return MEMORY_FIELDS if fact.number in MEMORY_XIDS else LOST


def _about(finding: Finding, gpu: int) -> Finding:
    of_gpu = finding.source == "kmsg" and finding.cause in CAUSES and finding.entity == ""
    return replace(finding, entity=gpu) if of_gpu else finding


def _marked(incident: Incident, nvml: HealthTable, node: str, fields: tuple[str, ...]) -> set[int]:
    """GPUs of a node that have a trace."""
    names = incident.job.node_names
    here = np.flatnonzero(nvml.node == (names.index(node) if node in names else -1))
    marks = _positive(nvml, fields)[here] if fields else _silent(nvml)[here]
    if not fields and marks.all():
        return set()
    return {gpu for row in here[marks] for gpu in [nvml.entity[row]] if isinstance(gpu, int)}


def _positive(nvml: HealthTable, fields: tuple[str, ...]) -> Bools:
    columns = [np.nan_to_num(nvml.values[name]) > 0 for name in fields if name in nvml.values]
    return np.any(columns, axis=0) if columns else np.zeros(len(nvml.node), np.bool_)


def _silent(nvml: HealthTable) -> Bools:
    """Rows in which nothing is told."""
    columns = [np.isnan(column) for name, column in nvml.values.items() if name != "since"]
    return np.all(columns, axis=0) if columns else np.zeros(len(nvml.node), np.bool_)
