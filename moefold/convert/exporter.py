"""Export to a Hugging Face folder, with one tensor in memory at a time."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moefold.checkpoint.disk import DISK
from moefold.checkpoint.manifest import CHUNK_BYTES
from moefold.checkpoint.tensors import LazyTensor, Named, TensorSlice, pack, write_shard
from moefold.convert.plan import Dtype, Sent, contract, targets
from moefold.convert.source import INDEX, ConvertError
from moefold.data.config import GENERATION_CONFIG
from moefold.data.tokenizer import Tokenizer
from moefold.files import write_json
from moefold.model.config import Decoder
from moefold.model.families.hub import SPECIAL, export_notes
from moefold.model.families.names import Layout
from moefold.model.families.registry import family_of

SHARD_BYTES = 4 * 10**9


def export_folder(
    decoder: Decoder,
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    dtype: Dtype = "float32",
    layout: Layout = "per_expert",
    *,
    special_tokens: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a folder that ``transformers`` loads; return notes on what it cannot represent.

    Args:
        decoder: the description.
        tensors: exactly the decoder's tensors; each is read once per file that needs it.
        folder: a new or empty folder.
        tokenizer: written into the folder too.
        dtype: dtype of the weights; the selection bias stays fp32, as in transformers.
        layout: one tensor per expert, which most programs read, or all experts in one tensor.
        special_tokens: ``eos_token_id`` and similar; by default those of the tokenizer's files.
        shard_bytes: most bytes of data in one file.

    Raises:
        ConvertError: if the folder is not empty, or tensors are missing, unexpected, or of another
            shape.
        ValueError: if no known family has this decoder.
    """
    folder = Path(folder)
    demand_new(folder)
    family = family_of(decoder)
    wanted = targets(decoder)
    reader = _Reader(folder, tensors, wanted)
    named: dict[str, TensorSlice] = {}
    for sent in contract(decoder, dtype, layout, exact="selection_bias"):
        assert sent.name not in named, sent.name
        lazy = LazyTensor(sent.dtype, sent.shape, partial(reader.read, sent))
        named[sent.name] = TensorSlice.whole(lazy)
    files = pack(list(named.items()), shard_bytes)
    with staged_for(folder) as staged:
        config = family.to_hf(decoder) | {"torch_dtype": dtype}
        tokens = {k: v for k, v in (special_tokens or {}).items() if k in SPECIAL}
        if tokenizer is not None:
            (staged / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
            tokens = tokenizer.files.write(staged, tokenizer.end_id, decoder.context) | tokens
        elif tokens:
            write_json(staged / GENERATION_CONFIG, tokens)
        write_json(staged / "config.json", config | tokens)
        _write_weights(staged, files)
    return export_notes(decoder)


def demand_new(folder: Path) -> None:
    """Raise ``ConvertError`` if a folder to write exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConvertError(folder, ["already exists; name a new or empty folder"])


@contextmanager
def staged_for(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``folder`` if the context succeeds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    staged.mkdir()
    try:
        yield staged
        if folder.exists():
            folder.rmdir()
        staged.rename(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _write_weights(folder: Path, files: Sequence[Sequence[Named]]) -> None:
    """Write the safetensors files under their usual names, with an index if there are several."""
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    for name, held in zip(names, files, strict=True):
        write_shard(DISK, folder / name, held, CHUNK_BYTES, 0)
    if len(files) > 1:
        where = {tensor: n for n, held in zip(names, files, strict=True) for tensor, _ in held}
        total = sum(part.size for held in files for _, part in held)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_json(folder / INDEX, index)


class _Reader:
    """Cuts tensors on disk out of the model's; caches the last one, whose parts are consecutive.

    Raises:
        ConvertError: unless the tensors are exactly the decoder's; shapes are checked when read.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
    ) -> None:
        self._folder, self._tensors = folder, tensors
        self._held: tuple[str, Tensor] | None = None
        names = set(tensors)  # `in` on the mapping itself may read a tensor
        problems = [f"tensor {n} is missing" for n in wanted if n not in names]
        problems += [f"tensor {n} is not part of the model" for n in tensors if n not in wanted]
        if problems:
            raise ConvertError(folder, problems)

    def read(self, sent: Sent) -> Tensor:
        """Return a tensor on disk, from parts of one or more of the model's tensors."""
        made = None
        for one in (sent, *sent.others):
            if self._held is None or self._held[0] != one.ours:
                self._held = None  # freed before the next is read
                tensor = self._tensors[one.ours].detach().cpu()
                if tensor.shape != one.whole:
                    shapes = f"{list(tensor.shape)}, expected {list(one.whole)}"
                    raise ConvertError(self._folder, [f"{one.ours} has shape {shapes}"])
                self._held = (one.ours, tensor)
            made = one.to_hf(self._held[1][one.index], made)
        assert made is not None
        return made.to(sent.dtype)
