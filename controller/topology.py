"""The topology from where `[topology]` says; read when the controller starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from controller.settings import TopologySettings
from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.topology import Topology
from diagnosis.evidence.topology.ibnetdiscover import parse_ibnetdiscover
from remediation.backends.topology import parse_topology

FILE_BYTES_MAX: Final = 256 << 20
_READERS: Final[dict[str, Callable[[str, str], Topology]]] = {
    "slurm": parse_topology,
    "ibnetdiscover": parse_ibnetdiscover,
}


def read_topology(settings: TopologySettings) -> Topology:
    """The switches above nodes; nothing where it comes from the nodes, or from nowhere.

    Raises OperatorFault where the file cannot be read or understood.
    """
    if settings.file is None:
        return Topology()
    return _READERS[settings.source](_text(settings.file), str(settings.file))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise OperatorFault(f"topology.file {path}: {error.strerror}", reason="config") from error
    if len(data) > FILE_BYTES_MAX:
        raise OperatorFault(f"{path}: more than {FILE_BYTES_MAX} bytes are no topology", reason="config")
    return data.decode(errors="replace")
