"""The operator's page of the policy names every key with its default."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from remediation.policy.rules import Policy

PAGE = Path(__file__).parents[2] / "docs" / "policy.md"


def _keys(model: BaseModel, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        found.update(_keys(value, f"{name}.") if isinstance(value, BaseModel) else {prefix + name: value})
    return found


def test_every_key_of_the_policy_is_documented_with_its_default() -> None:
    lines = [line.split("|") for line in PAGE.read_text().splitlines()]
    told = {cells[1].strip(): cells[2].strip() for cells in lines if len(cells) >= 4}
    for key, value in _keys(Policy()).items():
        assert told.get(f"`{key}`") == ("not set" if value is None else f"`{json.dumps(value)}`"), key
