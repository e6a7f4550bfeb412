"""Loading of run files: merges bases, file and overrides, imports plugins, checks the result."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from moefold.config.base import Record, to_dict
from moefold.config.check import check
from moefold.config.errors import MISSING, REMOVE, FieldPath, RunError, Violation
from moefold.config.fields import leaves, paths_in, set_at, specs
from moefold.config.merge import Layer, MergedData, Origin
from moefold.config.plugins import import_plugins, resolve
from moefold.config.reader import MAX_BYTES, read_value, read_yaml
from moefold.config.suggest import closest
from moefold.files import named

BASE = "base"
USES = "uses"

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Loaded(Generic[R]):
    """A legal record with the origin of its values.

    ``origins`` maps the path of each leaf, defaults included, to the origin of its value.
    """

    record: R
    origins: Mapping[FieldPath, Origin]


def load(
    cls: type[R],
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    recipes: Mapping[str, Path] | None = None,
    called: str = "data",
    folder: Path | None = None,
) -> Loaded[R]:
    """Load a record from a file, a recipe's name, or raw data, and apply overrides.

    A file builds on those that it names in ``base:`` (a path relative to the file, a recipe's name,
    or a list of these). Where the class has a field ``uses``, the Python files named there are
    imported first. Paths in a file are relative to the folder of that file, paths in overrides and
    in raw data to the working folder; the record holds absolute paths.

    Args:
        cls: class of the record.
        source: path of a YAML file, name of a recipe, or raw data.
        overrides: ``path=value`` with a value in YAML; ``path+=value`` appends to a list.
        recipes: files of recipes by name.
        called: name of raw data in the origins of values.
        folder: folder to which paths in the file ``source`` are relative, instead of its own.

    Raises:
        RunError: the source has violations; the error carries all of them.
    """
    reading = _Reading(cls, dict(recipes or {}))
    name = reading.read(source, called, folder)
    merged = reading.merged(overrides)
    overridden = [path for path, origin in merged.origins.items() if origin.sort == "override"]
    checked = check(cls, merged.data, overridden)
    known = {item.path[:1] for item in reading.violations} & {(USES,)}
    found = [item for item in checked.violations if item.path[:1] not in known]
    if any(item.id == "base" and item.nearest is not REMOVE for item in reading.violations):
        found = [item for item in found if item.id != "missing"]  # The intended base may have it.
    violations = [*reading.violations, *found]
    if violations or checked.record is None:
        origins = (item.where or merged.origin(item.path).where for item in violations)
        placed = [replace(v, where=w) for v, w in zip(violations, origins, strict=True)]
        raise RunError(placed, merged.data, name)
    written_out = (path for path, _ in leaves(to_dict(checked.record)))
    origins = {path: merged.origins.get(path, Origin("default")) for path in written_out}
    return Loaded(checked.record, origins)


def parse_override(text: str) -> tuple[FieldPath, str, Any]:
    """Return path, operator (``=`` or ``+=``) and value of an override.

    Raises:
        RunError: the text has no ``=`` or its value is not YAML.
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


