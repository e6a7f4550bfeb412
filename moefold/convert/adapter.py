"""Reads and writes adapters in PEFT's format, with the identity of their base.

E experts, r rank. A of experts is ``[E, r, in]`` in the model and ``[E * r, in]`` in PEFT; B is
``[E, out, r]`` in the model (gate above up) and ``[out, r * E]`` in PEFT, experts fastest.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from moefold.checkpoint.disk import DISK
from moefold.checkpoint.manifest import CHUNK_BYTES
from moefold.checkpoint.tensors import LazyTensor, TensorSlice, write_shard
from moefold.convert.exporter import demand_new, staged_for
from moefold.convert.plan import KINDS, Dtype
from moefold.convert.source import ConvertError
from moefold.data.tokenizer import Tokenizer
from moefold.files import write_json
from moefold.layers.placement import Box
from moefold.model.config import Decoder, LowRank
from moefold.model.families.peft import (
    CONFIG,
    IDENTITY,
    TENSORS,
    AdapterSite,
    PeftFolder,
    StoredAdapter,
    peft_config,
    sites_by_prefix,
)
from moefold.spec.decoder import LORA_A, LORA_B

IDENTITY_ROWS = 8
"""Rows of each matrix in the digest that identifies a base."""
Part = Callable[[str, Box], Tensor]
"""``part(name, box)`` reads a box of a tensor."""


def identity(shapes: Mapping[str, tuple[int, ...]], part: Part) -> str:
    """Return a digest that identifies a base, of some rows from the middle of each matrix.

    Rows are rounded to bf16, so that the digest does not depend on the stored dtype.
    """
    digest = sha256()
    for name, shape in sorted(shapes.items()):
        if len(shape) > 1:
            *lead, rows, columns = shape
            first = max(0, (rows - IDENTITY_ROWS) // 2)
            cut = (first, min(rows, first + IDENTITY_ROWS))
            box = (*((0, size) for size in lead), cut, (0, columns))
            values = part(name, box).to(torch.bfloat16).contiguous().view(torch.uint8)
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
) -> None:
    """Write a folder that PEFT loads onto the base, with its tokenizer and chat template.

    Args:
        decoder: the base.
        adapters: by the names of their weights.
        tensors: A and B, named after their weights with a suffix.
        folder: a new or empty folder.
        base: the base's folder and identity.
        tokenizer: written into the folder too.
        dtype: dtype of A and B on disk.

    Raises:
        ConvertError: if the folder is not empty.
        ValueError: if PEFT cannot represent an adapter.
    """
    demand_new(folder)
    said, chosen = peft_config(decoder, adapters, base[0])
    named: list[tuple[str, TensorSlice]] = []
    for prefix, (site, _) in sites_by_prefix(chosen).items():
        rank = adapters[site.weight.name].rank * site.experts
        for end, shape in ((LORA_A, (rank, site.inputs)), (LORA_B, (site.outputs, rank))):
            read = partial(_theirs, tensors, site, end, KINDS[dtype])
            name = f"{prefix}.lora_{'A' if end == LORA_A else 'B'}.weight"
            named.append((name, TensorSlice.whole(LazyTensor(KINDS[dtype], shape, read))))
    with staged_for(folder) as staged:
        if tokenizer is not None:
            (staged / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
            tokenizer.files.write(staged, tokenizer.end_id, decoder.context)
        write_json(staged / CONFIG, said)
        metadata = {IDENTITY: base[1]}
        write_shard(DISK, staged / TENSORS, sorted(named), CHUNK_BYTES, 0, **metadata)


def _theirs(
    tensors: Mapping[str, Tensor], site: AdapterSite, end: str, dtype: torch.dtype
) -> Tensor:
    """Return A or B of a site as PEFT stores it."""
    ours = tensors[site.weight.name + end].detach().cpu()
    if not site.weight.expert:
        found = ours[site.index]
    elif end == LORA_A:
        found = ours.flatten(0, 1)
    else:
        found = ours.flatten(1, -2).permute(1, 2, 0).flatten(1)
    return found.to(dtype).contiguous()


# ------------------------------------------------------------------------------------- reading


class AdapterTensors(Mapping[str, Tensor]):
    """A and B of an adapter's folder by the model's names, each read on access."""

    def __init__(self, found: PeftFolder) -> None:
        self.found = found
        self._opened = safe_open(found.path / TENSORS, framework="pt")
        self._file = self._opened.__enter__()

    def __iter__(self) -> Iterator[str]:
        return (name + end for name in self.found.adapters for end in (LORA_A, LORA_B))

    def __len__(self) -> int:
        return 2 * len(self.found.adapters)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name[: -len(LORA_A)] in self.found.adapters

    def __getitem__(self, name: str) -> Tensor:
        """Read A or B, whole, in fp32.

        Raises:
            ConvertError: if it contains NaN.
        """
        weight, end = name[: -len(LORA_A)], name[-len(LORA_A) :]
        parts = [self._ours(stored, end) for stored in self.found.stored[weight]]
        whole = torch.stack(parts) if self.found.stored[weight][0].site.index else parts[0]
        if bool(whole.isnan().any()):
            raise ConvertError(self.found.path, [f"the adapter of {weight} contains NaN"])
        return whole

    def _ours(self, stored: StoredAdapter, end: str) -> Tensor:
        """Return A or B of one site in the model's layout."""
        site, rank = stored.site, self.found.adapters[stored.site.weight.name].rank
        wants_a = end == LORA_A
        raw = self._file.get_tensor(stored.a if wants_a != stored.transposed else stored.b).float()
        if not site.weight.expert:
            return raw
        if wants_a != stored.transposed:
            each = raw.unflatten(0, (site.experts, rank))
        else:
            each = raw.unflatten(1, (rank, site.experts)).permute(2, 0, 1)
        each = each.transpose(1, 2) if stored.transposed else each
        return (each if wants_a else each.reshape(*site.weight.shape[:-1], rank)).contiguous()

    def close(self) -> None:
        """Close the file."""
        self._opened.__exit__(None, None, None)
