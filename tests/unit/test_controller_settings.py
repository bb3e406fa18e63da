"""controller.toml: all faults at once, each with line and key; secrets are never repeated."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.config_faults import ConfigFault, KeyPath, key_lines, load_model
from controller.settings import Address, Detect, Settings, load_settings, read_secret
from diagnosis.contracts.errors import OperatorFault
from diagnosis.engine.thresholds import Thresholds


def faults_of(tmp_path: Path, text: str) -> list[tuple[int | None, str, str]]:
    path = tmp_path / "controller.toml"
    path.write_text(text)
    with pytest.raises(ConfigFault) as caught:
        load_settings(path)
    return [(fault.line, fault.key, fault.text) for fault in caught.value.faults]


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "controller.toml").write_text("")
    settings = load_settings(tmp_path / "controller.toml")
    assert settings == Settings()
    assert settings.server.page == Address("127.0.0.1", 8621)
    assert settings.detect.hang_floor_s == 120


def test_the_engine_gets_every_threshold_and_both_agree_on_the_defaults() -> None:
    assert Settings().detect.thresholds() == Thresholds()
    assert set(Detect.model_fields) == {field.name for field in dataclasses.fields(Thresholds)}


def test_three_faults_are_all_listed_with_line_and_key(tmp_path: Path) -> None:
    text = """# the controller
state_dir = "relative"

[slurm]
call_deadline_s = -1

[detect]
hang_flor_s = 6
"""
    assert faults_of(tmp_path, text) == [
        (2, "state_dir", "should be an absolute path"),
        (5, "slurm.call_deadline_s", "should be greater than 0, is -1"),
        (8, "detect.hang_flor_s", "unknown key, did you mean hang_floor_s?"),
    ]


def test_the_text_of_the_error_names_file_line_and_key(tmp_path: Path) -> None:
    path = tmp_path / "controller.toml"
    path.write_text("\n\ncycle_period_s = 0\n")
    with pytest.raises(OperatorFault) as caught:
        load_settings(path)
    assert str(caught.value) == f"{path}:3: cycle_period_s: should be greater than or equal to 0.1, is 0"


def test_faults_inside_arrays_of_tables_have_their_own_lines(tmp_path: Path) -> None:
    text = """[[notify.targets]]
name = "chat"
webhook = "https://chat.example/hook"

[[notify.targets]]
name = "NOT A NAME"
url = "slack://a/b/c"

[[notify.targets]]
name = "neither"

[[notify.targets]]
url = "json://example"
"""
    found = [(line, key) for line, key, _ in faults_of(tmp_path, text)]
    assert found == [
        (6, "notify.targets[1].name"),
        (9, "notify.targets[2]"),
        (12, "notify.targets[3].name"),
    ]


def test_a_period_that_makes_every_node_stale_is_refused(tmp_path: Path) -> None:
    assert faults_of(tmp_path, "[server]\nreport_period_ms = 10000\n") == [
        (None, "", "detect.stale_after_s should be at least twice server.report_period_ms")
    ]


def test_a_secret_in_a_wrong_place_is_not_repeated(tmp_path: Path) -> None:
    text = '[[notify.targets]]\nname = "chat"\nwebook = "https://hook.example/TOPSECRET"\nurl = 5\n'
    for _, _, words in faults_of(tmp_path, text):
        assert "TOPSECRET" not in words
    text = '[[notify.targets]]\nname = "chat"\nwebhook = "ftp://hook.example/TOPSECRET"\n'
    assert "TOPSECRET" not in str(faults_of(tmp_path, text))


def test_a_good_target_does_not_show_its_secret(tmp_path: Path) -> None:
    path = tmp_path / "controller.toml"
    path.write_text('[[notify.targets]]\nname = "chat"\nwebhook = "https://hook.example/TOPSECRET"\n')
    settings = load_settings(path)
    assert "TOPSECRET" not in repr(settings)
    assert settings.notify.targets[0].webhook is not None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\nb = \n", 2),
        ("a = 1\n[x\n", 2),
        ('a = """\nnever\nends\n', 3),
        ("a = 1\na = 2\n", 2),
        ("[a]\n[a]\n", 2),
    ],
)
def test_broken_toml_is_told_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    ((found, key, words),) = faults_of(tmp_path, text)
    assert (found, key) == (line, "") and words.startswith("not TOML")


