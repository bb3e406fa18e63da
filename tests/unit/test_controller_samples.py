"""The shipped samples and the operator's page know every key, and the samples are the defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from controller.settings import Settings, Target, load_policy, load_settings
from remediation.policy.rules import Policy

ROOT = Path(__file__).parents[2]


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation)
        else:
            yield name


def test_the_samples_are_the_defaults() -> None:
    assert load_settings(ROOT / "deploy/controller.toml") == Settings()
    assert load_policy(ROOT / "deploy/policy.toml") == Policy()


@pytest.mark.parametrize(("sample", "model"), [("controller.toml", Settings), ("policy.toml", Policy)])
def test_the_samples_show_every_key(sample: str, model: type[BaseModel]) -> None:
    shown = re.findall(r"^(?:# )?(?:\[\[notify\.)?(\w+)(?:\]\]| =)", (ROOT / "deploy" / sample).read_text(), re.M)
    assert set(keys_of(model)) <= set(shown)


def test_the_commented_parts_of_the_sample_are_right_too(tmp_path: Path) -> None:
    text = (ROOT / "deploy/controller.toml").read_text()
    for line in re.findall(r"^# (?:\[\[|\w+ = ).*", text, re.M):
        text = text.replace(line, line.removeprefix("# "))
    path = tmp_path / "controller.toml"
    path.write_text(text)
    assert [target.name for target in load_settings(path).notify.targets] == ["chat", "oncall"]


def test_the_operators_page_names_every_key() -> None:
    page = (ROOT / "docs/controller.md").read_text()
    assert {key for key in [*keys_of(Settings), *keys_of(Target)] if f"`{key}`" not in page} == set()
