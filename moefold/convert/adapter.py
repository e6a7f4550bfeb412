"""Reads and writes adapters in PEFT's format, with the identity of their base model.

E experts, r rank. A of experts is ``[E, r, in]`` in the model and ``[E * r, in]`` in PEFT; B is
``[E, out, r]`` in the model (gate above up) and ``[out, r * E]`` in PEFT, experts fastest.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moefold.checkpoint.disk import DISK
from moefold.checkpoint.manifest import CHUNK_BYTES
from moefold.checkpoint.tensors import LazyTensor, TensorSlice, write_shard
from moefold.convert.exporter import require_new_folder, staging_folder, write_texts
from moefold.convert.plan import WEIGHT_DTYPES, Dtype
from moefold.convert.source import ConvertError, nonfinite
from moefold.data.tokenizer import Tokenizer
from moefold.files import write_json
from moefold.layers.placement import Box
from moefold.model.config import Decoder, LowRank
from moefold.model.families.peft import (
    CONFIG,
    IDENTITY,
    ORIENTED_RELEASE,
    TENSORS,
    AdapterSite,
    a_is_first,
    peft_config,
    sites_by_prefix,
)
from moefold.model.families.peft_reading import PeftFolder, StoredAdapter
from moefold.model.families.registry import family_of
from moefold.spec.decoder import LORA_A, LORA_B

IDENTITY_ROWS = 8
"""Rows of each matrix in the digest that identifies a base model."""
ReadBox = Callable[[str, Box], Tensor]
"""``read_box(name, box)`` reads a box of a tensor."""


def identity(shapes: Mapping[str, tuple[int, ...]], read_box: ReadBox) -> str:
    """Return a digest of some rows from the middle of each matrix, which identifies a base model.

    Rows are rounded to bf16, so that the digest does not depend on the stored dtype.
    """
    digest = sha256()
    for name, shape in sorted(shapes.items()):
        if len(shape) > 1:
            *lead, rows, columns = shape
            first = max(0, (rows - IDENTITY_ROWS) // 2)
            middle = (first, min(rows, first + IDENTITY_ROWS))
            box = (*((0, size) for size in lead), middle, (0, columns))
            values = read_box(name, box).to(torch.bfloat16).contiguous().view(torch.uint8)
            digest.update(f"{name} {list(shape)}\0".encode())
            digest.update(values.numpy().data)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------- writing


def write_adapter(
    decoder: Decoder,
    adapters: Mapping[str, LowRank],
    tensors: Mapping[str, Tensor],
    folder: Path,
    base: tuple[str, str],
    tokenizer: Tokenizer | None = None,
    dtype: Dtype = "float32",
    more_files: Mapping[str, str] | None = None,
) -> None:
    """Write a folder that PEFT loads onto the base model, with its tokenizer and chat template.

    Args:
        decoder: the base model.
        adapters: adapters by weight name.
        tensors: A and B, under the weight's name with a suffix.
        folder: a new or empty folder.
        base: folder and identity of the base model.
        tokenizer: also written to the folder.
        dtype: dtype of A and B on disk.
        more_files: further files, texts by name, such as a model card.

    Raises:
        ConvertError: if the folder is not empty.
        ValueError: if PEFT cannot represent an adapter.
    """
    require_new_folder(folder)
    config, sites = peft_config(decoder, adapters, base[0])
    named: list[tuple[str, TensorSlice]] = []
    first = a_is_first(ORIENTED_RELEASE, family_of(decoder).model_type)
    for prefix, (site,) in sites_by_prefix(sites).items():
        rank = adapters[site.weight.name].rank * site.experts
        exchanged = site.experts > 1 and first == (not site.perm)
        into, out = (site.outputs, site.inputs) if exchanged else (site.inputs, site.outputs)
        for end, shape in ((LORA_A, (rank, into)), (LORA_B, (out, rank))):
            read = partial(_to_peft, tensors, site, end, exchanged, WEIGHT_DTYPES[dtype])
            name = f"{prefix}.lora_{'A' if end == LORA_A else 'B'}.weight"
            named.append(
                (name, TensorSlice.of_full_tensor(LazyTensor(WEIGHT_DTYPES[dtype], shape, read)))
            )
    with staging_folder(folder) as staged:
        if tokenizer is not None:
            (staged / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
            tokenizer.files.write(staged, tokenizer.end_id, decoder.context)
        write_texts(staged, more_files or {})
        write_json(staged / CONFIG, config)
        metadata = {IDENTITY: base[1]}
        write_shard(DISK, staged / TENSORS, sorted(named), CHUNK_BYTES, 0, **metadata)


def _to_peft(
    tensors: Mapping[str, Tensor],
    site: AdapterSite,
    end: str,
    exchanged: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return A or B of a site as PEFT stores it, ``exchanged`` if of the transposed matrix."""
    is_a = (end == LORA_A) != exchanged
    tensor = tensors[site.weight.name + (LORA_A if is_a else LORA_B)].detach().cpu()
    if not site.weight.is_expert:
        tensor = tensor[site.index]
    else:
        # Both [E, r, n], where n is inputs or outputs.
        each = tensor if is_a else _outputs_as_stored(tensor, site)
        tensor = each.flatten(0, 1) if end == LORA_A else each.permute(2, 1, 0).flatten(1)
    return tensor.to(dtype).contiguous()


