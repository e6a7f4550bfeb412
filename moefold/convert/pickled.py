"""Pickled weights of other programs as a source of tensors, read with allow-lists.

State dicts of ``torch.save`` are read by torch's restricted unpickler, which builds only tensors
and plain data. Folders of ``torch.distributed.checkpoint`` (DCP) have a pickle, which that library
reads without restriction; here ``_MetadataUnpickler`` allows only the few classes that describe
tensors, and replaces them with plain fields. Any other name is refused.
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
from moefold.files import irregularity
from moefold.layers.placement import Box, intersection, relative_slices

METADATA = ".metadata"
METADATA_LIMIT = 256 * 2**20
PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth")
"""Patterns of weight files in a folder; the first that matches is used."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DEPTH = 4
"""Most levels of nested dictionaries: optimizer state has no more, and cycles end here."""


class _Fields:
    """Fields of an object of an allowed class, without its behaviour."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


_METADATA_CLASSES = {
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
    **{(module, name): _Fields for module, names in _METADATA_CLASSES.items() for name in names},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES},
    ("torch", "Size"): tuple,
}
"""Names that DCP metadata may contain, with their replacements."""


@dataclass(frozen=True)
class _PickledTensor:
    """One tensor: its description, and its boxes with functions that read them."""

    info: TensorInfo
    boxes: list[tuple[Box, Callable[[], Tensor]]]


class PickledWeights(Weights):
    """The tensors of a pickled checkpoint, a file or a folder, under the model's names.

    Args:
        path: a state dict of ``torch.save``, a folder of them, or a DCP folder with ``.metadata``.
        anchor: name of a tensor that must exist. Its prefix in the checkpoint, such as
            ``module.``, is removed from all names; tensors without that prefix are left out.

    Raises:
        ConvertError: if there is no checkpoint, it has other objects than tensors and plain data,
            or not exactly one tensor of that name.
    """

    def __init__(self, path: Path, anchor: str) -> None:
        found = dict(_read_dcp(path) if (path / METADATA).exists() else _read_state_dicts(path))
        anchors = [name for name in found if name == anchor or name.endswith("." + anchor)]
        if len(anchors) != 1:
            known = ", ".join(list(found)[:3]) or "none"
            rule = f"must have one tensor named {anchor}, with or without a prefix"
            raise ConvertError(path, [f"{rule}, not {len(anchors)}; its first tensors: {known}"])
        prefix = anchors[0].removesuffix(anchor)
        named = [(name, p) for name, p in found.items() if name.startswith(prefix)]
        self._pickled = {name.removeprefix(prefix): p for name, p in named}
        ignored = len(found) - len(named)
        notes = [f"tensors left out (names without {prefix!r}): {ignored}"] * bool(ignored)
        super().__init__(path, {name: p.info for name, p in self._pickled.items()}, notes)

    def read_box(self, name: str, box: Box) -> Tensor:
        """Return a box of one tensor as stored."""
        size = [end - start for start, end in box]
        tensor = torch.empty(size, dtype=DTYPES[self.tensors[name].dtype])
        for stored, read in self._pickled[name].boxes:
            shared = intersection(box, stored)
            if shared is not None:
                tensor[relative_slices(shared, box)] = read()[relative_slices(shared, stored)]
        return tensor

    def close(self) -> None:
        """Close the files; tensors already read stay valid."""
        self._pickled.clear()


def _read_state_dicts(path: Path) -> Iterator[tuple[str, _PickledTensor]]:
    """Yield the tensors of ``torch.save`` state dicts, mapped into memory."""
    seen: set[str] = set()
    for file in _weight_files(path):
        try:
            data = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise ConvertError(path, [f"{file.name}: {_first_line(error)}"]) from None
        for name, tensor in _flatten(data):
            if name in seen:
                raise ConvertError(path, [f"{name} is in two files, one of them {file.name}"])
            seen.add(name)
            info = _tensor_info(file.name, tensor.dtype, tuple(tensor.shape))
            box = tuple((0, size) for size in tensor.shape)
            yield name, _PickledTensor(info, [(box, partial(Tensor.detach, tensor))])


def _read_dcp(folder: Path) -> dict[str, _PickledTensor]:
    """Return the tensors of a DCP folder, which stores each box separately.

    Raises:
        ConvertError: if the metadata has an unknown structure or refers to missing data.
    """
    metadata = _read_metadata(folder / METADATA)
    problems = list[str]()
    found: dict[str, _PickledTensor] = {}
    try:
        locations = {}
        for index, info in metadata.storage_data.items():
            offset = getattr(index, "offset", None) or ()
            locations[index.fqn, tuple(offset)] = info
        for name, entry in metadata.state_dict_metadata.items():
            if "chunks" not in vars(entry):
                continue  # not a tensor
            shape = tuple(entry.size)
            dtype = entry.properties.state[0]
            parts = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            numbers = [n for offsets, sizes in parts for n in (*offsets, *sizes)]
            if min(numbers, default=0) < 0 or not tiles(shape, parts):
                problems.append(f"{name}: its parts do not cover its shape {list(shape)} once")
                continue
            boxes = []
            for offsets, sizes in parts:
                location = locations[name, offsets]
                problems += _location_problems(folder, name, location)
                dims = zip(offsets, sizes, strict=True)
                box = tuple((offset, offset + size) for offset, size in dims)
                read = partial(_read_box, folder, name, location, sizes, dtype)
                boxes.append((box, read))
            found[name] = _PickledTensor(_tensor_info(METADATA, dtype, shape), boxes)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise ConvertError(folder, [f"{METADATA} has an unknown structure: {error!r}"]) from None
    if problems:
        raise ConvertError(folder, problems)
    return found


def _location_problems(folder: Path, name: str, info: Any) -> Iterator[str]:
    """Yield the problems of a box's location as the metadata has it."""
    file = str(info.relative_path)
    start = int(info.offset)
    size = int(info.length)
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
    """Read one stored box, and check its shape and dtype against the metadata."""
    path = folder / str(info.relative_path)
    with path.open("rb") as file:
        file.seek(int(info.offset))
        raw = file.read(int(info.length))
    try:
        part = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConvertError(folder, [f"{name} in {path.name}: {_first_line(error)}"]) from None
    if not isinstance(part, Tensor) or tuple(part.shape) != shape or part.dtype != dtype:
        expected = f"the {dtype} tensor {list(shape)} that {METADATA} describes"
        raise ConvertError(folder, [f"{name} in {path.name} is not {expected}"])
    return part


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that allows only classes that describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not on the allow-list")
        return ALLOWED[module, name]


