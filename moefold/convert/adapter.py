"""Reads and writes adapters in PEFT's format, with the identity of their base model.

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
from moefold.convert.exporter import require_new_folder, staging_folder
from moefold.convert.plan import WEIGHT_DTYPES, Dtype
from moefold.convert.source import ConvertError, nonfinite
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

    Raises:
        ConvertError: if the folder is not empty.
        ValueError: if PEFT cannot represent an adapter.
    """
    require_new_folder(folder)
    config, sites = peft_config(decoder, adapters, base[0])
    named: list[tuple[str, TensorSlice]] = []
    for prefix, (site, _) in sites_by_prefix(sites).items():
        rank = adapters[site.weight.name].rank * site.experts
        for end, shape in ((LORA_A, (rank, site.inputs)), (LORA_B, (site.outputs, rank))):
            read = partial(_to_peft, tensors, site, end, WEIGHT_DTYPES[dtype])
            name = f"{prefix}.lora_{'A' if end == LORA_A else 'B'}.weight"
            named.append(
                (name, TensorSlice.of_full_tensor(LazyTensor(WEIGHT_DTYPES[dtype], shape, read)))
            )
    with staging_folder(folder) as staged:
        if tokenizer is not None:
            (staged / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
            tokenizer.files.write(staged, tokenizer.end_id, decoder.context)
        write_json(staged / CONFIG, config)
        metadata = {IDENTITY: base[1]}
        write_shard(DISK, staged / TENSORS, sorted(named), CHUNK_BYTES, 0, **metadata)


def _to_peft(
    tensors: Mapping[str, Tensor], site: AdapterSite, end: str, dtype: torch.dtype
) -> Tensor:
    """Return A or B of a site as PEFT stores it."""
    tensor = tensors[site.weight.name + end].detach().cpu()
    if not site.weight.is_expert:
        tensor = tensor[site.index]
    elif end == LORA_A:
        tensor = tensor.flatten(0, 1)
    else:
        tensor = tensor.flatten(1, -2).permute(1, 2, 0).flatten(1)
    return tensor.to(dtype).contiguous()


# ------------------------------------------------------------------------------------- reading


class AdapterTensors(Mapping[str, Tensor]):
    """A and B of an adapter's folder, by the model's names; each is read on access."""

    def __init__(self, peft: PeftFolder) -> None:
        self.peft = peft
        self._opened = safe_open(peft.path / TENSORS, framework="pt")
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
        weight, end = name[: -len(LORA_A)], name[-len(LORA_A) :]
        parts = [self._from_peft(stored, end) for stored in self.peft.stored[weight]]
        tensor = torch.stack(parts) if self.peft.stored[weight][0].site.index else parts[0]
        if (what := nonfinite(tensor)) is not None:
            raise ConvertError(self.peft.path, [f"the adapter of {weight} contains {what}"])
        return tensor

    def _from_peft(self, stored: StoredAdapter, end: str) -> Tensor:
        """Return A or B of one site in the model's layout."""
        site, rank = stored.site, self.peft.adapters[stored.site.weight.name].rank
        is_a = end == LORA_A
        raw = self._file.get_tensor(stored.a if is_a != stored.transposed else stored.b).float()
        if not site.weight.is_expert:
            return raw
        if is_a != stored.transposed:
            tensor = raw.unflatten(0, (site.experts, rank))
        else:
            tensor = raw.unflatten(1, (rank, site.experts)).permute(2, 0, 1)
        tensor = tensor.transpose(1, 2) if stored.transposed else tensor
        return (tensor if is_a else tensor.reshape(*site.weight.shape[:-1], rank)).contiguous()

    def close(self) -> None:
        """Close the file."""
        self._opened.__exit__(None, None, None)
