"""Pickled weights of other programs as a source of tensors, read with allow-lists.

State dicts of ``torch.save`` are read by torch's restricted unpickler, which builds only tensors
and plain data. Folders of ``torch.distributed.checkpoint`` (DCP) have a pickle that this library
reads without restriction; ``_MetadataUnpickler`` knows only the few classes that describe tensors,
and builds plain fields for them. Any other name is refused.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.manifest import tiles
from moefold.convert.source import DTYPES, ConvertError, TensorInfo, Weights
from moefold.layers.placement import Box, inside, shared_box

METADATA = ".metadata"
METADATA_LIMIT = 256 * 2**20
PARTS = ("pytorch_model*.bin", "*.pt", "*.pth")
"""Patterns of weight files in a folder; the first that matches is used."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
DEPTH = 4
"""Most levels of nested dictionaries; optimizer state has no more, and cycles end here."""


class _Fields:
    """Replaces objects of known classes: their fields, without behaviour."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


_DESCRIBING = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata",
        "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "WindowsPath"),
}  # fmt: skip
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
ALLOWED: dict[tuple[str, str], Any] = {
    **{(module, name): _Fields for module, names in _DESCRIBING.items() for name in names},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES},
    ("torch", "Size"): tuple,
}
"""Names that a folder's metadata may contain, with their replacements."""


@dataclass(frozen=True)
class _Pickled:
    """One tensor: its description, and its boxes with functions that read them."""

    info: TensorInfo
    boxes: list[tuple[Box, Callable[[], Tensor]]]


class PickledWeights(Weights):
    """The tensors of a pickled checkpoint, a file or a folder, under the model's names.

    Args:
        path: a state dict of ``torch.save``, a folder of them, or a DCP folder with ``.metadata``.
        anchor: the name of a tensor that must exist. Its prefix in the checkpoint, such as
            ``module.``, is removed from all names; tensors without it are left out.

    Raises:
        ConvertError: if there is no checkpoint, it has more than tensors and plain data, or not
            exactly one such tensor.
    """

    def __init__(self, path: Path, anchor: str) -> None:
        held = dict(_distributed(path) if (path / METADATA).is_file() else _saved(path))
        ends = [name for name in held if name == anchor or name.endswith("." + anchor)]
        if len(ends) != 1:
            known = ", ".join(list(held)[:3]) or "none"
            what = f"must have one tensor named {anchor}, with or without a prefix"
            raise ConvertError(path, [f"{what}, not {len(ends)}; its first tensors: {known}"])
        prefix = ends[0].removesuffix(anchor)
        self._held = {n.removeprefix(prefix): p for n, p in held.items() if n.startswith(prefix)}
        left = len(held) - len(self._held)
        notes = [f"tensors left out (names without {prefix!r}): {left}"] * bool(left)
        super().__init__(path, {name: p.info for name, p in self._held.items()}, notes)

    def read_box(self, name: str, box: Box) -> Tensor:
        """Return a box of one tensor as stored."""
        size = [end - start for start, end in box]
        wanted = torch.empty(size, dtype=DTYPES[self.tensors[name].dtype])
        for held, read in self._held[name].boxes:
            shared = shared_box(box, held)
            if shared is not None:
                wanted[inside(shared, box)] = read()[inside(shared, held)]
        return wanted

    def close(self) -> None:
        """Close the files; tensors already read stay valid."""
        self._held.clear()


def _saved(path: Path) -> Iterator[tuple[str, _Pickled]]:
    """Yield the tensors of state dicts of ``torch.save``, mapped into memory."""
    seen: set[str] = set()
    for file in _files(path):
        try:
            found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise ConvertError(path, [f"{file.name}: {_first_line(error)}"]) from None
        for name, tensor in _flat(found):
            if name in seen:
                raise ConvertError(path, [f"{name} is in two files, one of them {file.name}"])
            seen.add(name)
            info = _info(file.name, tensor.dtype, tuple(tensor.shape))
            box = tuple((0, size) for size in tensor.shape)
            yield name, _Pickled(info, [(box, partial(Tensor.detach, tensor))])


