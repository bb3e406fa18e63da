"""An InfiniBand fabric that a test makes, as the text that `ibnetdiscover` prints of it."""

from __future__ import annotations


class Cables:
    """A fabric as ibnetdiscover prints it: every device with its ports, and each cable at both of its ends."""

    def __init__(self) -> None:
        self.devices: dict[str, tuple[str, str]] = {}
        self.ports: dict[str, list[tuple[int, str]]] = {}

    def device(self, guid: str, kind: str, description: str) -> str:
        self.devices[guid] = (kind, description)
        self.ports[guid] = []
        return guid

    def join(self, one: str, other: str) -> None:
        for near, far in ((one, other), (other, one)):
            self.ports[near].append((len(self.ports[near]) + 1, far))

    def text(self) -> str:
        lines = ["#", "# Topology file: generated on Mon Jan  5 10:00:00 2026", "#", ""]
        for guid, (kind, description) in self.devices.items():
            lines += ["vendid=0x2c9", "devid=0xd2f2", f"sysimgguid=0x{guid}", f"{kind.lower()}guid=0x{guid}({guid})"]
            letter = {"Switch": "S", "Ca": "H", "Rt": "R"}[kind]
            tail = " enhanced port 0 lid 2 lmc 0" if kind == "Switch" else ""
            lines.append(f'{kind}\t{len(self.ports[guid])} "{letter}-{guid}"\t\t# "{description}"{tail}')
            for port, far in self.ports[guid]:
                far_kind, far_description = self.devices[far]
                back = next(number for number, near in self.ports[far] if near == guid)
                end = f'"{"S" if far_kind == "Switch" else "H"}-{far}"[{back}]'
                if kind == "Switch":
                    owner = f"({far})" if far_kind == "Ca" else "[ext 3]" if port == 1 else ""
                    lines.append(f'[{port}]\t{end}{owner} \t\t# "{far_description}" lid 10 4xHDR')
                else:
                    lines.append(f'[{port}]({guid}) \t{end}\t\t# lid 10 lmc 0 "{far_description}" lid 2 4xHDR')
            lines.append("")
        return "\n".join(lines)
