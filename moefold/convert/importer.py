"""Import of a Hugging Face folder: strict, with one tensor in memory at a time.

E experts, F expert width, D hidden (``model/families/names.py`` describes the layouts on disk).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from moefold.convert.adapter import AdapterTensors, identity
from moefold.convert.pickled import PickledWeights
from moefold.convert.plan import MXFP4_CODES, MXFP4_SCALES, ImportPlan, meta_state_dict, plan_import
from moefold.convert.source import (
    NON_TEXT,
    ConvertError,
    SafetensorsWeights,
    Weights,
    nonfinite,
)
from moefold.data.folder.files import TOKENIZER, TOKENIZER_CONFIG, read_sidecars, unread_notes
from moefold.data.folder.tokens import assemble
from moefold.files import read_json
from moefold.kernels.quantise.elements import E8M0, decode_e2m1, unpack
from moefold.layers.placement import Box
from moefold.model.config import Decoder
from moefold.model.families.base import Family, ParsedConfig
from moefold.model.families.folder import CONFIG_LIMIT, MULTI_TOKEN_FIELD, read_config
from moefold.model.families.names import TensorPiece, resolve_rows
from moefold.model.families.peft import base_folder, leftover_notes
from moefold.model.families.peft_reading import read_adapter
from moefold.model.tuning import merge_adapter
from moefold.spec.decoder import LORA_A, LORA_B

_HEAD = "head.weight"
_EMBED = "embed.weight"


class FolderTensors(Mapping[str, Tensor]):
    """The model's tensors by name, each read from the folder on access, without a cache."""

    def __init__(
        self,
        source: Weights,
        plan: ImportPlan,
        copies: Mapping[str, Sequence[str]],
        adapter: AdapterTensors | None = None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._copies = copies
        self._adapter = adapter
        self.targets = plan.targets
        """Shape and dtype of each tensor, on the meta device."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __contains__(self, name: object) -> bool:
        return name in self.targets  # the inherited method would read the tensor

    def __getitem__(self, name: str) -> Tensor:
        """Read one full tensor by :meth:`read_box`."""
        return self.read_box(name, tuple((0, size) for size in self.targets[name].shape))

    def identity(self) -> str:
        """Return the digest that identifies the folder's weights."""
        return identity({name: tuple(t.shape) for name, t in self.targets.items()}, self.read_box)

    def read_box(self, name: str, box: Box) -> Tensor:
        """Read a box of one tensor, in the dtype of the model's parameter.

        For an adapter's folder, the adapter is merged into the weight.

        Raises:
            ConvertError: if it contains NaN or an infinity, from the folder or because a part was
                not filled.
        """
        target = self.targets[name]
        unfilled = torch.nan if self._plan.parts[name] else 0.0
        tensor = torch.full([end - start for start, end in box], unfilled, dtype=target.dtype)
        used: list[TensorPiece] = []
        for piece in self._plan.parts[name]:
            outer = box[: len(piece.index)]
            inner = box[len(piece.index) :]
            indices = tuple(zip(piece.index, outer, strict=True))
            if not all(start <= i < end for i, (start, end) in indices):
                continue
            used.append(piece)
            part = tensor[tuple(i - start for i, (start, _) in indices)]
            part.copy_(self._read_piece(piece, target.shape[len(outer) :], inner))
        if (what := nonfinite(tensor)) is not None:
            raise ConvertError(self._source.folder, self._nonfinite_problems(used, what))
        for copy in self._copies.get(name, ()):
            if not torch.equal(self._source.read_box(copy, box).to(tensor.dtype), tensor):
                original = "embedding" if name == _EMBED else "head"
                field = MULTI_TOKEN_FIELD if ".layers." in copy else "tie_word_embeddings"
                problem = f"{copy} must equal the {original} ({field} in config.json)"
                raise ConvertError(self._source.folder, [problem])
        low_rank = None if self._adapter is None else self._adapter.peft.adapters.get(name)
        if self._adapter is None or low_rank is None:
            return tensor
        a = self._adapter[name + LORA_A]
        b = self._adapter[name + LORA_B]
        lead = box[: a.dim() - 2]
        box_a = (*lead, (0, low_rank.rank), box[-1])
        a = a[tuple(slice(*dim) for dim in box_a)]
        b = b[tuple(slice(*dim) for dim in box[:-1])]
        return merge_adapter(tensor, a, b, low_rank.scale)

    def _nonfinite_problems(self, used: Sequence[TensorPiece], what: str) -> list[str]:
        """Return which stored tensors contain NaN or infinities; without any, all ``used``."""
        problems: list[str] = []
        for piece in used:
            scale = self._plan.scales.get(piece.name)
            stored = {piece.name: torch.uint8} if piece.name in self._source.tensors else {}
            stored |= {scale.name: E8M0} if scale is not None else {}
            for name, bytes_as in stored.items():
                values = self._source.read(name)
                values = values.view(bytes_as) if values.dtype == torch.uint8 else values
                if (kind := nonfinite(values.double())) is not None:
                    file = self._source.tensors[name].file
                    problems.append(f"{name} in {file} contains {kind}; write or copy it again")
        too_large = "contains numbers above the largest of 32 bits"
        rest = [f"{piece.name} {too_large if what != 'NaN' else 'contains NaN'}" for piece in used]
        return problems or rest

    def _read_piece(self, piece: TensorPiece, shape: tuple[int, ...], box: Box) -> Tensor:
        """Return a box of ``piece``, a tensor on disk whose shape in the model is ``shape``."""
        scale = self._plan.scales.get(piece.name)
        if scale is not None and not scale.name.endswith(MXFP4_SCALES):
            codes = self._source.read(piece.name)
            scales = self._source.read(scale.name)
            full = piece.from_hf(dequantise_fp8(codes, scales, scale.block), shape)
            return full[tuple(slice(start, end) for start, end in box)]
        if piece.rows is not None:
            rows = dict.fromkeys(piece.rows.disk_rows(*box[0]))
            starts = [n for n in rows if n - 1 not in rows]
            ends = [n + 1 for n in rows if n + 1 not in rows]
            ranges = zip(starts, ends, strict=True)
            return torch.cat([self._source.read_box(piece.name, (r, *box[1:])) for r in ranges])
        if piece.perm:  # dims on disk are permuted, so full experts are read
            stored = self._read_experts(piece.name + MXFP4_CODES if scale else piece.name, box)
            stored = (
                dequantise_mxfp4(stored, self._read_experts(scale.name, box)) if scale else stored
            )
            experts = piece.from_hf(stored, (len(stored), *shape[1:]))
            return experts[(slice(None), *(slice(*bounds) for bounds in box[1:]))]
        if piece.shape == shape:
            return self._source.read_box(piece.name, box)
        if len(piece.shape) > len(shape):  # additional dims of size 1
            full = self._source.read(piece.name).reshape(shape)
            return full[tuple(slice(*bounds) for bounds in box)]
        # [E, 2, F, D] in the model, [E, 2 * F, D] on disk; or both without E
        (*experts, gate_up, rows, columns) = box
        width = shape[-2]
        (start, end) = rows
        parts = []
        for i in range(*gate_up):
            first = i * width
            part = (*experts, (first + start, first + end), columns)
            parts.append(self._source.read_box(piece.name, part))
        return torch.stack(parts, len(experts))

    def _read_experts(self, name: str, box: Box) -> Tensor:
        """Return the full matrices of a box's experts from a tensor on disk."""
        rest = self._source.tensors[name].shape[1:]
        return self._source.read_box(name, (box[0], *((0, size) for size in rest)))


@dataclass(frozen=True)
class ImportedFolder:
    """An opened Hugging Face folder."""

    decoder: Decoder
    model: Family
    """The family's record, with the sizes that users write."""
    tensors: FolderTensors
    special_tokens: Mapping[str, Any]
    """``bos_token_id`` and similar."""
    notes: tuple[str, ...]
    """Notes for the user: defaults used, files and tensors left out."""
    left_out: tuple[str, ...]
    """The notes about files and tensors left out, each with the folder."""
    source: Weights
    """The open files."""
    adapter: AdapterTensors | None = None
    """The adapter, if the folder is an adapter's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; tensors already read stay valid."""
        self.source.close()
        if self.adapter is not None:
            self.adapter.close()


def import_folder(
    folder: str | Path, weights: str | Path | None = None, config: ParsedConfig | None = None
) -> ImportedFolder:
    """Open a Hugging Face folder and match all its tensors with the model's, without reading any.

    For an adapter's folder, the base is opened, with the adapter merged into the weights.
    ``weights`` is a pickled checkpoint to read instead (:mod:`moefold.convert.pickled`);
    ``config`` describes the model if no family reads its ``config.json``. The result is a context
    manager that keeps the files open.

    Raises:
        ValueError: if ``config.json`` has anything unsupported.
        ConvertError: with every tensor that is missing, unexpected, or of another shape.
    """
    own = Path(folder)
    folder = base_folder(Path(folder))
    config = config or read_config(folder)
    names = {mapping.param: mapping.hf_names[0] for mapping in config.model.tensors}
    source: Weights
    if weights is None:
        source = SafetensorsWeights(folder)
        if config.from_multimodal:
            source.strip_language_prefix()
    else:
        source = PickledWeights(Path(weights), names[_EMBED])
    try:
        known = _redundant_copies(config, names[_HEAD])
        copies = {name: [n for n in known[name] if n in source.tensors] for name in known}

        def ignore_reason(name: str) -> str | None:
            if config.decoder.tied and name == names[_HEAD]:
                return "tied to the embedding"
            if any(name in redundant for redundant in copies.values()):
                return "copies of embedding or head"
            if config.from_multimodal and NON_TEXT.match(name):
                return "not part of the language model"
            return config.model.ignore_reason(name)

        plan = plan_import(
            folder,
            resolve_rows(config.model.tensors, config.decoder),
            meta_state_dict(config.decoder),
            source.tensors,
            ignore_reason=ignore_reason,
            block=config.fp8_block,
        )
        tokenizer_notes = list(_tokenizer_notes(folder))
        base = FolderTensors(source, plan, copies)
        adapter = None if own == folder else open_adapter(own, folder, config.decoder, base)
    except BaseException:
        source.close()
        raise
    unread = dict.fromkeys((*config.left_out, *leftover_notes(folder)))
    left_out = (*unread, *source.notes, *_tensor_notes(plan))
    mxfp4 = sum(scale.name.endswith(MXFP4_SCALES) for scale in plan.scales.values())
    counts = {"FP8": len(plan.scales) - mxfp4, "MXFP4": mxfp4}
    scaled = [
        f"{kind} tensors dequantised with their block scales: {number}"
        for kind, number in counts.items()
        if number
    ]
    notes = (*config.notes, *left_out, *scaled, *tokenizer_notes)
    left_out = tuple(f"{folder}: {note}" for note in left_out)
    if adapter is not None:
        notes = (*notes, *adapter.peft.notes)
        left_out = (*left_out, *adapter.peft.notes)
    tensors = FolderTensors(source, plan, copies, adapter)
    return ImportedFolder(
        config.decoder,
        config.model,
        tensors,
        config.special_tokens,
        notes,
        left_out,
        source,
        adapter,
    )


def _redundant_copies(config: ParsedConfig, head: str) -> dict[str, tuple[str, ...]]:
    """Return the names on disk of redundant copies of embedding or head, by parameter."""
    copies = dict(config.model.copies(config.decoder))
    if config.decoder.tied:
        copies[_EMBED] = (*copies.get(_EMBED, ()), head, *copies.pop(_HEAD, ()))
    return copies


def open_adapter(own: Path, base: Path, decoder: Decoder, tensors: FolderTensors) -> AdapterTensors:
    """Open an adapter's folder; the caller closes the result.

    Raises:
        ConvertError: if the adapter belongs to another base.
    """
    adapter = AdapterTensors(read_adapter(own, decoder))
    try:
        if adapter.peft.identity not in (None, tensors.identity()):
            problem = (
                f"was trained on a base model with other weights than {base}; use that base model, "
                "or train an adapter for this one"
            )
            raise ConvertError(own, [problem])
    except BaseException:
        adapter.close()
        raise
    return adapter


def _tokenizer_notes(folder: Path) -> Iterator[str]:
    """Yield notes on a folder's tokenizer."""
    file = folder / TOKENIZER
    config = folder / TOKENIZER_CONFIG
    if not file.is_file():
        yield f"{folder} has no tokenizer.json; the checkpoint will have no tokenizer"
        return
    if config.is_file() and "auto_map" in read_json(config, limit=CONFIG_LIMIT):
        yield f"auto_map in {config.name} refers to Python code in the folder, which is never run"
    yield from assemble(read_json(file), read_sidecars(folder), str(folder)).notes
    yield from unread_notes(folder)


def _tensor_notes(plan: ImportPlan) -> Iterator[str]:
    """Yield notes on tensors that the folder lacks, and on those that are left out."""
    if zeros := [name for name, pieces in plan.parts.items() if not pieces]:
        more = f" and {len(zeros) - 1} more" if zeros[1:] else ""
        yield f"not in the folder, and therefore zeros: {zeros[0]}{more}"
    by_reason: dict[str, list[str]] = {}
    for name, reason in plan.ignored.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 1} more" if names[1:] else ""
        yield f"tensors left out ({reason}): {names[0]}{more}"


def dequantise_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantise FP8 codes [..., R, C] with a scale per ``block`` of (rows, columns); return fp32.

    Bytes are exponents as in E8M0. The arithmetic is that of DeepSeek-V3's release (arXiv
    2412.19437, section 3.3).
    """
    *lead, rows, columns = codes.shape
    if scales.dtype == torch.uint8:
        scales = scales.view(E8M0)
    grid = -(-rows // block[0]), -(-columns // block[1])
    # One grid for each matrix, or one for all.
    matrices = lead if scales.numel() == prod((*lead, *grid)) else [1] * len(lead)
    scales = scales.float().reshape(*matrices, *grid)
    scales = scales.repeat_interleave(block[0], -2)[..., :rows, :]
    return codes.float() * scales.repeat_interleave(block[1], -1)[..., :columns]


def dequantise_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantise MXFP4 codes [E, O, I / 32, 16] with E8M0 scales; return fp32 [E, I, O].

    A byte has two E2M1 numbers, the first in its low half (OCP Microscaling Formats 1.0).
    """
    numbers = decode_e2m1(unpack(codes), torch.float32)
    factors = scales.view(E8M0).float()[..., None]
    return (numbers * factors).flatten(2).transpose(1, 2)
