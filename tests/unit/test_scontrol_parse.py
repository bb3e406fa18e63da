"""Slurm's words as values: what 22.05 prints, and what users and nodes may try to slip in."""

from __future__ import annotations

import pytest

from diagnosis.contracts.errors import SlurmFault
from remediation.backends import parse

NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=8  CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=0.57"
    " AvailableFeatures=(null) ActiveFeatures=(null) Gres={gres} NodeAddr=10.98.0.3 NodeHostName=vm Version=22.05.8"
    " OS={os}  RealMemory=4000 AllocMem=0 FreeMem=22391 Sockets=1 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0"
    " Weight=1 Owner=N/A MCS_label=N/A Partitions=main,debug  BootTime={boot}"
    " SlurmdStartTime=2026-11-30T06:45:42 LastBusyTime=2026-11-30T06:45:47 CfgTRES=cpu=8,mem=4000M,billing=8 AllocTRES="
    " CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s{tail}"
)
STAMP = "[root@2026-11-30T06:45:56]"


def node_line(
    name: str = "gpu003",
    *,
    gres: str = "gpu:2",
    os: str = "Linux 6.1.0 #1 SMP",
    state: str = "IDLE",
    boot: str = "2026-11-30T05:51:48",
    tail: str = "",
) -> str:
    return NODE.format(name=name, gres=gres, os=os, state=state, boot=boot, tail=tail)


def job_line(**fields: str) -> str:
    values = {
        "JobID": "42",
        "HetJobID": "N/A",
        "SubmitTime": "2026-11-30T06:39:25",
        "State": "RUNNING",
        "RestartCnt": "1",
        "UserID": "1000",
        "UserName": "ada",
        "Partition": "main",
        "Requeue": "1",
        "BatchFlag": "1",
        "PriorityLong": "4294901759",
        "NodeList": "gpu[001-003]",
        "Reason": "None",
        **fields,
    }
    return "|".join(values[name] for name in parse.JOB_FIELDS)


def test_a_node_is_read_with_its_state_gpus_and_times() -> None:
    view = parse.nodes(node_line(state="MIXED+DRAIN+NOT_RESPONDING", gres="gpu:h100:8(S:0-1),nic:2"))["gpu003"]
    assert view.flags == {"MIXED", "DRAIN", "NOT_RESPONDING"} and view.held
    assert view.gpus == 8
    assert view.partitions == ("main", "debug")
    assert (view.boot_time, view.slurmd_start_time) == ("2026-11-30T05:51:48", "2026-11-30T06:45:42")
    assert (view.reason, view.reason_user) == ("", None)


def test_a_node_that_never_registered_has_no_boot_time() -> None:
    assert parse.nodes(node_line(boot="None"))["gpu003"].boot_time is None


def test_several_kinds_of_gpus_add_up_and_no_gres_is_no_gpu() -> None:
    assert parse.nodes(node_line(gres="gpu:a100:4(S:0),gpu:h100:2(S:0,1),shard:8"))["gpu003"].gpus == 6
    assert parse.nodes(node_line(gres="(null)"))["gpu003"].gpus == 0


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (f" Reason=tocsin:ab12cd:c:GPU5:drain text {STAMP}", "tocsin:ab12cd:c:GPU5:drain text"),
        (f" Reason=a | b State=IDLE [x@y] {STAMP} Comment=c Reason=z {STAMP}", "a | b State=IDLE [x@y]"),
        (f" Comment=was Reason=tocsin:ab12cd:c:GPU5:drain {STAMP}", ""),
        (f" Reason=x {STAMP} Comment=y Extra=z", "x"),
    ],
)
def test_the_reason_is_the_administrators_words_and_no_others(tail: str, reason: str) -> None:
    assert parse.nodes(node_line(state="IDLE+DRAIN", tail=tail))["gpu003"].reason == reason


def test_a_node_cannot_forge_its_state_by_the_name_of_its_kernel() -> None:
    forged = (
        "Linux State=IDLE+DRAIN ThreadsPerCore=1 Partitions=x BootTime=1 SlurmdStartTime=2"
        f" Reason=tocsin:ab12cd:c:GPU5:drain {STAMP}"
    )
    view = parse.nodes(node_line(os=forged, state="ALLOCATED"))["gpu003"]
    assert view.flags == {"ALLOCATED"} and view.reason == "" and view.partitions == ("main", "debug")


