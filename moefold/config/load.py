"""Loading a run file: bases, parts from outside, overrides, and one judgement of it all."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from moefold.config.base import Record
from moefold.config.check import check
from moefold.config.draft import Draft, Layer, Origin
from moefold.config.fields import keys, leaves, paths_in
from moefold.config.nearest import closest
from moefold.config.problems import REMOVE, Edit, RunError, Spot, Violation, amend
from moefold.config.reader import MAX_BYTES, read_value, read_yaml
from moefold.config.records import plain
from moefold.config.uses import bring, resolve
from moefold.files import named

BASE = "base"
USES = "uses"

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Loaded(Generic[R]):
    """A legal record, and how it came about.

    ``origins`` gives, for each leaf of the record written out in full, where its value came from;
    ``parts`` the SHA-256 of each file from outside by its absolute path; ``sources`` the files
    that were read, bases first.
    """

    record: R
    origins: Mapping[Spot, Origin]
    parts: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[Path, ...] = ()


def load(
    cls: type[R],
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    recipes: Mapping[str, Path] | None = None,
    called: str = "data",
    folder: Path | None = None,
) -> Loaded[R]:
    """Load a record from a file, a recipe's name, or raw data, with overrides on top.

    A file may name another in ``base:`` (a path relative to itself, or a recipe's name, or a list
    of them) and builds on it. Where the class has a field ``uses``, the Python files named there
    are imported first. Paths that a file names begin at the file's own folder, those of overrides
    and of raw data at the working folder; the record holds them whole.

    Args:
        cls: class of the record.
        source: path of a YAML file, name of a recipe, or raw data.
        overrides: ``path=value``, the value in YAML; ``path+=value`` adds to a list.
        recipes: recipes by name.
        called: what raw data goes by where a value's origin is told.
        folder: where paths of the file ``source`` begin in place of its own folder.

    Raises:
        RunError: with every violation.
    """
    reading = _Reading(cls, dict(recipes or {}))
    name = reading.read(source, called, folder)
    reading.override(overrides)
    draft = reading.finish()
    verdict = check(cls, draft.data)
    violations = [*reading.violations, *_others(verdict.violations, reading.violations)]
    if violations or verdict.record is None:
        placed = [_placed(item, draft) for item in violations]
        raise RunError(placed, draft.data, name)
    written_out = (path for path, _ in leaves(plain(verdict.record)))
    origins = {path: draft.origins.get(path, Origin("default")) for path in written_out}
    return Loaded(verdict.record, origins, reading.parts, tuple(reading.sources))


def parse_override(text: str) -> tuple[Spot, str, Any]:
    """Return path, operator (``=`` or ``+=``) and value of an override.

    Raises:
        RunError: where it has no ``=`` or the value is not YAML.
    """
    match = re.fullmatch(r"\s*([^=\s]+?)\s*(\+?=)(.*)", text, re.DOTALL)
    if match is None:
        rule = f"{text!r} is not an override; write path=value, such as train.steps=100"
        raise RunError([Violation((), text, rule, id="override", where=text, edits=())])
    parts = re.findall(r"[^.\[\]]+", match[1])
    path = tuple(int(part) if part.isdecimal() else part for part in parts)
    try:
        return path, match[2], read_value(match[3].strip())
    except RunError as error:
        rules = "; ".join(item.rule for item in error.violations)
        item = Violation(path, match[3], rules, id="override", where=text, edits=())
        raise RunError([item]) from error


def _others(found: Sequence[Violation], known: Sequence[Violation]) -> list[Violation]:
    """Return the violations that are not of the field ``uses`` where more is known of that."""
    told = any(item.path[:1] == (USES,) for item in known)
    return [item for item in found if not (told and item.path[:1] == (USES,))]


def _placed(item: Violation, draft: Draft) -> Violation:
    """Return a violation with the file and line, or the override, that is to blame."""
    if item.where:
        return item
    return replace(item, where=draft.origin(item.path).where)


class _Reading:
    """One load under way: what was read so far, and what was wrong with it."""

    def __init__(self, cls: type[Record], recipes: dict[str, Path]) -> None:
        self.cls = cls
        self.recipes = recipes
        self.layers: list[Layer] = []
        self.parts: dict[str, str] = {}
        self.sources: list[Path] = []
        self.violations: list[Violation] = []
        self.overrides: list[tuple[str, Spot, str, Any]] = []
        self.used: dict[str, Origin] = {}
        self.failed: dict[str, str] = {}

    def read(self, source: str | Path | Mapping[str, Any], called: str, folder: Path | None) -> str:
        """Read a source with all it builds on; return its name for messages."""
        if isinstance(source, Mapping):
            data = plain(source)
            self._layer(data, Path.cwd(), Layer(data, "given", called), ())
            return self.cls.__name__.lower()
        path = self._find(str(source), Path.cwd())
        if path is None:
            rule = f"there is no file or recipe {str(source)!r}"
            if Path(source).is_dir():
                rule = "is a folder without config.json, so no Hugging Face folder; name a run file"
            like = closest(Path(source).name, self.recipes)
            raise RunError(
                [Violation((), str(source), rule, like, "no-file", edits=())], source=str(source)
            )
        self._file(path, "file", (), folder)
        return _shown(path)

    def override(self, texts: Sequence[str]) -> None:
        """Take overrides; one that cannot be read is a violation."""
        for text in texts:
            try:
                path, operator, value = parse_override(text)
            except RunError as error:
                self.violations += error.violations
                continue
            used = [value] if isinstance(value, str) else value
            if path == (USES,) and USES in keys(self.cls) and _names(used):
                self._bring(used, Path.cwd(), Origin("override", text))
                continue
            self.overrides.append((text, path, operator, value))

    def finish(self) -> Draft:
        """Merge all layers and overrides, in order."""
        draft = Draft(self.cls)
        for layer in self.layers:
            draft.lay(layer)
        for text, path, operator, value in self.overrides:
            change = draft.append if operator == "+=" else draft.put
            problem = change(path, value, text)
            if problem is not None:
                self.violations.append(problem)
        self._use(draft)
        begun = [
            Edit(spot, mark.whole(text, draft.origin(spot).folder or Path.cwd()))
            for spot, text, mark in paths_in(draft.place, draft.data)
        ]
        draft.data = amend(draft.data, begun)
        return draft

    def _use(self, draft: Draft) -> None:
        """Note the files that all layers use; those that failed are to be taken out."""
        if USES not in keys(self.cls):
            return
        given = draft.data.get(USES, [])
        if not _names(given):
            found = [path for path in given if _runs(path)] if isinstance(given, list) else []
            where, rule = draft.origin((USES,)).where, "must be a list of Python files"
            self.violations.append(Violation((USES,), given, rule, found, "wrong-type", where))
        elif self.used:
            draft.data[USES] = list(self.used)
            for i, (path, origin) in reversed(list(enumerate(self.used.items()))):
                draft.origins[(USES, i)] = origin
                if path in self.failed:
                    found = Violation((USES, i), path, self.failed[path], REMOVE, "uses")
                    self.violations.append(replace(found, where=origin.where))

    def _find(self, name: str, folder: Path) -> Path | None:
        path = resolve(name, folder)
        if path.is_file():
            return path
        return self.recipes.get(name)

    def _file(
        self, path: Path, sort: str, chain: tuple[Path, ...], folder: Path | None = None
    ) -> None:
        """Read a file and what it builds on, bases first."""
        name = _shown(path)
        if path.stat().st_size > MAX_BYTES:
            rule = f"larger than {MAX_BYTES} bytes"
            raise RunError([Violation((), None, rule, id="too-large", where=name, edits=())])
        with named(name), path.open("rb") as file:
            parsed = read_yaml(file.read(MAX_BYTES + 1), name)
        if not isinstance(parsed.data, dict):
            rule = "holds no mapping of keys to values at its top"
            item = Violation((), parsed.data, rule, id="syntax", where=name, edits=())
            raise RunError([item], source=name)
        self.violations += parsed.violations
        layer = Layer(parsed.data, "base" if sort == "base" else "file", name, parsed.lines)
        self._layer(parsed.data, folder or path.parent, layer, (*chain, path))
        self.sources.append(path)

    def _layer(
        self, data: dict[str, Any], folder: Path, layer: Layer, chain: tuple[Path, ...]
    ) -> None:
        """Take a layer, after those that it builds on, and import the parts that it uses."""
        for i, name in enumerate(self._bases(data, layer)):
            path = self._find(name, folder)
            spot = (BASE, i) if isinstance(data[BASE], list) else (BASE,)
            if path is None:
                rule = f"there is no file or recipe {name!r} to build on"
                like = closest(Path(name).name, self.recipes)
                self._base_problem(spot, name, rule, layer, like)
            elif path in chain:
                loop = " -> ".join(_shown(item) for item in (*chain, path))
                self._base_problem(spot, name, f"builds on itself: {loop}", layer)
            else:
                self._file(path, "base", chain)
        own = {key: value for key, value in data.items() if key != BASE}
        if USES in keys(self.cls) and _names(own.get(USES)):
            for i, item in enumerate(own[USES]):
                self._bring([item], folder, layer.origin((USES, i)))
        self.layers.append(replace(layer, data=own, folder=folder))

    def _bases(self, data: dict[str, Any], layer: Layer) -> list[str]:
        named = data.get(BASE, [])
        names = named if isinstance(named, list) else [named]
        wrong = [item for item in names if not isinstance(item, str)]
        if wrong:
            self._base_problem((BASE,), named, "must be a path, a recipe's name, or a list", layer)
            return []
        return names

    def _base_problem(
        self, path: Spot, value: Any, rule: str, layer: Layer, like: str | None = None
    ) -> None:
        nearest = REMOVE if like is None else like
        where = layer.origin(path).where
        self.violations.append(Violation(path, value, rule, nearest, "base", where, edits=()))

    def _bring(self, uses: list[str], folder: Path, origin: Origin) -> None:
        """Import the files that a layer uses."""
        for item in uses:
            path = resolve(item, folder)
            self.used.setdefault(str(path), origin)
            try:
                self.parts.update(bring([path]))
            except ValueError as error:
                self.failed[str(path)] = str(error)


def _runs(path: Any) -> bool:
    return isinstance(path, str) and path.endswith(".py") and Path(path).is_file()


def _names(uses: Any) -> bool:
    return isinstance(uses, list) and all(isinstance(item, str) for item in uses)


def _shown(path: Path) -> str:
    """Return a path relative to the working folder where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
