"""Pickled weights of other programs as a source of tensors, read behind allow-lists.

State dicts of ``torch.save`` go through torch's own unpickler, which makes tensors and plain data
and nothing else. Folders of ``torch.distributed.checkpoint`` have a pickle of their own, which
that library reads without a list: here ``_Careful`` reads it, which knows the names of the few
classes that describe tensors and makes plain fields of them. Any other name is refused.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.manifest import tiles
from moefold.convert.errors import ConvertError
from moefold.convert.source import DTYPES, Stored
from moefold.layers.placement import Box, inside, shared_box

METADATA = ".metadata"
METADATA_LIMIT = 256 * 2**20
PARTS = ("pytorch_model*.bin", "*.pt", "*.pth")
"""Files in a folder that hold weights; the first kind that is there."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
DEPTH = 4
"""Dictionaries in each other; optimizers' states lie no deeper, and a cycle ends here."""


class _Plain:
    """What stands for an object of a known class: its fields, and nothing that it could do."""

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
    **{(module, name): _Plain for module, names in _DESCRIBING.items() for name in names},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES},
    ("torch", "Size"): tuple,
}
"""What a folder's metadata may name, and what is made of it."""


def open_foreign(path: Path, anchor: str) -> "Foreign":
    """Open what ``torch.save`` or ``torch.distributed.checkpoint`` wrote: a file or a folder.

    Args:
        path: a state dict, a folder of them, or a folder with ``.metadata``.
        anchor: the name of a tensor that must be there. What other names have in front of it, such
            as ``module.``, all that belong to the model have, and it is left off.

    Raises:
        ConvertError: where there is none, it holds more than tensors and plain data, or it has no
            such tensor, or several.
    """
    if (path / METADATA).is_file():
        return Foreign(path, _Distributed(path), anchor)
    return Foreign(path, _Saved(path), anchor)


class Foreign:
    """The tensors of a foreign checkpoint under the model's names; see ``source.Weights``."""

    def __init__(self, path: Path, held: "_Saved | _Distributed", anchor: str) -> None:
        self.folder, self._held = path, held
        ends = [name for name in held.tensors if name == anchor or name.endswith("." + anchor)]
        if len(ends) != 1:
            known = ", ".join(list(held.tensors)[:3]) or "none"
            what = f"{len(ends)} tensors are named {anchor}, with or without a prefix"
            raise ConvertError(path, [f"{what}; one is needed. It holds {known}, …"])
        self._prefix = ends[0].removesuffix(anchor)
        self.tensors: dict[str, Stored] = {
            name.removeprefix(self._prefix): stored
            for name, stored in held.tensors.items()
            if name.startswith(self._prefix)
        }
        """Every tensor of the model, by name."""
        left = len(held.tensors) - len(self.tensors)
        self.notes = [f"{left} tensors are not under {self._prefix!r} and left out"] * bool(left)

    def read(self, name: str) -> Tensor:
        """Return one tensor as it is stored, on the host."""
        return self.read_box(name, tuple((0, size) for size in self.tensors[name].shape))

    def read_box(self, name: str, box: Box) -> Tensor:
        """Return a box of one tensor as it is stored."""
        return self._held.read_box(self._prefix + name, box)

    def close(self) -> None:
        """Let go of the files; tensors already read stay."""
        self._held.close()


