"""A bundle's files, in any order, as one `Incident`.

A file is fed as it arrives and turned into compact columns at once; what depends on other files (which ranks exist,
which communicators, which nodes) is settled at the end. So the memory is that of the columns and not of the text.

Whatever is missing, unknown or wrong is left out and noted in `Incident.unseen`, never guessed and never an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from diagnosis.contracts.exits import ExitFacts
from diagnosis.contracts.gathered import FlightFacts, ProcessFacts, RasFacts
from diagnosis.contracts.incident import Incident
from diagnosis.evidence.bundle import files
from diagnosis.evidence.bundle.communicators import CommunicatorTable
from diagnosis.evidence.bundle.fabric import build_fabric, read_fabric
from diagnosis.evidence.bundle.files import FabricFile, JobFile
from diagnosis.evidence.bundle.frames import FrameTable
from diagnosis.evidence.bundle.gathered import RankLines, read_ras, within_world
from diagnosis.evidence.bundle.health import HealthTables
from diagnosis.evidence.bundle.job import (
    build_job,
    read_job,
    told_ended,
    told_lost_nodes,
    told_thresholds,
    told_unseen,
    world_size,
)
from diagnosis.evidence.bundle.summaries import SummaryTable
from diagnosis.evidence.limits import DEFAULT, Allowance, Limits, Names
from diagnosis.evidence.lines import document, numbered_lines
from diagnosis.evidence.notes import Notes

T = TypeVar("T")


class BundleReader:
    """Feed it files by their name in the bundle, then ask for the incident."""

    def __init__(self, notes: Notes | None = None, limits: Limits = DEFAULT) -> None:
        self.notes = notes or Notes()
        self._limits = limits
        self._comm_names = Names(limits)
        self._node_names = Names(limits)
        self._job: JobFile | None = None
        self._fabric: FabricFile | None = None
        self._ras: RasFacts | None = None
        self._communicators = CommunicatorTable(self._comm_names, limits, self.notes)
        self._frames = FrameTable(self._comm_names, limits, self.notes)
        self._summaries = SummaryTable(limits, self.notes)
        self._health = HealthTables(self._node_names, limits, self.notes)
        self._flights = RankLines(FlightFacts, limits.observations_max, self.notes)
        self._processes = RankLines(ProcessFacts, limits.observations_max, self.notes)
        self._exits = RankLines(ExitFacts, limits.observations_max, self.notes)
        self.read: set[str] = set()

    def feed(self, kind: str, file: str, chunks: Iterable[bytes]) -> None:
        """One file. `kind` is its name in a bundle (one of `files.NAMES`), `file` what it is called in notes.

        Raises: KeyError (no file of a bundle is called `kind`).
        """
        if kind in (files.JOB, files.FABRIC, files.RAS):
            content = document(file, chunks, self._limits, self.notes)
            if content is not None and kind == files.JOB:
                self._job = self._first(file, self._job, read_job(file, content, self.notes))
            elif content is not None and kind == files.RAS:
                self._ras = self._first(file, self._ras, read_ras(file, content, self.notes))
            elif content is not None:
                self._fabric = self._first(file, self._fabric, read_fabric(file, content, self.notes))
        else:
            lines = numbered_lines(file, chunks, self._limits, self.notes)
            {
                files.COMMUNICATORS: self._communicators.read,
                files.FRAMES: self._frames.read,
                files.SUMMARIES: self._summaries.read,
                files.HEALTH: self._health.read,
                files.FLIGHTS: self._flights.read,
                files.PROCESSES: self._processes.read,
                files.EXITS: self._exits.read,
            }[kind](file, lines)
        self.read.add(kind)

    def _first(self, file: str, known: T | None, new: T | None) -> T | None:
        if known is not None and new is not None:
            self.notes.add(file, "there is another file of this kind before it, which counts")
        return new if known is None else known

    def incident(self) -> Incident:
        """Everything that was fed."""
        raw = self._job or JobFile()
        self.notes.quote(told_unseen(raw))
        rank_max = max(self._communicators.rank_max, self._frames.rank_max, self._summaries.rank_max)
        world = world_size(raw, rank_max, self.notes)
        observed = self._node_names.all()
        nodes = Names(self._limits)
        job = build_job(raw, world, nodes, self._limits, self.notes)
        new_node = np.array([nodes.index(name) for name in observed] or [-1], np.int32)
        job = replace(job, node_names=nodes.all())
        used, rank_of_use = self._frames.uses()
        communicators, new_comm = self._communicators.build(world, used, rank_of_use)
        frames = self._frames.build(world, communicators, new_comm)
        summaries = self._summaries.build(world)
        tables = {
            name: table and replace(table, node=new_node[table.node]) for name, table in self._health.tables().items()
        }
        by_id = {name: index for index, name in enumerate(communicators.ids)}
        return Incident(
            job=job,
            communicators=communicators,
            frames=frames,
            process_state=self._health.process_states(world),
            summaries=summaries,
            nvml=tables["nvml"],
            ib=tables["ib"],
            host=tables["host"],
            kernel_log=self._health.kernel_log(),
            fabric=None if self._fabric is None else build_fabric(self._fabric, world, by_id, self._limits, self.notes),
            thresholds=told_thresholds(raw, self.notes),
            ras=None if self._ras is None else within_world(self._ras, world),
            flights=self._flights.build(files.FLIGHTS, world),
            processes=self._processes.build(files.PROCESSES, world),
            ended=told_ended(raw, self.notes),
            lost_nodes=told_lost_nodes(raw),
            exits=self._exits.build(files.EXITS, world),
            unseen=self.notes.lines(),
        )


def read_bundle(contents: Iterable[tuple[str, Iterable[bytes]]], limits: Limits = DEFAULT) -> Incident:
    """The incident of a bundle's files: name (folders before it do not count) and bytes in chunks of any size.

    A file of a name that is not the bundle's is noted and not opened.
    """
    reader = BundleReader(limits=limits)
    allowance = Allowance(limits.total_bytes_max)
    for file, chunks in contents:
        kind = file.rsplit("/", 1)[-1]
        if kind in files.NAMES:
            reader.feed(kind, file, allowance.meter(file, chunks, reader.notes))
        else:
            reader.notes.add(file, "not a file of a bundle")
    return reader.incident()
