"""YAML as run files use it: scalars of YAML 1.2, nothing executed, nothing unbounded."""

import math
import time
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.dump import dump_yaml
from moefold.config.errors import RunError
from moefold.config.reader import MAX_BYTES, MAX_DEPTH, read_value, read_yaml

# Text beside what it means.
SCALARS: list[tuple[str, Any]] = [
    ("1e-4", 1e-4),
    ("1E5", 1e5),
    ("-1.5e+3", -1500.0),
    (".5", 0.5),
    ("1.", 1.0),
    ("12", 12),
    ("-3", -3),
    ("010", 10),
    ("0x1f", 31),
    ("0o17", 15),
    ("1_000", "1_000"),
    ("12:30:00", "12:30:00"),
    ("2026-11-20", "2026-11-20"),
    ("no", "no"),
    ("yes", "yes"),
    ("on", "on"),
    ("Off", "Off"),
    ("y", "y"),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("nan", "nan"),
    ("inf", "inf"),
    ("'1'", "1"),
    ('"no"', "no"),
    ("!!str 12", "12"),
    ("1e", "1e"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars(text: str, value: Any) -> None:
    found = read_yaml(f"x: {text}\n").data["x"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", [".nan", ".NaN", "-.inf", ".INF", "+.inf"])
def test_not_finite_is_left_for_the_fields_to_refuse(text: str) -> None:
    assert not math.isfinite(read_yaml(f"x: {text}").data["x"])


def test_keys_are_text() -> None:
    assert read_yaml("{1: a, true: b, no: c, ~: d}").data == {
        "1": "a",
        "true": "b",
        "no": "c",
        "~": "d",
    }


def test_lines() -> None:
    parsed = read_yaml("a: 1\nb:\n  - 2\n  - {c: 3,\n     d: []}\ne: {}\n", "f")
    assert parsed.lines == {
        ("a",): 1,
        ("b", 0): 3,
        ("b", 1, "c"): 4,
        ("b", 1, "d"): 5,
        ("e",): 6,
    }


HOSTILE: list[tuple[str, str, str, str]] = [
    ("python object", "a: !!python/object/apply:os.system ['touch planted']", "tag", "plain data"),
    ("python name", "a: !!python/name:os.system", "tag", "plain data"),
    ("python module", "a: !!python/module:os", "tag", "plain data"),
    ("python tuple", "a: !!python/tuple [1, 2]", "tag", "plain data"),
    ("full tag", "a: !<tag:yaml.org,2002:python/object/new:os.system> [ls]", "tag", "plain data"),
    ("tag on a key", "!!python/name:os.system : 1", "tag", "plain data"),
    ("own tag", "a: !mine 1", "tag", "!mine"),
    ("binary", "a: !!binary aGk=", "tag", "!!binary"),
    ("set", "a: !!set {b, c}", "tag", "!!set"),
    ("omap", "a: !!omap [b: 1]", "tag", "!!omap"),
    ("timestamp", "a: !!timestamp 2026-01-01", "tag", "!!timestamp"),
    ("map that is a list", "a: !!map [1]", "tag", "!!map"),
    ("merge key", "a: &a {b: 1}\nc:\n  <<: *a", "syntax", "base:"),
    ("key that is a list", "? [1]\n: 2", "syntax", "key"),
    ("alias of itself", "a: &a [1, *a]", "too-large", "contains itself"),
    ("mapping of itself", "a: &a {b: *a}", "too-large", "contains itself"),
    ("unknown alias", "a: *b", "syntax", "alias"),
    ("beyond floats", "a: 1e999", "syntax", "number"),
    ("beyond 64 bits", "a: 99999999999999999999", "syntax", "64 bits"),
    ("thousands of digits", "a: " + "9" * 9000, "syntax", "digits"),
    ("deep list", "a: " + "[" * 5000, "syntax", "deeper"),
    ("deep mapping", "{a: " * 5000, "syntax", "deeper"),
    ("two documents", "a: 1\n---\nb: 2", "syntax", "document"),
    ("unclosed", "a: {b: 1", "syntax", "YAML"),
    ("tab", "a:\n\t- b", "syntax", "YAML"),
    ("control character", "a: \x00", "syntax", "YAML"),
    ("lone surrogate", 'a: "\\ud800"', "syntax", "invalid Unicode"),
    ("future YAML", "%YAML 9.0\n---\na: 1", "syntax", "YAML"),
    ("word as bool", "a: !!bool maybe", "syntax", "true or false"),
    ("word as int", "a: !!int many", "syntax", "whole number"),
    ("huge", "a: " + "x" * MAX_BYTES, "too-large", "bytes"),
]


@pytest.mark.parametrize(
    ("text", "sort", "said"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE]
)
def test_hostile_text_is_refused_at_once(
    text: str, sort: str, said: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    with pytest.raises(RunError) as caught:
        read_yaml(text, "run.yaml")
    assert time.process_time() - start < 1.0
    (item,) = caught.value.violations
    assert item.id == sort
    assert said in item.rule
    assert item.where.startswith("run.yaml")
    assert not list(tmp_path.iterdir())


def test_not_utf8_is_refused() -> None:
    with pytest.raises(RunError, match="UTF-8"):
        read_yaml(b"a: \xff", "run.yaml")


def test_a_byte_order_mark_is_ignored() -> None:
    assert read_yaml("\ufeffa: 1".encode()).data == {"a": 1}


def bomb(width: int, depth: int) -> str:
    lines = [f"a0: &a0 [{', '.join(['1'] * width)}]"]
    for i in range(1, depth):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]")
    return "\n".join(lines)


def test_alias_bomb_is_refused_without_being_expanded() -> None:
    start = time.process_time()
    with pytest.raises(RunError, match="more than"):
        read_yaml(bomb(10, 6), "run.yaml")
    assert time.process_time() - start < 1.0


def test_aliases_cannot_build_depth() -> None:
    with pytest.raises(RunError, match="nested deeper"):
        read_yaml(bomb(1, MAX_DEPTH + 10), "run.yaml")


def test_aliases_give_copies() -> None:
    data = read_yaml("a: &a {b: [1]}\nc: *a").data
    assert data["a"] == data["c"] and data["a"] is not data["c"]
    assert data["a"]["b"] is not data["c"]["b"]


def test_a_key_given_twice_is_a_violation_with_its_line() -> None:
    parsed = read_yaml("a:\n  b: 1\n  c: 2\n  b: 3", "f.yaml")
    (item,) = parsed.violations
    assert (item.path, item.id, item.where) == (("a", "b"), "duplicate-key", "f.yaml:4")
    assert item.value == 3, "what stands in that line"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("[1, {a: no}]", [1, {"a": "no"}]),
        ("two words", "two words"),
        ("", None),
        ("a=b", "a=b"),
    ],
)
def test_values_of_overrides(text: str, value: Any) -> None:
    assert read_value(text) == value


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from([text for text, _ in SCALARS]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=6), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(["a", "no", "1", "~", "x y"]), PLAIN, max_size=4))
def test_what_is_written_reads_back_the_same(data: dict[str, Any]) -> None:
    """Also by a reader of YAML 1.1, such as PyYAML."""
    text = dump_yaml(data)
    assert repr(read_yaml(text).data) == repr(data)
    assert repr(yaml.safe_load(text)) == repr(data)
