"""Whose hardware a line of the kernel log is about.

The driver names a GPU by its PCI address, a job by its index, and an incident has no table of the two. But a GPU that
the driver gives up leaves a trace in NVML as well: one with uncorrectable memory errors counts them or waits to have a
row remapped, one that is lost answers nothing while the others of its node do. Where a node's log speaks of one GPU
only and one GPU only of that node has the trace that fits, they are the same. A trace alone accuses nobody: a
collector that read nothing is a tool's failure.
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


def name_gpus(witnesses: Witnesses, incident: Incident) -> Witnesses:
    """The same findings; those of a kernel log about a GPU name it by its index where NVML tells which one it is."""
    told: dict[str, set[tuple[str, bool]]] = {}
    for line in incident.kernel_log:
        fact = kernel_log.read_line(line.line)
        if fact is not None and fact.kind == "xid" and fact.number in kernel_log.XID_FATAL:
            told.setdefault(line.node, set()).add((fact.entity, fact.number in MEMORY_XIDS))
    of_node = dict(witnesses.of_node)
    for node, facts in told.items():
        gpu = _traced(incident, node, {memory for _, memory in facts}) if len({bus for bus, _ in facts}) == 1 else None
        if gpu is not None:
            of_node[node] = tuple(_about(finding, gpu) for finding in of_node.get(node, ()))
    return Witnesses(of_node)


def _about(finding: Finding, gpu: int) -> Finding:
    of_gpu = finding.source == "kmsg" and finding.cause == "gpu_fault" and finding.entity == ""
    return replace(finding, entity=gpu) if of_gpu else finding


def _traced(incident: Incident, node: str, kinds: set[bool]) -> int | None:
    """The one GPU of a node that has the trace of a memory fault (True) or of being lost (False) in NVML."""
    nvml = incident.nvml
    if nvml is None or node not in incident.job.node_names:
        return None
    here = np.flatnonzero(nvml.node == incident.job.node_names.index(node))
    marks = _memory(nvml) if True in kinds else np.zeros(len(nvml.node), np.bool_)
    if False in kinds:
        silent = _silent(nvml)
        marks = marks | (silent & (not silent[here].all()))
    found = {gpu for row in here[marks[here]] for gpu in [nvml.entity[row]] if isinstance(gpu, int)}
    return found.pop() if len(found) == 1 else None


def _memory(nvml: HealthTable) -> Bools:
    columns = [np.nan_to_num(nvml.values[name]) > 0 for name in MEMORY_FIELDS if name in nvml.values]
    return np.any(columns, axis=0) if columns else np.zeros(len(nvml.node), np.bool_)


def _silent(nvml: HealthTable) -> Bools:
    """Rows in which nothing is told."""
    columns = [np.isnan(column) for name, column in nvml.values.items() if name != "since"]
    return np.all(columns, axis=0) if columns else np.zeros(len(nvml.node), np.bool_)