class _Saved:
    """State dicts of ``torch.save``, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, Stored] = {}
        self._values: dict[str, Tensor] = {}
        for file in _files(path):
            try:
                found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:
                what = f"{file.name}: {_first_line(error)}"
                raise ConvertError(path, [what]) from None
            for name, tensor in _flat(found):
                if name in self._values:
                    raise ConvertError(path, [f"{name} lies in two files, one is {file.name}"])
                self._values[name] = tensor
                self.tensors[name] = _stored(file.name, tensor.dtype, tuple(tensor.shape))

    def read_box(self, name: str, box: Box) -> Tensor:
        return self._values[name][tuple(slice(*side) for side in box)].clone()

    def close(self) -> None:
        self._values.clear()


class _Distributed:
    """A folder of ``torch.distributed.checkpoint``: boxes of tensors, each saved by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tensors: dict[str, Stored] = {}
        self._boxes: dict[str, list[tuple[Box, Path, int, int]]] = {}
        said = _metadata(folder / METADATA)
        try:
            problems = list(self._read(said))
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise ConvertError(folder, [f"{METADATA} is not as expected: {error!r}"]) from None
        if problems:
            raise ConvertError(folder, problems)

    def _read(self, said: Any) -> Iterator[str]:
        """Note every tensor's boxes; yield what is wrong."""
        places = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): info
            for index, info in said.storage_data.items()
        }
        for name, held in said.state_dict_metadata.items():
            if "chunks" not in vars(held):
                continue  # no tensor
            shape = tuple(held.size)
            parts = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in held.chunks]
            numbers = [n for at, sizes in parts for n in (*at, *sizes)]
            if min(numbers, default=0) < 0 or not tiles(shape, parts):
                yield f"{name}: its boxes do not make up its shape {list(shape)}"
                continue
            self._boxes[name] = []
            for at, sizes in parts:
                info = places[name, at]
                box = tuple((a, a + n) for a, n in zip(at, sizes, strict=True))
                self._boxes[name].append((box, *self._place(info)))
                yield from self._misplaced(name, info)
            self.tensors[name] = _stored(METADATA, held.properties.state[0], shape)

    def _place(self, info: Any) -> tuple[Path, int, int]:
        """Return where a box lies: a file, its first byte there and their number."""
        return self._folder / str(info.relative_path), int(info.offset), int(info.length)

    def _misplaced(self, name: str, info: Any) -> Iterator[str]:
        """Yield what is wrong with where a box is said to lie."""
        path, start, size = self._place(info)
        file = str(info.relative_path)
        if file != path.name or "\0" in file or not path.is_file():
            yield f"{name}: {file[:80]!r} is no file in the folder"
        elif not 0 <= start <= start + size <= path.stat().st_size:
            yield f"{name}: {file} has no bytes {start} to {start + size}"
        if getattr(info, "transform_descriptors", None):
            yield f"{name}: {file} is compressed, which is not supported"

    def read_box(self, name: str, box: Box) -> Tensor:
        stored = self.tensors[name]
        wanted = torch.empty([end - start for start, end in box], dtype=DTYPES[stored.dtype])
        for held, path, start, size in self._boxes[name]:
            shared = shared_box(box, held)
            if shared is not None:
                part = self._part(name, held, path, start, size)
                wanted[inside(shared, box)] = part[inside(shared, held)]
        return wanted

    def _part(self, name: str, box: Box, path: Path, start: int, size: int) -> Tensor:
        with path.open("rb") as file:
            file.seek(start)
            raw = file.read(size)
        try:
            part = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except Exception as error:
            what = f"{name} in {path.name}: {_first_line(error)}"
            raise ConvertError(self._folder, [what]) from None
        shape, dtype = [end - at for at, end in box], DTYPES[self.tensors[name].dtype]
        if not isinstance(part, Tensor) or list(part.shape) != shape or part.dtype != dtype:
            what = f"{name} in {path.name} is not the {dtype} tensor {shape} that {METADATA} names"
            raise ConvertError(self._folder, [what])
        return part

    def close(self) -> None:
        self._boxes.clear()


class _Careful(pickle.Unpickler):
    """An unpickler that finds nothing but what describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"names {module}.{name}, which is not on the allow-list")
        return ALLOWED[module, name]


def _metadata(path: Path) -> Any:
    """Read the metadata of a folder.

    Raises:
        ConvertError: where it is too large, damaged, or names what is not on the allow-list.
    """
    size = path.stat().st_size
    if size > METADATA_LIMIT:
        raise ConvertError(path, [f"has {size} bytes, more than the limit of {METADATA_LIMIT}"])
    try:
        return _Careful(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise ConvertError(path, [f"{type(error).__name__}: {error}"]) from None


def _files(path: Path) -> list[Path]:
    """Return the files of weights at a path."""
    if path.is_file():
        return [path]
    for pattern in PARTS:
        if found := sorted(path.glob(pattern)):
            return found
    what = f"has neither {METADATA} nor {' nor '.join(PARTS)}" if path.is_dir() else "is not there"
    raise ConvertError(path, [what])


def _flat(found: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries, their keys joined with dots."""
    if isinstance(found, Tensor):
        yield prefix.removesuffix("."), found
    elif isinstance(found, Mapping) and depth < DEPTH:
        for key, value in found.items():
            yield from _flat(value, f"{prefix}{key}.", depth + 1)


def _stored(file: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Stored:
    return Stored(file, NAMES.get(dtype, str(dtype)), shape)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
