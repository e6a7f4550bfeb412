"""Export to a Hugging Face folder, with one tensor in memory at a time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moefold.checkpoint.disk import DISK
from moefold.checkpoint.manifest import CHUNK_BYTES
from moefold.checkpoint.tensors import LazyTensor, NamedSlice, TensorSlice, pack, write_shard
from moefold.convert.plan import Dtype, ExportTensor, contract, meta_state_dict
from moefold.convert.source import INDEX, ConvertError
from moefold.data.folder.files import GENERATION_CONFIG, read_sidecars
from moefold.data.folder.tokens import assemble
from moefold.data.tokenizer import Tokenizer
from moefold.files import draft_folder, write_json
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
    more_files: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a folder that ``transformers`` loads; return notes on what it cannot represent.

    Args:
        decoder: the model's description.
        tensors: exactly the decoder's tensors; each is read once per file that needs it.
        folder: a new or empty folder.
        tokenizer: also written to the folder.
        dtype: dtype of the weights; the selection bias stays fp32, as in transformers.
        layout: one tensor per expert, which most programs read, or all experts in one tensor.
        special_tokens: ``eos_token_id`` and similar; by default those of the tokenizer's files.
        more_files: further files, texts by name, such as a model card.
        shard_bytes: most bytes of data in one file.

    Raises:
        ConvertError: if the folder is not empty, or tensors are missing, unexpected, or of another
            shape.
        ValueError: if no known family has this decoder.
    """
    folder = Path(folder)
    require_new_folder(folder)
    family = family_of(decoder)
    reader = _ExportReader(folder, tensors, meta_state_dict(decoder))
    slices: dict[str, TensorSlice] = {}
    for entry in contract(decoder, dtype, layout, exact="selection_bias"):
        assert entry.name not in slices, entry.name
        lazy = LazyTensor(entry.dtype, entry.shape, partial(reader.read, entry))
        slices[entry.name] = TensorSlice.of_full_tensor(lazy)
    files = pack(list(slices.items()), shard_bytes)
    with staging_folder(folder) as staged:
        config: dict[str, Any] = {**family.to_hf(decoder), "torch_dtype": dtype}
        tokens = {k: v for k, v in (special_tokens or {}).items() if k in SPECIAL}
        if tokenizer is not None:
            (staged / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
            longest = decoder.context or config.get("max_position_embeddings")
            tokens = tokenizer.files.write(staged, tokenizer.end_id, longest) | tokens
        elif tokens:
            write_json(staged / GENERATION_CONFIG, tokens)
        write_json(staged / "config.json", config | tokens)
        write_texts(staged, more_files or {})
        _write_weights(staged, files)
        notes = export_notes(decoder)
        if tokenizer is not None:
            notes += _tokenizer_notes(staged, tokenizer)
    return notes


def _tokenizer_notes(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Return a note if ``transformers`` makes another tokenizer of a written folder."""
    read = assemble(json.loads(tokenizer.text), read_sidecars(folder), str(folder))
    if not read.changed:
        return []
    return [
        "AutoTokenizer of transformers 5 makes another tokenizer of this folder than the run had: "
        + "; ".join(read.notes)
        + ". Load it there with PreTrainedTokenizerFast.from_pretrained"
    ]


def write_texts(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts to files of a folder, by name."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def require_new_folder(folder: Path) -> None:
    """Raise ``ConvertError`` if an output folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConvertError(folder, ["already exists; name a new or empty folder"])


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``folder`` if no exception is raised."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(folder.parent, f"{folder.name}.tmp-") as staged:
        yield staged
        if folder.exists():
            folder.rmdir()
        staged.rename(folder)


def _write_weights(folder: Path, files: Sequence[Sequence[NamedSlice]]) -> None:
    """Write safetensors files under their usual names, with an index if there are several."""
    names = ["model.safetensors"]
    number = len(files)
    if number > 1:
        names = [f"model-{n:05d}-of-{number:05d}.safetensors" for n in range(1, number + 1)]
    for name, tensors in zip(names, files, strict=True):
        write_shard(DISK, folder / name, tensors, CHUNK_BYTES, 0)
    if len(files) > 1:
        weight_map = {name: n for n, file in zip(names, files, strict=True) for name, _ in file}
        total = sum(part.num_bytes for file in files for _, part in file)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)


class _ExportReader:
    """Slices exported tensors out of the model's; caches the last, as its parts are consecutive.

    Raises:
        ConvertError: unless the tensors are exactly the decoder's; shapes are checked when read.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._cached: tuple[str, Tensor] | None = None
        names = set(tensors)  # `in` on the mapping itself may read a tensor
        problems = [f"tensor {n} is missing" for n in expected if n not in names]
        problems += [f"tensor {n} is not part of the model" for n in tensors if n not in expected]
        if problems:
            raise ConvertError(folder, problems)

    def read(self, entry: ExportTensor) -> Tensor:
        """Return an exported tensor, from parts of one or more of the model's tensors."""
        stored = None
        for part in (entry, *entry.others):
            if self._cached is None or self._cached[0] != part.param:
                self._cached = None  # freed before the next is read
                tensor = self._tensors[part.param].detach().cpu()
                if tensor.shape != part.full_shape:
                    shapes = f"{list(tensor.shape)}, expected {list(part.full_shape)}"
                    raise ConvertError(self._folder, [f"{part.param} has shape {shapes}"])
                self._cached = (part.param, tensor)
            stored = part.to_hf(self._cached[1][part.index], stored)
        assert stored is not None
        return stored.to(entry.dtype)
