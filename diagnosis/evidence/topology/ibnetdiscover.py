"""What `ibnetdiscover` prints (infiniband-diags, ibnetdiscover(8)) as a topology.

A block per device, then a line per port in use; both ends of a cable tell of it:

    Switch  41 "S-b8599f0300000001"         # "MF0;leaf1:MQM8700/U1" enhanced port 0 lid 2 lmc 0
    [1]     "H-b8599f0300000010"[1](b8599f0300000011)      # "gpu001 mlx5_0" lid 10 4xHDR
    Ca      1 "H-b8599f0300000010"          # "gpu001 mlx5_0"
    [1](b8599f0300000011)   "S-b8599f0300000001"[1]        # lid 10 lmc 0 "MF0;leaf1:MQM8700/U1" lid 2 4xHDR

It tells cables and not which is above: a switch's height is its distance from the nearest host, and above a device are
its neighbours that are one higher. Cables between switches of the same height (meshes, dragonflies) go nowhere up or
down; they are counted and left out. The aggregation nodes inside switches (SHARP) look like hosts and are none.

A host is the first word of its description as the kernel sets it ("gpu001 mlx5_0"), its port the second. A switch is
named by its system name, with the chip where it has several; without one, or where two have the same, by its GUID.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from diagnosis.contracts.errors import OperatorFault
from diagnosis.contracts.topology import NAME_CHARS_MAX, Topology, joined

DEVICES_MAX: Final = 1 << 19
CABLES_MAX: Final = 1 << 22
_MARK: Final = re.compile(rb'^(?:Switch|Ca)\s+\d+\s+"[SH]-', re.MULTILINE)
_DEVICE: Final = re.compile(r'(Switch|Ca|Rt)\s+\d+\s+"([^"]{1,64})"\s*(?:#\s*"([^"]*)")?')
_CABLE: Final = re.compile(r'\[\d+\](?:\[[^\]]*\])?(?:\([^)]*\))?\s+"([^"]{1,64})"\[\d+\]')
_SYSTEM: Final = re.compile(r"MF0;([^:]+):[^/]*(/.*)?")
_NO_HOST: Final = "Aggregation Node"


def looks_like(head: bytes) -> bool:
    """Whether a file that begins so is the output of `ibnetdiscover`."""
    return _MARK.search(head) is not None


@dataclass(slots=True)
class _Fabric:
    """Devices by GUID: description, "" where none is told. Cables both ways."""

    switches: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    others: int = 0
    cables: dict[str, dict[str, None]] = field(default_factory=dict)


def parse_ibnetdiscover(text: str, name: str = "ibnetdiscover") -> Topology:
    """The topology. Raises OperatorFault where there is no switch in the text, or more than the reader's limits."""
    fabric = _read(text, name)
    if not fabric.switches:
        raise OperatorFault(f"{name}: no switch in it: is it the output of ibnetdiscover?", reason="config")
    height = _heights(fabric)
    names = _switch_names(fabric.switches)
    host_of = {guid: _host(description) for guid, description in fabric.hosts.items()}
    pairs: list[tuple[str, str]] = []
    of_port: dict[tuple[str, str], str] = {}
    level = 0
    for one, others in fabric.cables.items():
        for other in others:
            if other not in names or one not in height or other not in height:
                continue
            if one in host_of:
                pairs.append((host_of[one][0], names[other]))
                of_port[host_of[one]] = names[other]
            elif one in names and height[other] == height[one] + 1:
                pairs.append((names[one], names[other]))
            elif one in names and height[other] == height[one]:
                level += 1
    unreached = sum(guid not in height for guid in fabric.switches)
    notes = [
        f"{name}: {count} {what}"
        for count, what in (
            (level // 2, "cables between switches of the same height lead neither up nor down and are left out"),
            (unreached, "switches are reached from no host and are left out"),
            (fabric.others, "routers are left out"),
        )
        if count
    ]
    return Topology(joined(pairs), {port: switch for port, switch in of_port.items() if port[1]}, tuple(notes))


def _read(text: str, name: str) -> _Fabric:
    fabric, here, cables = _Fabric(), "", 0
    for line in text.splitlines():
        device = _DEVICE.match(line)
        if device is not None:
            kind, here, description = device[1], device[2], (device[3] or "")[:NAME_CHARS_MAX]
            if kind == "Switch":
                fabric.switches[here] = description
            elif kind == "Ca" and _NO_HOST not in description and description:
                fabric.hosts[here] = description
            else:
                fabric.others += kind == "Rt"
        elif here and (cable := _CABLE.match(line)) is not None:
            cables += 1
            fabric.cables.setdefault(here, {})[cable[1]] = None
            fabric.cables.setdefault(cable[1], {})[here] = None
        if len(fabric.switches) + len(fabric.hosts) > DEVICES_MAX or cables > CABLES_MAX:
            raise OperatorFault(f"{name}: more than {DEVICES_MAX} devices or {CABLES_MAX} cables", reason="config")
    return fabric


def _heights(fabric: _Fabric) -> dict[str, int]:
    """Hosts at 0, switches by their distance from the nearest host; whatever no host reaches is left out."""
    height = dict.fromkeys(fabric.hosts, 0)
    queue = deque(fabric.hosts)
    while queue:
        one = queue.popleft()
        for other in fabric.cables.get(one, ()):
            if other in fabric.switches and other not in height:
                height[other] = height[one] + 1
                queue.append(other)
    return height


def _host(description: str) -> tuple[str, str]:
    """Host name without its domain, and port ("": not told)."""
    words = description.replace("'", "").split()
    return words[0].split(".")[0] if words else "", words[1] if len(words) > 1 else ""


def _switch_names(switches: Mapping[str, str]) -> dict[str, str]:
    """A name of its own for each switch."""
    systems = {guid: _SYSTEM.match(description) for guid, description in switches.items()}
    plain = {guid: found[1] if found is not None else guid for guid, found in systems.items()}
    chips = {guid: plain[guid] + (found[2] or "") if found is not None else guid for guid, found in systems.items()}
    alone, apart = Counter(plain.values()), Counter(chips.values())
    return {
        guid: plain[guid] if alone[plain[guid]] == 1 else chips[guid] if apart[chips[guid]] == 1 else guid
        for guid in switches
    }
