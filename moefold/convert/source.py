"""A Hugging Face folder as a source of tensors: what is there by its headers, and single tensors.

Nothing in the folder is trusted: names stay inside it, headers are bounded, pickles are refused
and code is never run.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moefold.convert.errors import ConvertError
from moefold.layers.placement import Box
from moefold.model.families.folder import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INDEX_LIMIT = 64 * 2**20
HEADER_LIMIT = 100 * 10**6
"""Bytes of the largest header that the format's own library reads."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Types that weights may be stored in."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor on disk, by its file's header."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Weights(ABC):
    """Where the tensors of a model are read from, one at a time.

    Args:
        folder: where they lie.
        tensors: every tensor there is, by name.
        notes: what the reader should know of the folder.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo], notes: list[str]) -> None:
        self.folder, self.tensors, self.notes = folder, tensors, notes

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as it is stored, on the host."""
        return self.read_box(name, tuple((0, size) for size in self.tensors[name].shape))

    @abstractmethod
    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of one tensor as it is stored."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files; tensors already read stay."""


class SafetensorsWeights(Weights):
    """The tensors of a folder's safetensors files, found by their headers and mapped into memory.

    Raises:
        ConvertError: where the index and the files contradict each other, or there are no files.
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
        """Unmap the files; tensors already read stay."""
        self._open.clear()
        self._stack.close()

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of one tensor as it is stored; only the pages it lies on are read."""
        stored = self.tensors[name]
        try:
            view = self._file(stored.file).get_slice(name)
            return view[tuple(slice(start, end) for start, end in box)]
        except SafetensorError as error:
            raise ConvertError(self.folder / stored.file, [f"{name}: {error}"]) from None

    def _find(self, files: dict[str, set[str] | None]) -> None:
        """Fill ``tensors``; ``files`` says which names the index puts in each file, if any does."""
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
                    problems.append(f"{name} lies in {self.tensors[name].file} and in {file}")
                self.tensors[name] = TensorInfo(file, view.get_dtype(), tuple(view.get_shape()))
            if indexed is not None:
                missing, extra = sorted(indexed - set(names)), sorted(set(names) - indexed)
                problems += [
                    f"{name}: {INDEX} puts it in {file}, which lacks it" for name in missing
                ]
                problems += [
                    f"{name} lies in {file}, and {INDEX} does not say so" for name in extra
                ]
        if problems:
            raise ConvertError(self.folder, problems)

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            _check_header(path)
            self._open[file] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[file]


def _check_header(path: Path) -> None:
    """Refuse a header that claims more than the file has, or than anyone needs."""
    size = os.stat(path).st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(HEADER_LIMIT, size - 8):
        raise SafetensorError(
            f"the header claims {length} bytes; the file has {size}, the limit is {HEADER_LIMIT}"
        )


def _files(folder: Path, notes: list[str]) -> dict[str, set[str] | None]:
    """Return the files that hold the weights, with the names that the index puts in each."""
    if not folder.is_dir():
        raise ConvertError(folder, ["is not a folder"])
    present = sorted(p.name for p in folder.iterdir())
    has_index, has_single = INDEX in present, SINGLE in present
    if has_index and has_single:
        raise ConvertError(folder, [f"has both {INDEX} and {SINGLE}; remove the stale one"])
    if has_index:
        files: dict[str, set[str] | None] = dict(_indexed(folder))
    elif has_single:
        files = {SINGLE: None}
    else:
        raise ConvertError(folder, [_no_weights(present)])
    notes += _left_alone(present, files)
    return files


def _no_weights(present: list[str]) -> str:
    pickled = [n for n in present if n.endswith(PICKLES)]
    if pickled:
        return (
            f"has only pickled weights ({pickled[0]}), which can run code when they are read; "
            "name them with --weights, which reads tensors and nothing else out of them"
        )
    return f"has neither {SINGLE} nor {INDEX}"


def _left_alone(present: list[str], files: dict[str, set[str] | None]) -> Iterator[str]:
    for what, found in (
        ("code of the folder's own is never run", [n for n in present if n.endswith(".py")]),
        ("pickled files are not read", [n for n in present if n.endswith(PICKLES)]),
        (
            "weights outside the index are not read",
            [n for n in present if n.endswith(".safetensors") and n not in files],
        ),
    ):
        if found:
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            yield f"{what}: {shown}"


def _indexed(folder: Path) -> dict[str, set[str]]:
    """Read the index; return the tensor names of each file.

    Raises:
        ConvertError: where it is malformed, or a file's name leads out of the folder.
    """
    try:
        weight_map = read_json(folder / INDEX, INDEX_LIMIT).get("weight_map")
    except ValueError as error:
        raise ConvertError(folder, [str(error)]) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConvertError(folder, [f"{INDEX} has no weight_map"])
    files: dict[str, set[str]] = {}
    problems: list[str] = []
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _plain_name(file):
            problems.append(f"{name}: {json.dumps(file)[:80]} is no file name inside the folder")
        else:
            files.setdefault(file, set()).add(name)
    problems += [f"{file} is missing" for file in files if not (folder / file).is_file()]
    if problems:
        raise ConvertError(folder, problems)
    return files


def _plain_name(file: str) -> bool:
    """Whether a name has no path in it, in any system's notation."""
    separators = set("/\\:\0")
    return file.endswith(".safetensors") and not separators & set(file) and file.isprintable()
