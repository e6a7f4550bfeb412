"""Serialisation of records: the resolved run file, and a hash that identifies a record."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from moefold.config.base import Record, to_dict
from moefold.config.fields import FieldSpec, last_part, paths_in, set_at
from moefold.config.reader import CoreLoader


class _Dumper(yaml.SafeDumper):
    """PyYAML dumper that quotes strings which YAML 1.1 or 1.2 would read as another type."""

    yaml_implicit_resolvers = {
        **yaml.SafeDumper.yaml_implicit_resolvers,
        **CoreLoader.yaml_implicit_resolvers,
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _write_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value).replace("inf", ".inf").replace("nan", ".nan")
    if "." not in text:
        text = text.replace("e", ".0e")  # YAML 1.1 requires a point before an exponent
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _write_list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.SequenceNode:
    scalars = not any(isinstance(item, dict | list) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=scalars)


def _write_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Write a string; line ends other than ``\\n`` survive only in double quotes."""
    style = '"' if any(end in value for end in "\r\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _write_text)
_Dumper.add_representer(float, _write_float)
_Dumper.add_representer(list, _write_list)


def dump_yaml(record: Record | Mapping[str, Any]) -> str:
    """Return the resolved run file: every field, defaults included, in the order of its class.

    Loading it produces an equal record.
    """
    data = to_dict(record)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def unplaced(record: Record) -> Any:
    """Return a record's plain data independent of folders: paths are reduced to their last part."""
    data = to_dict(record)
    for path, text, _ in list(paths_in(FieldSpec(type(record)), data)):
        data = set_at(data, path, last_part(text))
    return data


def identity(
    record: Record,
    parts: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
) -> str:
    """Return the SHA-256 of a record's plain data, stable across machines and Python versions.

    Moving a run with its files does not change it: only the last part of paths is hashed, and of
    ``parts`` (SHA-256 of plugins by path) only the values. ``only`` selects top-level keys.
    """
    data = unplaced(record)
    chosen = data if only is None else {key: data[key] for key in only}
    said = {"record": chosen, "parts": sorted((parts or {}).values())}
    text = json.dumps(said, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