def _distributed(folder: Path) -> dict[str, _Pickled]:
    """Return the tensors of a DCP folder, which saves each box separately.

    Raises:
        ConvertError: if the metadata is not as expected, or names missing data.
    """
    said, problems = _metadata(folder / METADATA), list[str]()
    found: dict[str, _Pickled] = {}
    try:
        places = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): info
            for index, info in said.storage_data.items()
        }
        for name, held in said.state_dict_metadata.items():
            if "chunks" not in vars(held):
                continue  # no tensor
            shape, dtype = tuple(held.size), held.properties.state[0]
            parts = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in held.chunks]
            numbers = [n for at, sizes in parts for n in (*at, *sizes)]
            if min(numbers, default=0) < 0 or not tiles(shape, parts):
                problems.append(f"{name}: its parts do not cover its shape {list(shape)} once")
                continue
            boxes = []
            for at, sizes in parts:
                problems += _misplaced(folder, name, places[name, at])
                box = tuple((a, a + n) for a, n in zip(at, sizes, strict=True))
                read = partial(_read_box, folder, name, places[name, at], sizes, dtype)
                boxes.append((box, read))
            found[name] = _Pickled(_info(METADATA, dtype, shape), boxes)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise ConvertError(folder, [f"{METADATA} has an unknown structure: {error!r}"]) from None
    if problems:
        raise ConvertError(folder, problems)
    return found


def _misplaced(folder: Path, name: str, info: Any) -> Iterator[str]:
    """Yield the problems of a box's place in the metadata."""
    file, start, size = str(info.relative_path), int(info.offset), int(info.length)
    path = folder / file
    if file != path.name or "\0" in file or not path.is_file():
        yield f"{name}: {file[:80]!r} is not a file in the folder"
    elif not 0 <= start <= start + size <= path.stat().st_size:
        yield f"{name}: {file} has no bytes {start} to {start + size}"
    if getattr(info, "transform_descriptors", None):
        yield f"{name}: {file} is compressed, which is not supported"


def _read_box(
    folder: Path, name: str, info: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Read one saved box, and check its shape and dtype against the metadata."""
    path = folder / str(info.relative_path)
    with path.open("rb") as file:
        file.seek(int(info.offset))
        raw = file.read(int(info.length))
    try:
        part = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConvertError(folder, [f"{name} in {path.name}: {_first_line(error)}"]) from None
    if not isinstance(part, Tensor) or tuple(part.shape) != shape or part.dtype != dtype:
        wanted = f"the {dtype} tensor {list(shape)} that {METADATA} describes"
        raise ConvertError(folder, [f"{name} in {path.name} is not {wanted}"])
    return part


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows only classes that describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not on the allow-list")
        return ALLOWED[module, name]


def _metadata(path: Path) -> Any:
    """Read the metadata of a folder.

    Raises:
        ConvertError: if it is too large, damaged, or has a name that is not on the allow-list.
    """
    size = path.stat().st_size
    if size > METADATA_LIMIT:
        raise ConvertError(path, [f"has {size} bytes, more than the limit of {METADATA_LIMIT}"])
    try:
        return _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise ConvertError(path, [f"{type(error).__name__}: {error}"]) from None


def _files(path: Path) -> list[Path]:
    """Return the weight files at a path."""
    if path.is_file():
        return [path]
    for pattern in PARTS:
        if found := sorted(path.glob(pattern)):
            return found
    what = f"has no {METADATA} and no {' or '.join(PARTS)}" if path.is_dir() else "does not exist"
    raise ConvertError(path, [what])


def _flat(found: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries, with keys joined by dots."""
    if isinstance(found, Tensor):
        yield prefix.removesuffix("."), found
    elif isinstance(found, Mapping) and depth < DEPTH:
        for key, value in found.items():
            yield from _flat(value, f"{prefix}{key}.", depth + 1)


def _info(file: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(file, NAMES.get(dtype, str(dtype)), shape)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
