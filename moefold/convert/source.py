"""A Hugging Face folder as a source of tensors: lists them by headers, and reads single ones.

Nothing in the folder is trusted: file names must stay inside it, headers are bounded, pickles are
refused and code is never run.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moefold.checkpoint.tensors import DTYPES as STORED
from moefold.files import read_json
from moefold.layers.placement import Box
from moefold.model.families.folder import INDEX, INDEX_LIMIT

SINGLE = "model.safetensors"
PLAIN_NAME = re.compile(r"[^/\\:\0]*\.safetensors")
"""File names without a path, in the notation of any system."""
_INNER = re.compile(r"^(model\.)?language_model\.")
"""Prefix of the language model's tensor names in a multimodal model."""
BESIDE = re.compile(r"^(model\.)?(vision|visual|audio|multi_modal_projector|mm_projector)")
"""Tensor names of other parts of a multimodal model."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

SHOWN = 40
"""Most problems that one message lists; the rest are counted."""

DTYPES = {name: STORED[name] for name in ("F64", "F32", "F16", "BF16", "F8_E4M3")}
"""Dtypes in which weights may be stored."""


class ConvertError(ValueError):
    """A folder cannot be converted; the text has the place and all reasons."""

    def __init__(self, where: Path | str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        listed = "".join(f"\n  {p}" for p in self.problems[:SHOWN])
        left = len(self.problems) - SHOWN
        super().__init__(f"{where}:{listed}" + (f"\n  and {left} more" if left > 0 else ""))


@dataclass(frozen=True)
class TensorInfo:
    """One tensor on disk, as described by its file's header."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    stored: str | None = None
    """Its name on disk, if different."""


class Weights(ABC):
    """A source of a model's tensors, which are read one at a time.

    Args:
        folder: their folder.
        tensors: every tensor in it, by name.
        notes: notes on the folder for the user.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo], notes: list[str]) -> None:
        self.folder, self.tensors, self.notes = folder, tensors, notes

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as stored, on the host."""
        return self.read_box(name, tuple((0, size) for size in self.tensors[name].shape))

    @abstractmethod
    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of one tensor as stored."""

    @abstractmethod
    def close(self) -> None:
        """Close the files; tensors already read stay valid."""

    def enter(self) -> None:
        """Rename the language model's tensors of a multimodal model as in a text-only one."""
        inner = {name: _INNER.sub(r"\1", name) for name in self.tensors}
        twice = [name for name in self.tensors if inner[name] != name and inner[name] in inner]
        if twice:
            said = [f"{n} in {self.tensors[n].file} is also stored as {inner[n]}" for n in twice]
            raise ConvertError(self.folder, said)
        named = {inner[n]: replace(info, stored=n) for n, info in self.tensors.items()}
        self.tensors = named


class SafetensorsWeights(Weights):
    """The tensors of a folder's safetensors files, found by headers and mapped into memory.

    Raises:
        ConvertError: if the index and the files contradict each other, or there are no files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {}, [])
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            self._find(_files(folder, self.notes))
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Unmap the files; tensors already read stay valid."""
        self._open.clear()
        self._stack.close()

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of one tensor as stored; only its pages are read."""
        stored = self.tensors[name]
        try:
            view = self._file(stored.file).get_slice(stored.stored or name)
            return view[tuple(slice(start, end) for start, end in box)]
        except SafetensorError as error:
            raise ConvertError(self.folder / stored.file, [f"{name}: {error}"]) from None

    def _find(self, files: dict[str, set[str] | None]) -> None:
        """Fill ``tensors``; ``files`` has the names of each file by the index, or None without."""
        problems: list[str] = []
        for file, indexed in files.items():
            try:
                opened = self._file(file)
                names = list(opened.keys())
            except (OSError, SafetensorError) as error:
                problems.append(f"{file}: {error}")
                continue
            for name in names:
                view = opened.get_slice(name)
                if name in self.tensors:
                    problems.append(f"{name} is both in {self.tensors[name].file} and in {file}")
                self.tensors[name] = TensorInfo(file, view.get_dtype(), tuple(view.get_shape()))
            if indexed is not None:
                missing, extra = sorted(indexed - set(names)), sorted(set(names) - indexed)
                problems += [f"{n} is not in {file}, where {INDEX} lists it" for n in missing]
                problems += [f"{n} is in {file}, where {INDEX} does not list it" for n in extra]
        if problems:
            raise ConvertError(self.folder, problems)

    def _file(self, file: str) -> Any:
        if file not in self._open:
            opened = safe_open(self.folder / file, framework="pt")
            self._open[file] = self._stack.enter_context(opened)
        return self._open[file]


def _files(folder: Path, notes: list[str]) -> dict[str, set[str] | None]:
    """Return the files of weights, each with its tensors' names by the index, or None without."""
    if not folder.is_dir():
        raise ConvertError(folder, ["is not a folder"])
    present = sorted(p.name for p in folder.iterdir())
    pickled = [name for name in present if name.endswith(PICKLES)]
    files: dict[str, set[str] | None] = {SINGLE: None}
    if INDEX in present:
        if SINGLE in present:
            raise ConvertError(folder, [f"has both {INDEX} and {SINGLE}; remove the stale one"])
        files = dict(_indexed(folder))
    elif SINGLE not in present:
        problem = f"has neither {SINGLE} nor {INDEX}"
        if pickled:
            problem = (
                f"has only pickled weights ({pickled[0]}), which can run code when loaded; "
                "pass them with --weights, which reads only tensors"
            )
        raise ConvertError(folder, [problem])
    stray = [n for n in present if n.endswith(".safetensors") and n not in files]
    for what, found in (
        ("Python code in the folder is never run", [n for n in present if n.endswith(".py")]),
        ("pickled files are not read", pickled),
        ("other safetensors files are not read", stray),
    ):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        notes += [f"{what}: {', '.join(found[:3])}{more}"] if found else []
    return files


def _indexed(folder: Path) -> dict[str, set[str]]:
    """Read the index; return the tensor names of each file.

    Raises:
        ConvertError: if it is malformed, or a file name leads out of the folder.
    """
    try:
        weight_map = read_json(folder / INDEX, limit=INDEX_LIMIT).get("weight_map")
    except ValueError as error:
        raise ConvertError(folder, [str(error)]) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConvertError(folder, [f"{INDEX} has no weight_map"])
    files: dict[str, set[str]] = {}
    problems: list[str] = []
    for name, file in weight_map.items():
        if not isinstance(file, str) or not PLAIN_NAME.fullmatch(file) or not file.isprintable():
            problems.append(f"{name}: {json.dumps(file)[:80]} is not a safetensors file name")
        else:
            files.setdefault(file, set()).add(name)
    problems += [f"{file} is missing" for file in files if not (folder / file).is_file()]
    if problems:
        raise ConvertError(folder, problems)
    return files