def _read_metadata(path: Path) -> Any:
    """Read the metadata of a DCP folder.

    Raises:
        ConvertError: if it is too large, damaged, or has a name that is not on the allow-list.
    """
    _require_regular(path, path)
    size = path.stat().st_size
    if size > METADATA_LIMIT:
        raise ConvertError(path, [f"has {size} bytes, more than the limit of {METADATA_LIMIT}"])
    try:
        return _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise ConvertError(path, [f"{type(error).__name__}: {error}"]) from None


def _weight_files(path: Path) -> list[Path]:
    """Return the weight files at a path."""
    if path.exists() and not path.is_dir():
        _require_regular(path, path)
        return [path]
    for pattern in PATTERNS:
        if found := sorted(path.glob(pattern)):
            for file in found:
                _require_regular(path, file)
            return found
    missing = f"has no {METADATA} and no {' or '.join(PATTERNS)}"
    raise ConvertError(path, [missing if path.is_dir() else "does not exist"])


def _require_regular(path: Path, file: Path) -> None:
    """Raise ``ConvertError`` for ``path`` if ``file``, in it or the same, is not a regular file."""
    if (what := irregularity(file)) is not None:
        raise ConvertError(path, [f"{file.name} {what}"])


def _flatten(data: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries, with keys joined by dots."""
    if isinstance(data, Tensor):
        yield prefix.removesuffix("."), data
    elif isinstance(data, Mapping) and depth < MAX_DEPTH:
        for key, value in data.items():
            yield from _flatten(value, f"{prefix}{key}.", depth + 1)


def _tensor_info(file: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(file, DTYPE_NAMES.get(dtype, str(dtype)), shape)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
