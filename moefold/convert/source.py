"""A Hugging Face folder as a source of tensors: lists them by headers, and reads them one by one.

The folder is not trusted: file names must stay inside it, headers are bounded, pickles are refused
and code is never run.
"""

import json
import math
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
from moefold.files import irregularity, read_json
from moefold.layers.placement import Box
from moefold.model.families.folder import INDEX, INDEX_LIMIT
from moefold.model.families.peft import PICKLED, TENSORS

SINGLE = "model.safetensors"
PLAIN_NAME = re.compile(r"[^/\\:\0]*\.safetensors")
"""File names without a path, on any operating system."""
_LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")
"""Prefix of the language model's tensor names in a multimodal model."""
NON_TEXT = re.compile(r"^(model\.)?(vision|visual|audio|multi_modal_projector|mm_projector)")
"""Tensor names of other parts of a multimodal model."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

MAX_LISTED = 40
"""Most problems that one message lists; the rest are counted."""

DTYPES = {name: STORED[name] for name in ("F64", "F32", "F16", "BF16", "F8_E4M3")}
"""Dtypes in which weights may be stored."""


class ConvertError(ValueError):
    """A folder cannot be converted; the message has its path and all problems."""

    def __init__(self, path: Path | str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = [f"{path}:", *self.problems[:MAX_LISTED]]
        more = len(self.problems) - MAX_LISTED
        if more > 0:
            lines.append(f"and {more} more")
        super().__init__("\n  ".join(lines))


def nonfinite(tensor: torch.Tensor) -> str | None:
    """Return ``"NaN"`` or ``"an infinity"`` if a tensor contains one, else None."""
    if not tensor.numel():
        return None
    low, high = (float(value) for value in tensor.aminmax())
    if math.isnan(low + high):  # NaN, or infinities of both signs
        return "NaN" if math.isnan(low) else "an infinity"
    return "an infinity" if math.isinf(low + high) else None


@dataclass(frozen=True)
class TensorInfo:
    """A tensor on disk, as its file's header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    disk_name: str | None = None
    """The name on disk, if different."""


class Weights(ABC):
    """A source of a model's tensors, which are read one at a time.

    Args:
        folder: the folder.
        tensors: every tensor in it, by name.
        notes: notes on the folder for the user.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo], notes: list[str]) -> None:
        self.folder = folder
        self.tensors = tensors
        self.notes = notes

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as stored, on the host."""
        return self.read_box(name, tuple((0, size) for size in self.tensors[name].shape))

    @abstractmethod
    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of one tensor as stored."""

    @abstractmethod
    def close(self) -> None:
        """Close the files; tensors already read stay valid."""

    def strip_language_prefix(self) -> None:
        """Rename a multimodal model's language tensors as in a text-only model."""
        new = {name: _LANGUAGE_MODEL.sub(r"\1", name) for name in self.tensors}
        renamed = [name for name in self.tensors if new[name] != name]
        twice = [name for name in renamed if new[name] in new]
        if twice:
            problems = [f"{n} in {self.tensors[n].file} is also stored as {new[n]}" for n in twice]
            raise ConvertError(self.folder, problems)
        self.tensors = {new[n]: replace(info, disk_name=n) for n, info in self.tensors.items()}


class SafetensorsWeights(Weights):
    """The tensors of a folder's safetensors files, listed by headers and mapped into memory.

    Raises:
        ConvertError: if index and files contradict each other, or there are no files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {}, [])
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            self._read_headers(_weight_files(folder, self.notes))
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Unmap the files; tensors already read stay valid."""
        self._open.clear()
        self._stack.close()

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of one tensor as stored; only its pages are read."""
        info = self.tensors[name]
        try:
            view = self._open_file(info.file).get_slice(info.disk_name or name)
            return view[tuple(slice(start, end) for start, end in box)]
        except SafetensorError as error:
            raise ConvertError(self.folder / info.file, [f"{name}: {error}"]) from None

    def _read_headers(self, files: dict[str, set[str] | None]) -> None:
        """Fill ``tensors``; ``files`` has each file's tensor names, or None without an index."""
        problems: list[str] = []
        for file, indexed in files.items():
            try:
                opened = self._open_file(file)
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
                missing = sorted(indexed - set(names))
                extra = sorted(set(names) - indexed)
                problems += [f"{n} is not in {file}, where {INDEX} lists it" for n in missing]
                problems += [f"{n} is in {file}, where {INDEX} does not list it" for n in extra]
        if problems:
            raise ConvertError(self.folder, problems)

    def _open_file(self, file: str) -> Any:
        if file not in self._open:
            opened = safe_open(self.folder / file, framework="pt")
            self._open[file] = self._stack.enter_context(opened)
        return self._open[file]


def _weight_files(folder: Path, notes: list[str]) -> dict[str, set[str] | None]:
    """Return the weight files, each with its tensor names by the index, or None without one."""
    if not folder.is_dir():
        raise ConvertError(folder, ["is not a folder"])
    present = sorted(p.name for p in folder.iterdir())
    present = [name for name in present if name not in (TENSORS, PICKLED)]  # said elsewhere
    pickled = [name for name in present if name.endswith(PICKLE_SUFFIXES)]
    files: dict[str, set[str] | None] = {SINGLE: None}
    if INDEX in present:
        if SINGLE in present:
            raise ConvertError(folder, [f"has both {INDEX} and {SINGLE}; remove the stale one"])
        files = dict(_read_index(folder))
    elif SINGLE not in present:
        problem = f"has neither {SINGLE} nor {INDEX}"
        if pickled:
            problem = (
                f"has only pickled weights ({pickled[0]}), which can run code when loaded; "
                "pass them with --weights, which reads only tensors"
            )
        raise ConvertError(folder, [problem])
    irregular = [f"{file} {what}" for file in files if (what := irregularity(folder / file))]
    if irregular:
        raise ConvertError(folder, irregular)
    stray = [n for n in present if n.endswith(".safetensors") and n not in files]
    code = [name for name in present if name.endswith(".py")]
    unread = {
        "Python code in the folder is never run": code,
        "pickled files are not read": pickled,
        "other safetensors files are not read": stray,
    }
    for note, names in unread.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        if names:
            notes.append(f"{note}: {', '.join(names[:3])}{more}")
    return files


def _read_index(folder: Path) -> dict[str, set[str]]:
    """Read the index; return the tensor names of each file.

    Raises:
        ConvertError: if it is malformed, or a file name is a path out of the folder.
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
    problems += [f"{file} is missing" for file in files if not (folder / file).exists()]
    if problems:
        raise ConvertError(folder, problems)
    return files
