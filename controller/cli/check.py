"""`tocsin config check`: all faults of a file, whichever of tocsin's files it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from controller.config_faults import ConfigFault, Fault, top_level_keys
from controller.notify.notifier import check_targets
from controller.settings import Settings, load_policy, load_settings, read_secret
from diagnosis.contracts.errors import OperatorFault
from node_daemon import settings as node_settings
from remediation.policy.rules import Policy

_NODE_FAULT: Final = re.compile(r"(?P<path>.*?)(?::(?P<line>\d+))?: (?:(?P<key>[\w.]+): )?(?P<text>.*)")


def check_files(path: Path) -> list[Fault]:
    """The faults of one file; of a controller's file also those of the files that it names.

    What a file is is told by its keys: it is held against the model that knows most of them.
    """
    keys = top_level_keys(path)
    known = {
        _controller_faults: set(Settings.model_fields),
        _policy_faults: set(Policy.model_fields),
        _node_faults: {name.partition(".")[0] for name in node_settings.SETTINGS},
    }
    best = max(known, key=lambda kind: len(keys & known[kind]))
    return best(path)


def _controller_faults(path: Path) -> list[Fault]:
    try:
        settings = load_settings(path)
    except ConfigFault as error:
        return error.faults
    faults = _policy_faults(settings.policy_file)
    for key, check in (
        ("secret_file", lambda: read_secret(settings.secret_file)),
        ("notify.targets", lambda: check_targets(settings.notify)),
    ):
        try:
            check()
        except OperatorFault as error:
            faults.append(Fault(str(path), None, key, str(error)))
    return faults


def _policy_faults(path: Path) -> list[Fault]:
    try:
        load_policy(path)
    except ConfigFault as error:
        return error.faults
    return []


def _node_faults(path: Path) -> list[Fault]:
    try:
        node_settings.load(path)
    except OperatorFault as error:
        return [_node_fault(path, line) for line in str(error).splitlines()]
    return []


def _node_fault(path: Path, line: str) -> Fault:
    found = _NODE_FAULT.fullmatch(line)
    if found is None:
        return Fault(str(path), None, "", line)
    number = int(found["line"]) if found["line"] else None
    return Fault(found["path"], number, found["key"] or "", found["text"])
