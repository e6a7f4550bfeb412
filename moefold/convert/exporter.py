"""From our tensors to a Hugging Face folder, one tensor in memory at a time."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moefold.convert.errors import ConvertError
from moefold.convert.shards import Slot, file_names, group, write_file, write_index
from moefold.convert.targets import Target, targets
from moefold.convert.tokenizer import TokenizerFiles, write_tokenizer
from moefold.model.config import Decoder
from moefold.model.families.hub import SPECIAL, left_out
from moefold.model.families.names import Layout, Piece, find, pieces
from moefold.model.families.registry import family_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Dtype = Literal["float32", "bfloat16", "float16"]
SHARD_BYTES = 4 * 10**9


@dataclass(frozen=True)
class _Part:
    """Where one tensor on disk comes from."""

    ours: str
    piece: Piece


def export_folder(
    decoder: Decoder,
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    tokenizer: TokenizerFiles | None = None,
    dtype: Dtype = "float32",
    layout: Layout = "per_expert",
    *,
    special_tokens: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a folder that ``transformers`` loads; return notes on what it cannot hold.

    Args:
        decoder: the description.
        tensors: exactly the decoder's tensors; each is asked for once per file that needs it.
        folder: a new or empty folder.
        tokenizer: written beside the weights.
        dtype: type of the weights; the selection bias stays fp32, as transformers keeps it.
        layout: experts each on their own, which most programs read, or all in one tensor.
        special_tokens: ``eos_token_id`` and its like; the tokenizer's where left out.
        shard_bytes: most bytes of data in one file.

    Raises:
        ConvertError: where the folder is not empty, or tensors are missing, unexpected, of
            another shape, or do not fit the type.
        ValueError: where no known family has this decoder.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConvertError(folder, ["is there already; name a new folder"])
    family = family_of(decoder)
    wanted = targets(decoder)
    _check(folder, wanted, tensors)
    parts, slots = _layout(find(family.tensors, wanted), wanted, dtype, layout)
    files = group(slots, shard_bytes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    staged.mkdir()
    try:
        config = family.to_hf(decoder) | {"torch_dtype": dtype}
        tokens = {} if tokenizer is None else write_tokenizer(staged, tokenizer, decoder.context)
        tokens |= {k: v for k, v in (special_tokens or {}).items() if k in SPECIAL}
        _write_json(staged / "config.json", config | tokens)
        if tokens:
            _write_json(staged / "generation_config.json", tokens)
        names, reader = file_names(len(files)), _Reader(folder, tensors, parts, wanted)
        for name, held in zip(names, files, strict=True):
            write_file(staged / name, held, reader)
        if len(files) > 1:
            write_index(staged, names, files)
        if folder.exists():
            folder.rmdir()
        staged.rename(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return left_out(decoder)


def _check(folder: Path, wanted: Mapping[str, Target], tensors: Mapping[str, Tensor]) -> None:
    """Refuse unless the tensors are exactly the decoder's; their shapes are checked when read."""
    names = set(tensors)  # `in` on the mapping itself may read a tensor
    problems = [f"tensor {n} is missing" for n in wanted if n not in names]
    problems += [f"tensor {n} is not the decoder's" for n in tensors if n not in wanted]
    if problems:
        raise ConvertError(folder, problems)


def _layout(
    found: Mapping[str, tuple[Any, int]],
    wanted: Mapping[str, Target],
    dtype: Dtype,
    layout: Layout,
) -> tuple[dict[str, _Part], list[Slot]]:
    """Return where each tensor on disk comes from, and all of them in order."""
    parts: dict[str, _Part] = {}
    slots: list[Slot] = []
    for name, (row, layer) in found.items():
        exact = name.endswith("selection_bias")
        for piece in pieces(row, layer, wanted[name].shape, layout):
            assert piece.name not in parts, piece.name
            parts[piece.name] = _Part(name, piece)
            slots.append(Slot(piece.name, piece.shape, torch.float32 if exact else DTYPES[dtype]))
    return parts, slots


class _Reader:
    """Cuts tensors on disk out of ours; keeps the one in use, as its parts follow each other."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        parts: Mapping[str, _Part],
        wanted: Mapping[str, Target],
    ) -> None:
        self._folder, self._tensors, self._parts = folder, tensors, parts
        self._wanted = wanted
        self._held: tuple[str, Tensor] | None = None

    def __call__(self, slot: Slot) -> Tensor:
        part = self._parts[slot.name]
        if self._held is None or self._held[0] != part.ours:
            self._held = None  # let go before the next is read
            self._held = (part.ours, self._take(part.ours))
        cut = self._held[1][part.piece.index]
        made = cut.reshape(slot.shape).to(slot.dtype)
        if slot.dtype == torch.float16 and bool((made.isinf() & ~cut.isinf().view_as(made)).any()):
            raise ConvertError(self._folder, [f"{part.ours} exceeds float16; use bfloat16"])
        return made

    def _take(self, name: str) -> Tensor:
        tensor, expected = self._tensors[name].detach().cpu(), self._wanted[name].shape
        if tuple(tensor.shape) != expected:
            found = f"{name} has shape {list(tensor.shape)}, expected {list(expected)}"
            raise ConvertError(self._folder, [found])
        return tensor


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