@pytest.mark.parametrize("line", ["", "slurm_load_node error", node_line()[:-400], node_line(gres="gpu:many")])
def test_a_node_that_is_not_understood_fails_the_whole_picture(line: str) -> None:
    text = "\n".join((node_line("gpu001"), line or "?", node_line("gpu002")))
    with pytest.raises(SlurmFault) as caught:
        parse.nodes(text)
    assert caught.value.reason == "unreadable"


def test_a_job_is_read_with_all_that_the_policy_asks() -> None:
    view = parse.jobs(job_line(), "42|gpu[007-008]")[42]
    assert view.nodes == ("gpu001", "gpu002", "gpu003")
    assert view.exclude == ("gpu007", "gpu008")
    assert (view.restarts, view.uid, view.user, view.partition) == (1, 1000, "ada", "main")
    assert (view.requeueable, view.batch, view.held) == (True, True, False)
    assert (view.state, view.reason, view.submit_time) == ("RUNNING", "", "2026-11-30T06:39:25")


def test_a_pending_job_without_priority_is_held() -> None:
    line = job_line(State="PENDING", PriorityLong="0", NodeList="", Reason="JobHeldUser")
    view = parse.jobs(line, "42|")[42]
    assert view.held and view.nodes == () and view.reason == "JobHeldUser"


def test_a_part_of_a_heterogeneous_job_is_never_requeueable() -> None:
    assert parse.jobs(job_line(HetJobID="41"), "42|")[42].requeueable is False


def test_a_job_that_came_between_the_two_listings_is_left_to_the_next_picture() -> None:
    text = "\n".join((job_line(), job_line(JobID="43")))
    assert set(parse.jobs(text, "42|\n44|")) == {42}


@pytest.mark.parametrize(
    "fields",
    [
        {"RestartCnt": ""},
        {"RestartCnt": "many"},
        {"JobID": "42_1"},
        {"BatchFlag": "yes"},
        {"NodeList": "gpu[001-"},
        {"PriorityLong": "0.9999"},
    ],
)
def test_a_job_that_is_not_understood_fails_the_whole_picture(fields: dict[str, str]) -> None:
    with pytest.raises(SlurmFault) as caught:
        parse.jobs("\n".join((job_line(JobID="41"), job_line(**fields))), "41|\n42|")
    assert caught.value.reason == "unreadable"


def test_too_few_fields_and_a_wild_exclude_line_fail_the_whole_picture() -> None:
    for text, excludes in (("42|N/A|RUNNING", "42|"), (job_line(), "gpu001")):
        with pytest.raises(SlurmFault):
            parse.jobs(text, excludes)


def test_an_array_task_is_called_by_its_place_in_the_array() -> None:
    text = "7|7|3|N/A|\n9|7|1|N/A|\n8|7|4-9%2|N/A|\n5|5|N/A|N/A|\n6|6|N/A|6|"
    assert {name.job_id: name.text for name in parse.names(text)} == {7: "7_3", 9: "7_1", 8: None, 5: "5", 6: None}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), ""),
        (("gpu001", "gpu003", "gpu002"), "gpu[001-003]"),
        (("r1n1", "r1n2", "r2n1", "r2n2"), "r1n[1-2],r2n[1-2]"),
    ],
)
def test_host_lists_fold_only_the_last_number(names: tuple[str, ...], text: str) -> None:
    assert parse.host_list(names) == text
    assert set(parse.hosts(text)) == set(names)


@pytest.mark.parametrize("os", ["Linux 6.1.0", "Linux Version=99.11.1 x", "Version=99.1"])
def test_a_nodes_version_is_slurmds_and_nothing_that_the_node_says_of_itself(os: str) -> None:
    assert parse.nodes(node_line(os=os))["gpu003"].version == (22, 5)


def test_a_node_that_does_not_tell_its_version_has_none() -> None:
    line = node_line(os="Linux Version=99.11.1 x").replace(" Version=22.05.8", "", 1)
    assert parse.nodes(line)["gpu003"].version is None


@pytest.mark.parametrize("text", ["n[1-99999999]", "n[0-99999999999999999999]", "n[1-600000,700000-1300000]"])
def test_a_host_list_is_counted_before_it_is_spelled_out(text: str) -> None:
    with pytest.raises(ValueError, match="more than"):
        parse.hosts(text)
    assert parse.hosts("gpu20261130-1") == ("gpu20261130-1",)
