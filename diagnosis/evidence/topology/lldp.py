"""What a node's ports see of their switches by LLDP, as lldpd prints it (`lldpctl -f json`, `-f json0`).

In `json` a list of one is no list and a name is a key: `{"lldp": {"interface": {"eth0": {"chassis": {"leaf1": {...}},
"port": {...}}}}}`; several interfaces are a list of such. In `json0` everything is a list and a name is a value. Both
are read. A neighbour without a name goes by its chassis id. Only neighbours that say they switch or route count, or
that say nothing of it: on the other end of a cable there may also be another host. Where a port has several neighbours
(a hub, a phone, a bond told twice) it is not known which way it leads, and it tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from diagnosis.contracts.errors import AgentFault
from diagnosis.contracts.topology import NAME_CHARS_MAX, Topology, joined

UPLINKS_MAX: Final = 64
_SWITCHING: Final = ("bridge", "router")


class Uplink(NamedTuple):
    """A port of a node and the switch that it leads to."""

    port: str
    switch: str


def parse_lldp(content: bytes) -> list[Uplink]:
    """A node's uplinks by port, at most UPLINKS_MAX. Raises AgentFault where this is no such JSON."""
    try:
        told = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AgentFault(f"it is no JSON: {error}"[:200], reason="garbage") from None
    if not isinstance(told, dict) or "lldp" not in told:
        raise AgentFault("it has no lldp", reason="garbage")
    seen: dict[str, set[str]] = {}
    for port, neighbour in _interfaces(told["lldp"]):
        for switch in _chassis(neighbour):
            seen.setdefault(port, set()).add(switch)
    return [Uplink(port, *switches) for port, switches in sorted(seen.items()) if len(switches) == 1][:UPLINKS_MAX]


def topology_of(uplinks: Mapping[str, Sequence[tuple[str, str]]]) -> Topology:
    """The topology that nodes' uplinks (port, switch) make. What is above the switches LLDP of nodes does not tell."""
    told = [(node, port, switch) for node, links in uplinks.items() for port, switch in links]
    return Topology(
        joined((node, switch) for node, _, switch in told), {(node, port): switch for node, port, switch in told}
    )


def _interfaces(lldp: object) -> Iterator[tuple[str, dict[str, object]]]:
    for part in _list(lldp):
        for interface in _list(part.get("interface")):
            name = interface.get("name")
            if isinstance(name, str):  # json0
                yield name[:NAME_CHARS_MAX], interface
                continue
            for port, told in interface.items():
                yield from ((port[:NAME_CHARS_MAX], one) for one in _list(told))


def _chassis(interface: dict[str, object]) -> Iterator[str]:
    """Names of the switches among the neighbours of a port."""
    for chassis in _list(interface.get("chassis")):
        by_value = _value(chassis.get("name"))
        if by_value or "id" in chassis:
            named = [(by_value or _value(chassis.get("id")), chassis)]
        else:
            named = [(name, one) for name, told in chassis.items() for one in _list(told)]
        for name, one in named:
            if name and _switches(one):
                yield name.split(".")[0][:NAME_CHARS_MAX] if not _is_address(name) else name[:NAME_CHARS_MAX]


def _switches(chassis: dict[str, object]) -> bool:
    told = [one for one in _list(chassis.get("capability")) if isinstance(one.get("type"), str)]
    return not told or any(str(one["type"]).lower() in _SWITCHING and one.get("enabled") is True for one in told)


def _is_address(name: str) -> bool:
    """Whether a name is rather an IP address, where what follows the first point is no domain."""
    return name.replace(".", "").isdigit()


def _value(told: object) -> str:
    """The text of a field: itself, or the `value` of it or of the first in a list."""
    if isinstance(told, str):
        return told
    for one in _list(told):
        value = one.get("value")
        if isinstance(value, str):
            return value
    return ""


def _list(told: object) -> list[dict[str, object]]:
    """One object or several as a list of objects; what is none is passed over."""
    listed = told if isinstance(told, list) else [told]
    return [one for one in listed if isinstance(one, dict)]