def _outputs_as_stored(b: Tensor, site: AdapterSite) -> Tensor:
    """Return B [E, ..., r] of experts as [E, r, out], with outputs in the order on disk."""
    rank = b.shape[-1]
    if site.perm:
        return site.piece(rank).to_hf(b)
    return b.reshape(len(b), -1, rank).transpose(1, 2)


# ------------------------------------------------------------------------------------- reading


class AdapterTensors(Mapping[str, Tensor]):
    """A and B of an adapter's folder, by the model's names; each is read on access."""

    def __init__(self, peft: PeftFolder) -> None:
        self.peft = peft
        try:
            self._opened = safe_open(peft.path / TENSORS, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConvertError(peft.path / TENSORS, [f"{error}; copy it again"]) from None
        self._file = self._opened.__enter__()

    def __iter__(self) -> Iterator[str]:
        return (name + end for name in self.peft.adapters for end in (LORA_A, LORA_B))

    def __len__(self) -> int:
        return 2 * len(self.peft.adapters)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name[: -len(LORA_A)] in self.peft.adapters

    def __getitem__(self, name: str) -> Tensor:
        """Read A or B in fp32.

        Raises:
            ConvertError: if it contains NaN or an infinity.
        """
        weight = name[: -len(LORA_A)]
        end = name[-len(LORA_A) :]
        parts = self.peft.stored[weight]
        low_rank = self.peft.adapters[weight]
        tensor = torch.zeros(_shape_of(parts[0].site.weight.shape, low_rank.rank, end, parts[0]))
        for part in parts:
            values = self._from_peft(part, end)
            if (what := nonfinite(values)) is not None:
                stored = part.a if end == LORA_A else part.b
                file = self.peft.path / TENSORS
                raise ConvertError(file, [f"{stored} contains {what}; write or copy it again"])
            if end == LORA_B and part.scale != low_rank.scale:
                values = values * (part.scale / low_rank.scale)
            columns = slice(part.start, part.start + part.rank)
            if end == LORA_A:
                index = part.site.index[:1] if part.site.weight.is_expert else part.site.index
                tensor[index][..., columns, :] = values
            else:
                tensor[part.site.index][..., columns] = values
        return tensor

    def _from_peft(self, stored: StoredAdapter, end: str) -> Tensor:
        """Return A or B of one site in the model's layout."""
        site = stored.site
        rank = stored.rank
        is_a = end == LORA_A
        try:
            reads_a = is_a != stored.exchanged
            raw = self._file.get_tensor(stored.a if reads_a else stored.b).float()
        except SafetensorError as error:
            raise ConvertError(self.peft.path / TENSORS, [str(error)]) from None
        if site.experts > 1:
            # Both [E, r, n], where n is inputs or outputs.
            parts = (site.experts, rank) if reads_a else (rank, site.experts)
            each = raw.unflatten(0, parts) if reads_a else raw.unflatten(1, parts).permute(2, 1, 0)
        else:
            each = (raw if is_a else raw.T)[None]
        if is_a:
            return each if site.experts > 1 else each[0]
        shape = (*site.weight.shape[len(site.index) : -1], rank)
        if site.perm:
            whole = shape if not site.index else (1, *shape)
            return site.piece(rank).from_hf(each, whole).reshape(shape)
        if site.rows is not None:
            return site.piece(rank).from_hf(each[0].T, shape)
        return each.transpose(1, 2).reshape(shape)

    def close(self) -> None:
        """Close the file."""
        self._opened.__exit__(None, None, None)


def _shape_of(shape: tuple[int, ...], rank: int, end: str, part: StoredAdapter) -> tuple[int, ...]:
    """Return the shape of A or B of a weight; gate and up of an expert share A."""
    if end == LORA_B:
        return (*shape[:-1], rank)
    lead = shape[:1] if part.site.weight.is_expert else shape[:-2]
    return (*lead, rank, shape[-1])
