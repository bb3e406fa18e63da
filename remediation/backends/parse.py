"""What Slurm's commands print, as values. Strict: a line that is not understood is an error, not one line fewer.

Job fields are chosen so that no text of a user stands among them: a job's name, comment or directory may hold
anything, and `scontrol show job` prints them in line with the rest. `squeue` lets the fields be picked; width 0 prints
each unpadded and uncut, the sign after it ends the field. 22.05 has no name for the excluded nodes in that syntax, so
they come from the older `-o`.

A node's line is `scontrol show node -o`: words `Key=value`, where `OS=` holds what the node says of itself and
`Reason=`, `Comment=`, `Extra=` what administrators wrote. The fields that are used stand between those two kinds.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from diagnosis.contracts.errors import SlurmFault
from remediation.policy.world import JobView, NodeView, Version

JOB_FIELDS: Final = (
    "JobID",
    "HetJobID",
    "SubmitTime",
    "State",
    "RestartCnt",
    "UserID",
    "UserName",
    "Partition",
    "Requeue",
    "BatchFlag",
    "PriorityLong",
    "NodeList",
    "Reason",
)
JOB_FORMAT: Final = ",".join(f"{name}:0|" for name in JOB_FIELDS[:-1]) + f",{JOB_FIELDS[-1]}:0"
EXCLUDE_FORMAT: Final = "%A|%x"
NAME_FIELDS: Final = ("JobID", "ArrayJobID", "ArrayTaskID", "HetJobID")
NAME_FORMAT: Final = ",".join(f"{name}:0|" for name in NAME_FIELDS)
HOSTS_MAX: Final = 1_000_000
DIGITS_MAX: Final = 9
_BRACKETS: Final = re.compile(r"\[([^\]]*)")
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_NOT_SET: Final = frozenset({"", "(null)", "N/A", "None", "n/a", "Unknown"})
_REASON: Final = re.compile(r" Reason=(?P<text>.*?) \[(?P<user>[^\s@\[\]]+)@\d{4}-\d\d-\d\dT[\d:]+\](?: |$)")
_GPUS: Final = re.compile(r"gpu(?::[^:(),]+)?:(\d+)(?:\(.*\))?")


class JobName(NamedTuple):
    """How Slurm's commands must be told of one job. `text` None: it has no name of its own."""

    job_id: int
    text: str | None


def nodes(text: str) -> dict[str, NodeView]:
    """All nodes of `scontrol show node -o`, by name. Raises SlurmFault (reason `unreadable`)."""
    views = [_node(line.rstrip()) for line in text.splitlines() if line.strip()]
    return {view.name: view for view in views}


def _node(line: str) -> NodeView:
    """By hand, since a regular expression takes ten times as long for 12,500 nodes.

    Looked up from the right: what `OS=` may hold stands to the left of all that is used.
    """
    slurmd_at = line.rfind(" SlurmdStartTime=")
    boot_at = line.rfind(" BootTime=", 0, slurmd_at)
    state_at = line.rfind(" State=", 0, boot_at)
    partitions_at = line.find(" Partitions=", state_at, boot_at)
    gres_at = line.find(" Gres=", 0, state_at)
    version_at = line.find(" Version=", gres_at, line.find(" OS=", gres_at))
    if not (line.startswith("NodeName=") and 0 < gres_at < state_at < boot_at < slurmd_at):
        raise _unreadable("node", line)
    reason, user = _reason(line[slurmd_at + 1 :])
    return NodeView(
        name=_word(line, -1),
        flags=_flags(_word(line, state_at)),
        reason=reason,
        reason_user=user,
        gpus=_gpus(_word(line, gres_at)),
        partitions=tuple(_word(line, partitions_at).split(",")) if partitions_at > 0 else (),
        boot_time=_value(_word(line, boot_at)),
        slurmd_start_time=_value(_word(line, slurmd_at)),
        version=_version(_word(line, version_at)) if version_at > 0 else None,
    )


def _word(line: str, at: int) -> str:
    """The value of the ` Key=value` that begins at `at`."""
    return line[line.index("=", at + 1) + 1 :].split(" ", 1)[0]


@lru_cache(maxsize=256)
def _version(text: str) -> Version | None:
    """22.05.8 as (22, 5)."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})\b", text)
    return (int(found[1]), int(found[2])) if found else None


@lru_cache(maxsize=256)
def _flags(state: str) -> frozenset[str]:
    """`MIXED+DRAIN` as words, without the signs that some versions put behind them."""
    return frozenset(re.sub(r"[^A-Z_+]", "", state.upper()).split("+"))


def _reason(rest: str) -> tuple[str, str | None]:
    """The reason stands before the comment; what looks like one behind it is the comment's own text."""
    comment = rest.find(" Comment=")
    found = _REASON.search(rest)
    if found is None or 0 <= comment < found.start():
        return "", None
    return found["text"], found["user"]


