"""slurm.conf of the lab: real daemons, small delays, fake sizes.

`cred_expire` stays at Slurm's default of 120 s: so long Slurm lets a requeued job wait, and this tocsin must beat. The
GPUs are two character devices that exist everywhere; Slurm counts them, hands them out and never opens them.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CLUSTER = "tocsinlab"
GPU_DEVICES = ("/dev/null", "/dev/zero")
CPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a node's slurmd listens."""

    name: str
    address: str
    port: int


def slurm_conf(
    directory: Path,
    controller: tuple[str, int],
    nodes: Sequence[NodePlace],
    cred_expire_s: int,
    gpus: bool,
    overrides: Mapping[str, str],
) -> str:
    """The text of slurm.conf. `overrides` wins over every setting here, key by key."""
    host = socket.gethostname()
    user = pwd.getpwuid(os.geteuid()).pw_name
    settings = {
        "ClusterName": CLUSTER,
        "SlurmctldHost": f"{host}({controller[0]})",
        "SlurmctldPort": str(controller[1]),
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={directory}/munge/socket,cred_expire={cred_expire_s}",
        "CredType": "cred/munge",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "ProctrackType": "proctrack/linuxproc" if os.geteuid() == 0 else "proctrack/pgid",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0",
        "PropagateResourceLimits": "NONE",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        "SlurmdTimeout": "30",
        "SlurmctldTimeout": "30",
        "InactiveLimit": "0",
        "KillWait": "2",
        "MinJobAge": "300",
        "MessageTimeout": "10",
        "UnkillableStepTimeout": "20",
        "StateSaveLocation": f"{directory}/spool/slurmctld",
        "SlurmdSpoolDir": f"{directory}/spool/%n",
        "SlurmctldPidFile": f"{directory}/spool/slurmctld.pid",
        "SlurmdPidFile": f"{directory}/spool/%n.pid",
        "SlurmctldLogFile": f"{directory}/log/slurmctld.log",
        "SlurmdLogFile": f"{directory}/log/%n.log",
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
        **({"GresTypes": "gpu"} if gpus else {}),
    }
    if forbidden := {"ClusterName", "SlurmctldHost", "SlurmctldPort", "StateSaveLocation"} & overrides.keys():
        raise ValueError(f"not to be overridden: {', '.join(sorted(forbidden))}")
    settings.update(overrides)
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [_node_line(host, node, gpus) for node in nodes]
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def _node_line(host: str, node: NodePlace, gpus: bool) -> str:
    gres = f"Gres=gpu:{len(GPU_DEVICES)} " if gpus else ""
    return (
        f"NodeName={node.name} NodeHostname={host} NodeAddr={node.address} Port={node.port} CPUs={CPUS_PER_NODE} "
        f"Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 RealMemory=4000 "
        f"{gres}State=UNKNOWN"
    )


def gres_conf(nodes: Sequence[NodePlace]) -> str:
    """The text of gres.conf: the same devices on each node."""
    return "".join(f"NodeName={node.name} Name=gpu File={','.join(GPU_DEVICES)}\n" for node in nodes)