def test_files_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "controller.toml"
    path.write_bytes(b"a = 1\nb = '\xff'\n")
    with pytest.raises(ConfigFault, match=":2: not UTF-8"):
        load_settings(path)
    path.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigFault, match="longer than"):
        load_settings(path)
    path.write_text("a = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigFault, match=r"nested|not TOML"):
        load_settings(path)
    with pytest.raises(ConfigFault, match="cannot be read"):
        load_settings(tmp_path / "absent.toml")
    with pytest.raises(ConfigFault, match="cannot be read"):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("page", "0.0.0.0:8621"),
        ("page", "192.0.2.1:8621"),
        ("page", "localhost:8621"),
        ("listen", "8620"),
        ("listen", "127.0.0.1:70000"),
        ("listen", "300.0.0.1:1"),
        ("listen", "[127.0.0.1]:1"),
        ("listen", "::1:80"),
    ],
)
def test_addresses_are_checked(tmp_path: Path, key: str, value: str) -> None:
    ((line, name, _),) = faults_of(tmp_path, f'[server]\n{key} = "{value}"\n')
    assert (line, name) == (2, f"server.{key}")


def test_ipv6_addresses_are_taken_and_printed_back() -> None:
    settings = Settings.model_validate({"server": {"page": "[::1]:1", "listen": "[::]:2"}})
    assert (settings.server.page, str(settings.server.listen)) == (Address("::1", 1), "[::]:2")


DOCUMENT = '''
top = 1                                   # 2
"quoted.key" = { inner = 1, other.deep = [ 1,
   { far = 2 } ] }                        # 4
text = """
[not.a.table]
not = "a key" \\"""
still"""""                                # 8
literal = \'\'\'
[[nor.this]]\'\'\'                        # 10
many = [
  "]", # ] in a string
  [ 1, 2 ],
]
when = 1979-05-27 07:32:00
[a.b]                                     # 16
c.d = 'x'
[[list]]
one = 1
[list.sub]
two = 2
[[list.items]]
three = 3
[[list]]                                  # 24
[[list.items]]
[[list.items]]
four = 4
'''


def test_the_scanner_finds_every_kind_of_key() -> None:
    lines = key_lines(DOCUMENT)
    tomllib.loads(DOCUMENT)
    expected: dict[KeyPath, int] = {
        ("top",): 2,
        ("quoted.key",): 3,
        ("quoted.key", "inner"): 3,
        ("quoted.key", "other", "deep"): 3,
        ("quoted.key", "other", "deep", 1, "far"): 4,
        ("text",): 5,
        ("literal",): 9,
        ("many",): 11,
        ("many", 0): 12,
        ("many", 1, 1): 13,
        ("when",): 15,
        ("a", "b"): 16,
        ("a", "b", "c", "d"): 17,
        ("list", 0): 18,
        ("list", 0, "one"): 19,
        ("list", 0, "sub", "two"): 21,
        ("list", 0, "items", 0, "three"): 23,
        ("list", 1): 24,
        ("list", 1, "items", 0): 25,
        ("list", 1, "items", 1, "four"): 27,
    }
    assert {path: lines.get(path) for path in expected} == expected
    assert not [path for path in lines if path[0] in ("not", "nor")]


def paths_of(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return {path} | {found for key, item in items for found in paths_of(item, (*path, key))}


KEYS = st.sampled_from(["a", "b-1", '"q"', "'l.x'", 'a."b"', "c . d"])
SCALARS = st.sampled_from(["1", "true", '"s"', "'#'", '"\\""', '"""\n]\n"""', "'''\n[x]\n'''", "1979-05-27", "inf"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[\n" + ", # ]\n".join(items) + "\n]"),
        st.dictionaries(KEYS, inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"{key} = {value}" for key, value in items.items()) + "}"
        ),
    ),
    max_leaves=6,
)
STATEMENTS = st.one_of(
    st.tuples(KEYS, VALUES).map(lambda pair: f"{pair[0]} = {pair[1]} # [c]"),
    KEYS.map(lambda key: f"[{key}]"),
    KEYS.map(lambda key: f"[[ {key} ]]"),
)


@given(st.lists(STATEMENTS, max_size=8))
def test_every_path_of_a_correct_document_has_a_line(statements: list[str]) -> None:
    text = "\n".join(statements)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    lines = key_lines(text)
    missing = {path for path in paths_of(values) - {()} if path not in lines}
    assert all(any(other[: len(path)] == path for other in lines) for path in missing)  # implied by a dotted header
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())


def test_the_secret_is_read_only_from_a_file_that_is_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("ab" * 32 + "\n")
    path.chmod(0o640)
    with pytest.raises(OperatorFault, match="chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == b"\xab" * 32
    path.write_text("ab" * 31)
    with pytest.raises(OperatorFault, match="31 bytes"):
        read_secret(path)
    path.write_text("not hexadecimal")
    with pytest.raises(OperatorFault, match="hexadecimal"):
        read_secret(path)
    with pytest.raises(OperatorFault, match="cannot be read"):
        read_secret(tmp_path / "absent")


def test_any_model_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("")
    assert load_model(path, Settings) == Settings()
