"""Pause frames by the names of each driver, through the ioctl as linux/ethtool.h lays it out; counters of RoCE."""

from __future__ import annotations

import ctypes
import fcntl
import struct
from pathlib import Path

import pytest

from node_daemon.collectors.ethtool import PortStatistics, choose, speed_gbps
from node_daemon.collectors.nics import read_nics


class Kernel:
    """One port's driver, behind the ioctl."""

    def __init__(self, driver: str, **stats: int) -> None:
        self.driver, self.stats = driver, stats
        self.asked: list[int] = []

    def ioctl(self, _: object, request: int, asked: bytes) -> None:
        name, address = struct.unpack("@16sP16x", asked)
        command = ctypes.c_uint32.from_address(address).value
        self.asked.append(command)
        if request != 0x8946 or name.rstrip(b"\0") != b"eth0":
            raise OSError(19, "No such device")
        ctypes.memmove(address, data := self._answer(command, address), len(data))

    def _answer(self, command: int, address: int) -> bytes:
        count = len(self.stats)
        if command == 0x3:
            head = struct.pack("=I32s140x", command, self.driver.encode())
            return head + struct.pack("=IIIII", 0, count, 0, 0, 0)
        if command == 0x1B:
            assert ctypes.c_uint32.from_address(address + 4).value == 1
            names = b"".join(struct.pack("=32s", name.encode()) for name in self.stats)
            return struct.pack("=III", command, 1, count) + names
        if command == 0x1D:
            return struct.pack(f"=II{count}Q", command, count, *self.stats.values())
        return struct.pack("=I8xH14xH14x", command, 0xFFFF & 400_000, 400_000 >> 16)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    one = Kernel("mlx5_core", rx_packets=9, rx_prio3_pause=40, rx_prio3_pause_duration=7, rx_prio4_pause=2)
    monkeypatch.setattr(fcntl, "ioctl", one.ioctl)
    return one


def test_counters_of_all_priorities_are_added_and_names_are_asked_for_once(kernel: Kernel) -> None:
    statistics = PortStatistics(every_s=0)
    assert statistics.read("eth0") == {"rx_pause": 42}
    kernel.stats["rx_prio4_pause"] = 5
    assert statistics.read("eth0") == {"rx_pause": 45}
    assert kernel.asked.count(0x1B) == 1


def test_a_driver_is_not_asked_more_often_than_it_may_be(kernel: Kernel) -> None:
    times = iter([0.0, 9.0, 10.0])
    statistics = PortStatistics(every_s=10, clock=times.__next__)
    told = []
    for frames in (2, 5, 7):
        kernel.stats["rx_prio4_pause"] = frames
        told.append(statistics.read("eth0")["rx_pause"])
    assert told == [42, 42, 47]


def test_a_driver_that_is_set_up_anew_is_asked_for_its_names_again(kernel: Kernel) -> None:
    statistics = PortStatistics(every_s=0)
    statistics.read("eth0")
    kernel.stats = {"tx_global_pause": 3, "rx_global_pause": 4}
    assert statistics.read("eth0") == {"tx_pause": 3, "rx_pause": 4}


def test_what_a_port_does_not_tell_is_unknown_and_not_zero(kernel: Kernel) -> None:
    statistics = PortStatistics(every_s=0)
    assert statistics.read("eth1") == {}
    kernel.driver = "veth"
    assert statistics.read("eth0") == {}
    kernel.driver, kernel.stats = "mlx5_core", {"rx_packets": 1}
    assert statistics.read("eth0") == {}


def test_the_speed_lies_in_two_halves(kernel: Kernel) -> None:
    assert (speed_gbps("eth0"), speed_gbps("eth1")) == (400.0, None)


@pytest.mark.parametrize(
    ("driver", "counted", "others"),
    [
        ("mlx5_core", ["rx_global_pause"], ["rx_pause_ctrl_phy", "rx_global_pause_transition", "rx_prio0_bytes"]),
        ("mlx4_en", ["rx_pause_prio_7"], ["rx_pause_duration_prio_7", "rx_pause_transition_prio_7"]),
        ("bnxt_en", ["rx_pause_frames", "rx_pfc_frames"], ["rx_pfc_ena_frames_pri0", "pfc_pri0_rx_transitions"]),
        ("ice", ["link_xoff_rx.nic", "rx_priority_3_xoff.nic"], ["link_xon_rx.nic", "rx_priority_3_xon.nic"]),
        ("i40e", ["port.link_xoff_rx", "port.rx_priority_0_xoff"], ["port.rx_priority_0_xon_2_xoff"]),
        ("ixgbe", ["rx_flow_control_xoff", "rx_pb_0_pxoff"], ["rx_flow_control_xon", "rx_pb_0_pxon"]),
        ("hns3", ["mac_rx_mac_pause_num", "mac_rx_pfc_pkt_num"], ["mac_rx_pfc_pri3_pkt_num"]),
    ],
)
def test_each_driver_s_frames_count_once(driver: str, counted: list[str], others: list[str]) -> None:
    assert choose(driver, [*others, *counted]) == {"rx_pause": list(range(len(others), len(others) + len(counted)))}


def test_a_roce_port_has_the_pause_frames_of_its_wire(tmp_path: Path, kernel: Kernel) -> None:
    device = tmp_path / "infiniband" / "mlx5_0"
    port, wire = device / "ports" / "1", device / "device" / "net" / "eth0"
    for folder in (port / "counters", port / "hw_counters", wire):
        folder.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    told = {"packet_seq_err": 5, "local_ack_timeout_err": 7, "implied_nak_seq_err": 1, "rnr_nak_retry_err": 90}
    for name, value in (told | {"out_of_buffer": 3, "rp_cnp_handled": 11}).items():
        (port / "hw_counters" / name).write_text(f"{value}\n")
    nic = read_nics(root=tmp_path)[0]
    assert (nic.name, nic.up, nic.speed_gbps, nic.rx_pause, nic.tx_pause) == ("mlx5_0", True, 400.0, 42, None)
    assert (nic.retransmits, nic.rx_discards, nic.cnp_handled, nic.out_of_sequence) == (13, 3, 11, None)