class _Reading:
    """State of one load: layers read so far, imported plugins, and violations."""

    def __init__(self, cls: type[Record], recipes: dict[str, Path]) -> None:
        self.cls = cls
        self.recipes = recipes
        self.layers: list[Layer] = []
        self.violations: list[Violation] = []
        self.used: dict[str, Origin] = {}
        self.failed: dict[str, str] = {}

    def read(self, source: str | Path | Mapping[str, Any], called: str, folder: Path | None) -> str:
        """Read a source and all its bases; return the source's name for messages."""
        if isinstance(source, Mapping):
            self._add(Layer(to_dict(source), "given", called, folder=Path.cwd()), ())
            return self.cls.__name__.lower()
        path = self._find(str(source), Path.cwd())
        if path is None:
            rule = f"there is no file or recipe {str(source)!r}"
            if Path(source).is_dir():
                rule = "is a folder without config.json: name a run file or a Hugging Face folder"
            like = closest(Path(source).name, self.recipes)
            item = Violation((), str(source), rule, MISSING if like is None else like, "no-file")
            raise RunError([item], source=str(source))
        self._read_file(path, "file", (), folder)
        return _shown(path)

    def merged(self, overrides: Sequence[str]) -> MergedData:
        """Merge all layers and overrides, in order; an impossible override is a violation."""
        merged, parsed = MergedData(self.cls), []
        for text in overrides:
            try:
                path, operator, value = parse_override(text)
            except RunError as error:
                self.violations += error.violations
                continue
            used = [value] if isinstance(value, str) else value
            if path == (USES,) and USES in specs(self.cls) and _names(used):
                self._import(used, Path.cwd(), Origin("override", text))
            else:
                parsed.append((path, value, text, operator == "+="))
        for layer in self.layers:
            merged.add(layer)
        for override in parsed:
            problem = merged.override(*override)
            self.violations += [] if problem is None else [problem]
        self._note_plugins(merged)
        for path, text, mark in list(paths_in(merged.spec, merged.data)):
            whole = mark.whole(text, merged.origin(path).folder or Path.cwd())
            merged.data = set_at(merged.data, path, whole)
        return merged

    def _note_plugins(self, merged: MergedData) -> None:
        """Set ``uses`` to the plugins of all layers; add violations for those that failed."""
        given = merged.data.get(USES, []) if USES in specs(self.cls) else []
        if not _names(given):
            listed = given if isinstance(given, list) else []
            texts = (path for path in listed if isinstance(path, str) and path.endswith(".py"))
            found = [path for path in texts if Path(path).is_file()]
            rule = "must be a list of Python files"
            self.violations.append(Violation((USES,), given, rule, found, "wrong-type"))
            return
        if self.used:
            merged.data = set_at(merged.data, (USES,), list(self.used))
        for i, (path, origin) in reversed(list(enumerate(self.used.items()))):
            merged.origins[(USES, i)] = origin
            if path in self.failed:
                self.violations.append(
                    Violation((USES, i), path, self.failed[path], REMOVE, "uses", origin.where)
                )

    def _find(self, name: str, folder: Path) -> Path | None:
        path = resolve(name, folder)
        return path if path.is_file() else self.recipes.get(name)

    def _read_file(
        self,
        path: Path,
        sort: Literal["file", "base"],
        chain: tuple[Path, ...],
        folder: Path | None = None,
    ) -> None:
        """Read a file and add it as a layer, after its bases."""
        name = _shown(path)
        with named(name), path.open("rb") as file:
            parsed = read_yaml(file.read(MAX_BYTES + 1), name)
        if not isinstance(parsed.data, dict):
            rule = "must hold a mapping of keys to values at its top level"
            item = Violation((), parsed.data, rule, id="syntax", where=name)
            raise RunError([item], source=name)
        self.violations += parsed.violations
        layer = Layer(parsed.data, sort, name, parsed.lines, folder or path.parent)
        self._add(layer, (*chain, path))

    def _add(self, layer: Layer, chain: tuple[Path, ...]) -> None:
        """Add a layer, after its bases, and import its plugins."""
        folder, given = layer.folder or Path.cwd(), layer.data.get(BASE, [])
        listed: dict[FieldPath, str] = {(BASE,): given} if isinstance(given, str) else {}
        wrong: dict[FieldPath, tuple[Any, str, Any]] = {}
        if _names(given):
            listed = {(BASE, i): name for i, name in enumerate(given)}
        elif not listed:
            wrong[(BASE,)] = given, "must be a path, a recipe's name, or a list of these", REMOVE
        for path, name in listed.items():
            base = self._find(name, folder)
            if base is None:
                like = closest(Path(name).name, self.recipes)
                rule = f"there is no file or recipe {name!r} to build on"
                wrong[path] = name, rule, REMOVE if like is None else like
            elif base in chain:
                loop = " -> ".join(_shown(item) for item in (*chain, base))
                wrong[path] = name, f"builds on itself: {loop}", REMOVE
            else:
                self._read_file(base, "base", chain)
        self.violations += [
            Violation(path, *said, "base", layer.origin(path).where) for path, said in wrong.items()
        ]
        own = {key: value for key, value in layer.data.items() if key != BASE}
        if USES in specs(self.cls) and _names(own.get(USES)):
            for i, item in enumerate(own[USES]):
                self._import([item], folder, layer.origin((USES, i)))
        self.layers.append(replace(layer, data=own))

    def _import(self, uses: list[str], folder: Path, origin: Origin) -> None:
        """Import plugins and record their origin; store the error of any that fails."""
        for item in uses:
            path = resolve(item, folder)
            self.used.setdefault(str(path), origin)
            try:
                import_plugins([path])
            except ValueError as error:
                self.failed[str(path)] = str(error)


def _names(uses: Any) -> bool:
    return isinstance(uses, list) and all(isinstance(item, str) for item in uses)


def _shown(path: Path) -> str:
    """Return a path for messages, relative to the working folder if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
