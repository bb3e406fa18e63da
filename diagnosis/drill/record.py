"""From a timeline to the records of a bundle: when samples are taken, what is missing, what is null."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from diagnosis.drill.health import Health
from diagnosis.drill.layout import Layout, Ranks
from diagnosis.drill.probe import Entry, Probe
from diagnosis.drill.timeline import Timeline

CLOCK_OFFSET_MS_MAX: Final = 3.6e6
WINDOWS_MS: Final = (200.0, 300.0, 500.0, 750.0, 1e3, 1.5e3, 2e3, 3e3, 5e3, 7.5e3, 1e4, 2e4, 6e4)
MEASURED: Final = ("send", "recv", "send_rate", "recv_rate", "dur_ms", "dur_min_ms", "dur_max_ms", "gap_ms", "age_ms")
CLUSTERS: Final = ("alder", "birch", "cedar", "east1", "hpc2", "train-b")
NAMES: Final = ("pretrain", "sft", "moe-base", "llm-7b", "run", "exp", "vision", "long-ctx")
USERS: Final = ("ada", "ml", "nlp", "research", "u1042", "yuki", "team-a")


class Samples:
    """When each node's daemon reads its frames: windows one after the other, each node at its own moment."""

    def __init__(self, rng: np.random.Generator, layout: Layout, step_ms: float, early: bool, pause_ms: float) -> None:
        self.layout = layout
        self.window_ms = next(w for w in WINDOWS_MS if w > 3.2 * step_ms)
        first = self.window_ms * (1.0 if early else float(rng.uniform(1.0, 1.3)))
        self.late = 0.2 * self.window_ms
        nodes = len(layout.node_names)
        self.phase = rng.uniform(0.0, self.late, nodes)[layout.node]
        self.offset = rng.uniform(0.0, CLOCK_OFFSET_MS_MAX, nodes)[layout.node]
        self.healthy = int(rng.integers(2, 4))
        self.incident = int(rng.integers(2, 5)) + (int(pause_ms / self.window_ms) + 2 if pause_ms else 0)
        self.times = [first + i * self.window_ms for i in range(self.healthy + self.incident)]

    @property
    def onset_ms(self) -> float:
        """After the last healthy sample of every node."""
        return self.times[self.healthy - 1] + self.late

    @property
    def end_ms(self) -> float:
        """After the last sample of every node."""
        return self.times[-1] + self.late

    def frames(self, probe: Probe, times: list[float], armed_from: int) -> list[list[dict[str, Any]]]:
        """Records per rank, one per moment of `times`; the probe is armed from sample `armed_from` on."""
        out: list[list[dict[str, Any]]] = [[] for _ in range(self.layout.world)]
        for number, time in enumerate(times):
            now = time + self.phase
            entries = probe.sample(now, self.window_ms, number >= armed_from)
            shown = now + self.offset
            for rank, comms in enumerate(entries):
                record = {"rank": rank, "t_ms": round(float(shown[rank]), 3), "window_ms": self.window_ms}
                out[rank].append(record | {"comms": comms})
        return out


def last_activity_ms(timeline: Timeline) -> float:
    """When the last round ended."""
    return max(float(t.leave[np.isfinite(t.leave)].max()) for t in timeline.tracks.values())


def blank(rng: np.random.Generator, frames: list[dict[str, Any]], share: float) -> None:
    """Makes a share of the measured values null."""
    if share <= 0:
        return
    for frame in frames:
        entries: list[Entry] = frame["comms"]
        for entry in entries:
            for key, lost in zip(MEASURED, (rng.random(len(MEASURED)) < share).tolist(), strict=True):
                if lost and key in entry:
                    entry[key] = None


def unreported(rng: np.random.Generator, layout: Layout, share: float, protected: tuple[int, ...]) -> set[int]:
    """Ranks from which nothing came: single ones and whole nodes, none that the fault is about."""
    safe = set(layout.node[list(protected)].tolist())
    nodes = np.flatnonzero(rng.random(len(layout.node_names)) < share / 2)
    ranks = np.flatnonzero((rng.random(layout.world) < share / 2) | np.isin(layout.node, nodes))
    return {int(rank) for rank in ranks if int(layout.node[rank]) not in safe}


def communicator_records(rng: np.random.Generator, layout: Layout) -> list[dict[str, Any]]:
    """`communicators.jsonl`, in the order in which they happened to be made."""
    rows = [
        {"comm": name, "ranks": members.tolist(), "kind": family.kind, "algo": family.algo, "transport": transport}
        for family in layout.families.values()
        for name, members, transport in zip(family.ids, family.groups, transports(layout, family.groups), strict=True)
    ]
    return [rows[i] for i in rng.permutation(len(rows))]


def transports(layout: Layout, groups: Ranks) -> list[str]:
    """Transport of each group: inside one node NVLink, else the network."""
    nodes = layout.node[groups]
    return ["NVLINK" if same else "NET" for same in (nodes == nodes[:, :1]).all(1)]


def job_record(rng: np.random.Generator, layout: Layout, fidelity: str, nics: dict[int, str]) -> dict[str, Any]:
    """`job.json`."""
    record: dict[str, Any] = {
        "schema": "tocsin.bundle/1",
        "cluster": CLUSTERS[int(rng.integers(len(CLUSTERS)))],
        "job_id": int(rng.integers(1_000, 9_000_000)),
        "job_name": NAMES[int(rng.integers(len(NAMES)))],
        "user": USERS[int(rng.integers(len(USERS)))],
        "world_size": layout.world,
        "nodes": [layout.node_names[node] for node in layout.node.tolist()],
        "gpus": layout.gpu.tolist(),
    }
    if layout.group_words:
        record["groups"] = layout.group_words
    if fidelity == "nccl":
        record["fidelity"] = "nccl"
    if nics:
        record["nic_of_gpu"] = {str(gpu): name for gpu, name in nics.items()}
    return record


def nic_names(rng: np.random.Generator, layout: Layout) -> dict[int, str]:
    """Sometimes the NIC of GPU K is not `mlx5_K`; then the job says which one is."""
    if rng.random() > 0.15:
        return {}
    order = rng.permutation(layout.gpus_per_node)
    return {gpu: f"mlx5_{nic}" for gpu, nic in enumerate(order.tolist())}


def health_records(health: Health, layout: Layout, nics: dict[int, str], silent: set[int]) -> list[dict[str, Any]]:
    """`health.jsonl`: nothing of a node none of whose ranks reported."""
    heard = {layout.node_names[layout.node[rank]] for rank in range(layout.world) if rank not in silent}
    for rank, row in health.ib.items():
        row["nic"] = nics.get(int(layout.gpu[rank]), row["nic"])
    return [row for row in health.records() if row["node"] in heard]
