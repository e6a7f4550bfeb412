"""Loading of run files: merge bases, file and overrides, import plugins, check the result."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from moefold.config.base import Record, to_dict
from moefold.config.check import check
from moefold.config.errors import MAX_LISTED, MISSING, REMOVE, FieldPath, RunError, Violation
from moefold.config.fields import iter_file_paths, leaves, set_at, specs
from moefold.config.merge import ConfigLayer, MergedData, ValueOrigin
from moefold.config.plugins import import_plugins, resolve_path
from moefold.config.reader import MAX_BYTES, MAX_NODES, read_value, read_yaml
from moefold.config.suggest import closest
from moefold.files import path_in_errors

BASE = "base"
USES = "uses"
MAX_FILES = 100
"""Files that a run file may build on, and plug-ins that it may use, each in total."""

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class LoadedRecord(Generic[R]):
    """A legal record with the origins of its values.

    ``origins`` maps the path of each leaf, defaults included, to the origin of its value.
    """

    record: R
    origins: Mapping[FieldPath, ValueOrigin]


def load(
    cls: type[R],
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    recipes: Mapping[str, Path] | None = None,
    data_name: str = "data",
    folder: Path | None = None,
) -> LoadedRecord[R]:
    """Load a record from a file, a recipe name, or raw data, and apply overrides.

    A file extends those in its ``base:`` (a path relative to the file, a recipe name, or a list of
    these). If the class has a field ``uses``, the Python files listed there are imported first.
    Paths in a file are relative to its folder, paths in overrides and raw data to the working
    folder; the record holds absolute paths.

    Args:
        cls: class of the record.
        source: path of a YAML file, name of a recipe, or raw data.
        overrides: ``path=value`` with a value in YAML; ``path+=value`` appends to a list.
        recipes: files of recipes by name.
        data_name: name of raw data in the origins of values.
        folder: folder to which paths in the file ``source`` are relative, instead of its own.

    Raises:
        RunError: the source has violations; the error carries them all.
    """
    state = _LoadState(cls, dict(recipes or {}))
    name = state.read(source, data_name, folder)
    merged = state.merge(overrides)
    overridden = [path for path, origin in merged.origins.items() if origin.kind == "override"]
    checked = check(cls, merged.data, overridden)
    reported = {item.path[:1] for item in state.violations} & {(USES,)}
    unreported = [item for item in checked.violations if item.path[:1] not in reported]
    if any(item.id == "base" and item.nearest is not REMOVE for item in state.violations):
        # The intended base may set it.
        unreported = [item for item in unreported if item.id != "missing"]
    violations = [*state.violations, *unreported]
    unlisted = checked.unlisted + max(len(violations) - MAX_LISTED, 0)
    violations = violations[:MAX_LISTED]
    if violations or checked.record is None:
        origins = (item.where or merged.origin(item.path).where for item in violations)
        located = [replace(v, where=w) for v, w in zip(violations, origins, strict=True)]
        raise RunError(located, merged.data, name, unlisted)
    leaf_paths = (path for path, _ in leaves(to_dict(checked.record)))
    origins = {path: merged.origins.get(path, ValueOrigin("default")) for path in leaf_paths}
    return LoadedRecord(checked.record, origins)


def parse_override(text: str) -> tuple[FieldPath, str, Any]:
    """Return path, operator (``=`` or ``+=``) and value of an override.

    Raises:
        RunError: the text has no ``=``, or its value is not YAML.
    """
    match = re.fullmatch(r"\s*([^=\s]+?)\s*(\+?=)(.*)", text, re.DOTALL)
    parts = re.findall(r"[^.\[\]]+", match[1]) if match else []
    if match is None or not parts:
        rule = f"{text!r} is not an override; write path=value, such as train.steps=100"
        raise RunError([Violation((), text, rule, id="override", where=text)])
    path = tuple(int(part) if part.isdecimal() else part for part in parts)
    try:
        return path, match[2], read_value(match[3].strip())
    except RunError as error:
        rules = "; ".join(item.rule for item in error.violations)
        item = Violation(path, match[3], rules, id="override", where=text)
        raise RunError([item]) from error


class _LoadState:
    """State of one load: layers, imported plugins, and violations."""

    def __init__(self, cls: type[Record], recipes: dict[str, Path]) -> None:
        self.cls = cls
        self.recipes = recipes
        self.layers: list[ConfigLayer] = []
        self.violations: list[Violation] = []
        self.plugins: dict[str, ValueOrigin] = {}
        self.errors: dict[str, str] = {}
        self.base_count = 0
        self.value_count = 0

    def read(self, source: str | Path | Mapping[str, Any], name: str, folder: Path | None) -> str:
        """Read a source and its bases; return its name for messages."""
        if isinstance(source, Mapping):
            self._add_layer(ConfigLayer(to_dict(source), "given", name, folder=Path.cwd()), ())
            return self.cls.__name__.lower()
        path = self._find_file(str(source), Path.cwd())
        if path is None:
            rule = f"there is no file or recipe {str(source)!r}"
            if Path(source).is_dir():
                rule = "is a folder without config.json: name a run file or a Hugging Face folder"
            like = closest(Path(source).name, self.recipes)
            item = Violation((), str(source), rule, MISSING if like is None else like, "no-file")
            raise RunError([item], source=str(source))
        self._read_file(path, "file", (), folder)
        return _display_path(path)

    def merge(self, overrides: Sequence[str]) -> MergedData:
        """Merge all layers and overrides in order; an impossible override is a violation."""
        merged = MergedData(self.cls)
        parsed = []
        for text in overrides:
            try:
                path, operator, value = parse_override(text)
            except RunError as error:
                self.violations += error.violations
                continue
            used = [value] if isinstance(value, str) else value
            if path == (USES,) and USES in specs(self.cls) and _is_string_list(used):
                self._import_plugins(used, Path.cwd(), ValueOrigin("override", text))
            else:
                parsed.append((path, value, text, operator == "+="))
        for layer in self.layers:
            merged.add(layer)
        for override in parsed:
            problem = merged.override(*override)
            self.violations += [] if problem is None else [problem]
        self._set_plugins(merged)
        for path, text, mark in list(iter_file_paths(merged.spec, merged.data)):
            absolute = mark.absolute(text, merged.origin(path).folder or Path.cwd())
            merged.data = set_at(merged.data, path, absolute)
        return merged

    def _set_plugins(self, merged: MergedData) -> None:
        """Set ``uses`` to the plugins of all layers; add violations for failed ones."""
        uses = merged.data.get(USES, []) if USES in specs(self.cls) else []
        if not _is_string_list(uses):
            listed = uses if isinstance(uses, list) else []
            texts = (path for path in listed if isinstance(path, str) and path.endswith(".py"))
            files = [path for path in texts if Path(path).is_file()]
            rule = "must be a list of Python files"
            self.violations.append(Violation((USES,), uses, rule, files, "wrong-type"))
            return
        if self.plugins:
            merged.data = set_at(merged.data, (USES,), list(self.plugins))
        for i, (path, origin) in reversed(list(enumerate(self.plugins.items()))):
            merged.origins[(USES, i)] = origin
            if path in self.errors:
                self.violations.append(
                    Violation((USES, i), path, self.errors[path], REMOVE, "uses", origin.where)
                )

    def _find_file(self, name: str, folder: Path) -> Path | None:
        path = resolve_path(name, folder)
        return path if path.is_file() else self.recipes.get(name)

    def _read_file(
        self,
        path: Path,
        kind: Literal["file", "base"],
        chain: tuple[Path, ...],
        folder: Path | None = None,
    ) -> None:
        """Read a file, and add it as a layer after its bases."""
        name = _display_path(path)
        with path_in_errors(name), path.open("rb") as file:
            parsed = read_yaml(file.read(MAX_BYTES + 1), name)
        if not isinstance(parsed.data, dict):
            rule = "must hold a mapping of keys to values at its top level"
            item = Violation((), parsed.data, rule, id="syntax", where=name)
            raise RunError([item], source=name)
        self.value_count += parsed.count
        if self.value_count > MAX_NODES:
            rule = f"the files that a run builds on hold more than {MAX_NODES} values"
            raise RunError([Violation((), None, rule, id="too-large", where=name)], source=name)
        self.violations += parsed.violations
        layer = ConfigLayer(parsed.data, kind, name, parsed.lines, folder or path.parent)
        self._add_layer(layer, (*chain, path))

    def _add_layer(self, layer: ConfigLayer, chain: tuple[Path, ...]) -> None:
        """Add a layer after its bases, and import its plugins."""
        folder = layer.folder or Path.cwd()
        bases = layer.data.get(BASE, [])
        names: dict[FieldPath, str] = {(BASE,): bases} if isinstance(bases, str) else {}
        errors: dict[FieldPath, tuple[Any, str, Any]] = {}
        if _is_string_list(bases):
            names = {(BASE, i): name for i, name in enumerate(bases)}
        elif not names:
            errors[(BASE,)] = bases, "must be a path, a recipe's name, or a list of these", REMOVE
        self.base_count += len(names)
        if self.base_count > MAX_FILES:
            errors[(BASE,)] = None, f"a run builds on at most {MAX_FILES} files", MISSING
            names = {}
        for path, name in names.items():
            base = self._find_file(name, folder)
            if base is None:
                like = closest(Path(name).name, self.recipes)
                rule = f"there is no file or recipe {name!r} to build on"
                errors[path] = name, rule, REMOVE if like is None else like
            elif base in chain:
                loop = " -> ".join(_display_path(item) for item in (*chain, base))
                errors[path] = name, f"builds on itself: {loop}", REMOVE
            else:
                self._read_file(base, "base", chain)
        self.violations += [
            Violation(path, *row, "base", layer.origin(path).where) for path, row in errors.items()
        ]
        own = {key: value for key, value in layer.data.items() if key != BASE}
        if USES in specs(self.cls) and _is_string_list(own.get(USES)):
            for i, item in enumerate(own[USES][: MAX_FILES + 1]):
                self._import_plugins([item], folder, layer.origin((USES, i)))
        self.layers.append(replace(layer, data=own))

    def _import_plugins(self, uses: list[str], folder: Path, origin: ValueOrigin) -> None:
        """Import plugins; record their origins and errors."""
        for item in uses:
            if len(self.plugins) >= MAX_FILES:
                rule = f"a run uses at most {MAX_FILES} plug-ins"
                too_many = Violation((USES,), None, rule, id="uses", where=origin.where)
                if too_many not in self.violations:
                    self.violations.append(too_many)
                return
            path = resolve_path(item, folder)
            self.plugins.setdefault(str(path), origin)
            try:
                import_plugins([path])
            except ValueError as error:
                self.errors[str(path)] = str(error)


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _display_path(path: Path) -> str:
    """Format a path for messages, relative to the working folder if inside it."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