@lru_cache(maxsize=256)
def _gpus(gres: str) -> int:
    total = 0
    for item in re.split(r",(?![^(]*\))", gres):
        if item == "gpu" or item.startswith("gpu:"):
            found = _GPUS.fullmatch(item)
            if found is None:
                raise _unreadable("node", gres)
            total += int(found[1])
    return total


def jobs(text: str, excludes: str) -> dict[int, JobView]:
    """All jobs of the two listings, by id. Raises SlurmFault (reason `unreadable`).

    A job that only one of them has came or went between the two and is left to the next picture.
    """
    excluded: dict[int, str] = {}
    for line in excludes.splitlines():
        number, sign, hosts = line.strip().partition("|")
        if not (sign and number.isdecimal()):
            raise _unreadable("job", line)
        excluded[int(number)] = hosts
    views = [_job(line, excluded) for line in text.splitlines() if line.strip()]
    return {view.job_id: view for view in views if view.job_id in excluded}


def _job(line: str, excluded: dict[int, str]) -> JobView:
    values = line.strip().split("|", len(JOB_FIELDS) - 1)
    if len(values) != len(JOB_FIELDS):
        raise _unreadable("job", line)
    field = dict(zip(JOB_FIELDS, values, strict=True))
    try:
        job_id = _number(field["JobID"])
        return JobView(
            job_id=job_id,
            submit_time=field["SubmitTime"],
            state=field["State"],
            reason="" if field["Reason"] == "None" else field["Reason"],
            nodes=hosts(field["NodeList"]),
            exclude=hosts(excluded.get(job_id, "")),
            restarts=_number(field["RestartCnt"]),
            uid=_number(field["UserID"]),
            user=_value(field["UserName"]),
            partition=_value(field["Partition"]),
            # A component of a heterogeneous job is never requeued alone, whatever its flag says.
            requeueable=_flag(field["Requeue"]) and field["HetJobID"] in _NOT_SET,
            batch=_flag(field["BatchFlag"]),
            held=_number(field["PriorityLong"]) == 0 and field["State"] == "PENDING",
        )
    except (ValueError, NodeSetException) as error:
        raise _unreadable("job", line) from error


def names(text: str) -> list[JobName]:
    """The jobs of a listing in NAME_FORMAT, and what to call them.

    The id of an array task may also be that of the whole array (the last task to leave it inherits it), and a command
    that names it acts on all tasks: a task is always called `array_task`. Raises SlurmFault (reason `unreadable`).
    """
    found = []
    for line in text.splitlines():
        values = line.strip().split("|")
        if len(values) != len(NAME_FIELDS) + 1 or not values[0].isdecimal():
            raise _unreadable("job", line)
        number, array, task, het = values[: len(NAME_FIELDS)]
        name: str | None = number if task in _NOT_SET else f"{array}_{task}" if task.isdecimal() else None
        found.append(JobName(int(number), name if het in _NOT_SET else None))
    return found


def _span(low: str, high: str) -> int:
    return abs(int(high) - int(low)) + 1 if max(len(low), len(high)) <= DIGITS_MAX else HOSTS_MAX + 1


@lru_cache(maxsize=1024)
def hosts(text: str) -> tuple[str, ...]:
    """The names in a host list such as `gpu[001-003,007]`, in order. Raises NodeSetException or ValueError."""
    if text in _NOT_SET:
        return ()
    # Counted before it is spelled out: one range of nine digits is a hundred gigabytes of names.
    if sum(_span(low, high) for low, high in _RANGE.findall(",".join(_BRACKETS.findall(text)))) > HOSTS_MAX:
        raise ValueError(f"more than {HOSTS_MAX} hosts")
    listed = NodeSet(text, resolver=RESOLVER_NOGROUP)
    if len(listed) > HOSTS_MAX:
        raise ValueError(f"more than {HOSTS_MAX} hosts")
    return tuple(listed)


def host_list(names: tuple[str, ...]) -> str:
    """The names as one host list. Only the last number of a name is folded: Slurm refuses two brackets in one."""
    listed = NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP)
    listed.fold_axis = (-1,)
    return str(listed)


def _number(text: str) -> int:
    """Digits and nothing else: `int` would take `42_1` for 421."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is not a number")
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text == "1"


def _value(text: str) -> str | None:
    return None if text in _NOT_SET else text


def _unreadable(what: str, line: str) -> SlurmFault:
    return SlurmFault(f"Slurm's line about a {what} is not understood: {line[:160]!r}", reason="unreadable")
