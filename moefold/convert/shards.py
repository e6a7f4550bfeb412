"""Writing safetensors files one tensor at a time, so that a shard is never in memory whole."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types that are written, by the format's names."""


@dataclass(frozen=True)
class Slot:
    """One tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def group(slots: Iterable[Slot], shard_bytes: int) -> list[list[Slot]]:
    """Put tensors, in their order, into files of at most ``shard_bytes`` of data each.

    A tensor that is larger has a file of its own.
    """
    files: list[list[Slot]] = []
    filled = 0
    for slot in slots:
        if not files or (filled and filled + slot.size > shard_bytes):
            files.append([])
            filled = 0
        files[-1].append(slot)
        filled += slot.size
    return files


def file_names(count: int) -> list[str]:
    """Return the names that a folder's weight files have by convention."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]


def write_index(folder: Path, names: list[str], files: list[list[Slot]]) -> None:
    """Write which file holds which tensor, and the size of them all."""
    weight_map = {s.name: n for n, slots in zip(names, files, strict=True) for s in slots}
    total = sum(s.size for slots in files for s in slots)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, slots: list[Slot], read: Callable[[Slot], Tensor]) -> None:
    """Write one file; ``read`` is asked for each tensor in turn and the tensor is then let go.

    The layout is the safetensors format's: header length, JSON header, data without gaps.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for slot in slots:
        offsets = [end, end + slot.size]
        header[slot.name] = {
            "dtype": NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": offsets,
        }
        end += slot.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for slot in slots:
            tensor = read(slot)
            assert tuple(tensor.shape) == slot.shape and tensor.dtype == slot.dtype, slot
            if slot.size:
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
