"""Behaviour patterns: which functions of a suspect differ from those of its peers, and what kind of trouble that is.

EROICA's observation (NSDI'26): within one job the same function behaves nearly alike on all workers, so condensed
behaviour is compared across workers of one role and never events. For each suspect and operator

    growth = its time per profiled step - the peers' median

and the trouble is read off *which* operators grew: all compute kernels by one factor (the clock), those bound by memory
more than those bound by arithmetic (the memory), copies between host and device (the bus), or one host function (data
loading, garbage collection, allocation, file access). Summaries come from the job: one witness, however many words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from diagnosis.contracts.incident import Floats, Ints, Summaries
from diagnosis.engine.lanes import Longs

HOST_FUNCTIONS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("gc_stall", re.compile(r"(?<![a-z])gc(?![a-z])|garbage", re.IGNORECASE)),
    ("allocator_stall", re.compile(r"cudaMalloc|cudaFree|cuMem|alloc|empty_?cache|hipMalloc", re.IGNORECASE)),
    ("storage_stall", re.compile(r"checkpoint|\bsave\b|torch\.load|fsync|file|storage|nfs|lustre", re.IGNORECASE)),
    ("dataloader_starvation", re.compile(r"data_?load|dataset|next\b|fetch|collate|tokeni[sz]e|decode", re.IGNORECASE)),
)
UNIFORM_SPREAD_MAX: Final = 0.15
GROWTH_PART_MIN: Final = 0.4
FACTOR_MIN: Final = 1.05


@dataclass(frozen=True, slots=True)
class Pattern:
    """What grew on a suspect. `cause`: "" where the pattern fits none; `factor`: by how much; `part`: of all growth."""

    cause: str
    factor: float
    part: float
    text: str
    grown_ms: float = 0.0


class Patterns:
    """The operators of all workers, laid out once."""

    def __init__(self, summaries: Summaries, role: Longs) -> None:
        self._of = summaries
        self._role = role
        workers, operators = len(summaries.rank), len(summaries.operator_names)
        self._worker_of_rank = {int(rank): worker for worker, rank in enumerate(summaries.rank)}
        self.mean_us = self._table(summaries.stats, "mean_us", workers, operators)
        self.total_ms = self._table(summaries.stats, "total_time_ms", workers, operators)
        steps = np.where(summaries.steps > 0, summaries.steps, np.nan)
        self.per_step_ms = self.total_ms / steps[:, None] if workers else self.total_ms

    def _table(self, stats: object, name: str, workers: int, operators: int) -> Floats:
        table = np.full((workers, operators), np.nan)
        values = stats.get(name) if isinstance(stats, dict) else None
        if values is not None:
            table[self._of.worker, self._of.operator] = values
        return table

    def _peers(self, rank: int, suspects: set[int]) -> Ints:
        ranks = self._of.rank
        inside = (ranks >= 0) & (ranks < len(self._role))
        same = np.zeros(len(ranks), np.bool_)
        same[inside] = self._role[ranks[inside]] == self._role[rank]
        innocent = np.array([int(r) not in suspects for r in ranks], np.bool_)
        peers = np.flatnonzero(same & innocent)
        return (peers if len(peers) else np.flatnonzero(innocent)).astype(np.int32)

    def of(self, rank: int, suspects: set[int]) -> Pattern | None:
        """The pattern of a suspect against peers that are none; None where it or they have no summary."""
        worker = self._worker_of_rank.get(rank)
        peers = self._peers(rank, suspects)
        if worker is None or not len(peers):
            return None
        with np.errstate(invalid="ignore", divide="ignore"):
            usual = _median_rows(self.per_step_ms[peers])
            factor = self.mean_us[worker] / _median_rows(self.mean_us[peers])
        grown = self.per_step_ms[worker] - np.nan_to_num(usual)
        own = np.array([kind in ("compute", "host", "memcpy") for kind in self._of.kind], np.bool_)
        growth = np.where(own & np.isfinite(grown), np.maximum(grown, 0.0), 0.0)
        total = float(growth.sum())
        if total <= 0:
            return Pattern("", 1.0, 0.0, "no function takes longer than on its peers")
        return replace(self._read(growth, factor, total), grown_ms=total)

    def _read(self, growth: Floats, factor: Floats, total: float) -> Pattern:
        names, kinds = self._of.operator_names, np.array(self._of.kind)
        host = np.where(kinds == "host", growth, 0.0)
        copies = float(growth[kinds == "memcpy"].sum())
        compute = kinds == "compute"
        if host.sum() >= GROWTH_PART_MIN * total:
            top = int(host.argmax())
            by = float(factor[top]) if np.isfinite(factor[top]) else 1.0
            text = f"{names[top]} takes {growth[top]:.0f} ms more a step than on its peers"
            return Pattern(_host_cause(names[top]), by, float(host.sum()) / total, text)
        if copies >= GROWTH_PART_MIN * total:
            text = f"copies between host and device take {copies:.0f} ms more a step than on its peers"
            ratio = factor[(kinds == "memcpy") & np.isfinite(factor)]
            return Pattern("pcie_degraded", float(ratio.max(initial=1.0)), copies / total, text)
        told = compute & np.isfinite(factor) & (factor > 0)
        return _compute_pattern(factor[told], float(growth[compute].sum()), total)


def _host_cause(name: str) -> str:
    return next((cause for cause, words in HOST_FUNCTIONS if words.search(name)), "")


def _compute_pattern(factor: Floats, grown_ms: float, total: float) -> Pattern:
    """One factor for all kernels speaks of the clock; very unlike factors speak of the memory."""
    if not len(factor) or factor.max() < FACTOR_MIN:
        return Pattern("", 1.0, 0.0, "no kernel grew")
    least, most = float(factor.min()), float(factor.max())
    middle = float(np.median(factor))
    if (most - least) <= UNIFORM_SPREAD_MAX * middle or least - 1 >= 0.6 * (most - 1):
        text = f"all compute kernels take {middle:.2f} times as long as on its peers"
        return Pattern("gpu_clock_throttle", middle, grown_ms / total, text)
    text = f"kernels bound by memory take up to {most:.2f} times as long as on its peers, others {least:.2f}"
    return Pattern("hbm_degraded", most, grown_ms / total, text)


def _median_rows(table: Floats) -> Floats:
    """Median over rows per column; NaN where a column has no value."""
    result = np.full(table.shape[1], np.nan)
    told = ~np.isnan(table).all(axis=0)
    if told.any():
        result[told] = np.nanmedian(table[:, told], axis=0)
    return result
