"""From our tensors to a Hugging Face folder, one tensor in memory at a time."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moefold.checkpoint.disk import DISK
from moefold.checkpoint.manifest import CHUNK_BYTES
from moefold.checkpoint.tensors import LazyTensor, Named, TensorSlice, pack, write_shard
from moefold.convert.errors import ConvertError
from moefold.convert.plan import targets
from moefold.convert.source import INDEX
from moefold.convert.tokenizer import TokenizerFiles, write_tokenizer
from moefold.model.config import Decoder
from moefold.model.families.hub import SPECIAL, left_out
from moefold.model.families.names import Layout, Piece, find, pieces
from moefold.model.families.registry import family_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Dtype = Literal["float32", "bfloat16", "float16"]
SHARD_BYTES = 4 * 10**9


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
    reader = _Reader(folder, tensors, wanted)
    found = _on_disk(find(family.tensors, wanted), reader, dtype, layout)
    files = pack(found, shard_bytes)
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
        _write_weights(staged, files)
        if folder.exists():
            folder.rmdir()
        staged.rename(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return left_out(decoder)


def _check(folder: Path, wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse unless the tensors are exactly the decoder's; their shapes are checked when read."""
    names = set(tensors)  # `in` on the mapping itself may read a tensor
    problems = [f"tensor {n} is missing" for n in wanted if n not in names]
    problems += [f"tensor {n} is not the decoder's" for n in tensors if n not in wanted]
    if problems:
        raise ConvertError(folder, problems)


def _on_disk(
    found: Mapping[str, tuple[Any, int]], reader: "_Reader", dtype: Dtype, layout: Layout
) -> list[Named]:
    """Return every tensor of the folder in order, each read when it is written."""
    tensors: dict[str, TensorSlice] = {}
    for name, (row, layer) in found.items():
        exact = name.endswith("selection_bias")
        kept = torch.float32 if exact else DTYPES[dtype]
        for piece in pieces(row, layer, reader.shape(name), layout):
            assert piece.name not in tensors, piece.name
            lazy = LazyTensor(kept, piece.shape, partial(reader.read, name, piece, kept))
            tensors[piece.name] = TensorSlice.whole(lazy)
    return list(tensors.items())


def _write_weights(folder: Path, files: Sequence[Sequence[Named]]) -> None:
    """Write the safetensors files under their usual names, and an index of several."""
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    for name, held in zip(names, files, strict=True):
        write_shard(DISK, folder / name, held, CHUNK_BYTES, 0)
    if len(files) > 1:
        where = {tensor: n for n, held in zip(names, files, strict=True) for tensor, _ in held}
        total = sum(part.size for held in files for _, part in held)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        _write_json(folder / INDEX, index)


class _Reader:
    """Cuts tensors on disk out of ours; keeps the one in use, as its parts follow each other."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
    ) -> None:
        self._folder, self._tensors, self._wanted = folder, tensors, wanted
        self._held: tuple[str, Tensor] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a tensor of ours must have."""
        return self._wanted[name].shape

    def read(self, name: str, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Return the part of a tensor of ours that is one on disk, in its type there."""
        if self._held is None or self._held[0] != name:
            self._held = None  # let go before the next is read
            self._held = (name, self._take(name))
        cut = self._held[1][piece.index]
        made = cut.reshape(piece.shape).to(dtype)
        if dtype == torch.float16 and bool((made.isinf() & ~cut.isinf().view_as(made)).any()):
            raise ConvertError(self._folder, [f"{name} exceeds float16; use bfloat16"])
        return made

    def _take(self, name: str) -> Tensor:
        tensor, expected = self._tensors[name].detach().cpu(), self._wanted[name].shape
        if tuple(tensor.shape) != expected:
            found = f"{name} has shape {list(tensor.shape)}, expected {list(expected)}"
            raise ConvertError(self._folder, [found])
        return tensor


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
