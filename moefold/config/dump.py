"""Serialisation of records: the resolved run file, and a hash that identifies a record."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from moefold.config.base import Record, to_dict
from moefold.config.fields import FieldSpec, basename, iter_file_paths, set_at
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


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value).replace("inf", ".inf").replace("nan", ".nan")
    if "." not in text:
        text = text.replace("e", ".0e")  # YAML 1.1 requires a point before an exponent
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.SequenceNode:
    scalars = not any(isinstance(item, dict | list) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=scalars)


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Write a string; line ends other than ``\\n`` survive only in double quotes."""
    style = '"' if any(end in value for end in "\r\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(list, _represent_list)


def dump_yaml(record: Record | Mapping[str, Any]) -> str:
    """Return the resolved run file: every field, defaults included, in class order.

    Loading it produces an equal record.
    """
    data = to_dict(record)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def to_portable_dict(record: Record) -> Any:
    """Convert a record to plain data that does not depend on folders: paths become base names."""
    data = to_dict(record)
    for path, text, _ in list(iter_file_paths(FieldSpec(type(record)), data)):
        data = set_at(data, path, basename(text))
    return data


def identity(
    record: Record, plugins: Mapping[str, str] | None = None, only: Iterable[str] | None = None
) -> str:
    """Return the SHA-256 of a record's plain data, stable across machines and Python versions.

    Moving a run with its files does not change it: only base names of paths are hashed, and only
    the values of ``plugins`` (SHA-256 by path). ``only`` selects top-level keys.
    """
    data = to_portable_dict(record)
    chosen = data if only is None else {key: data[key] for key in only}
    content = {"record": chosen, "parts": sorted((plugins or {}).values())}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
