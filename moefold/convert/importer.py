"""Import of a Hugging Face folder: strict, with one tensor in memory at a time.

E experts, F expert width, D hidden (``model/families/names.py`` describes the layouts on disk).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from moefold.convert.adapter import AdapterTensors, identity
from moefold.convert.pickled import PickledWeights
from moefold.convert.plan import CODES, SCALES, ImportPlan, make_plan, targets
from moefold.convert.source import BESIDE, ConvertError, SafetensorsWeights, Weights
from moefold.data.config import TOKENIZER_CONFIG
from moefold.files import read_json
from moefold.kernels.quantise.elements import E8M0, unpack, value_e2m1
from moefold.layers.placement import Box
from moefold.model.config import Decoder
from moefold.model.families.base import Family, ParsedConfig
from moefold.model.families.folder import CONFIG_LIMIT, MULTI_TOKEN_FIELD, read_config
from moefold.model.families.names import TensorPiece, resolve_rows
from moefold.model.families.peft import base_folder, read_adapter
from moefold.model.tuning import merge_adapter
from moefold.spec.decoder import LORA_A, LORA_B

_HEAD, _EMBED = "head.weight", "embed.weight"


class FolderTensors(Mapping[str, Tensor]):
    """The model's tensors by name, each read from the folder on access and not cached."""

    def __init__(
        self,
        source: Weights,
        plan: ImportPlan,
        copies: Mapping[str, Sequence[str]],
        adapter: AdapterTensors | None = None,
    ) -> None:
        self._source, self._plan, self._copies = source, plan, copies
        self._adapter = adapter
        self.targets = plan.targets
        """Each tensor's shape and dtype, without values."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __contains__(self, name: object) -> bool:
        return name in self.targets  # the inherited one would read the tensor

    def __getitem__(self, name: str) -> Tensor:
        """Read one whole tensor by :meth:`part`."""
        return self.part(name, tuple((0, size) for size in self.targets[name].shape))

    def identity(self) -> str:
        """Return a digest that identifies the folder's weights."""
        return identity({name: tuple(t.shape) for name, t in self.targets.items()}, self.part)

    def part(self, name: str, box: Box) -> Tensor:
        """Read only a box of one tensor, in the dtype of the model's parameter.

        For an adapter's folder, the adapter is merged into the weight.

        Raises:
            ConvertError: if it contains NaN, from the folder or because a part was not filled.
        """
        target = self.targets[name]
        wanted = torch.full([end - start for start, end in box], torch.nan, dtype=target.dtype)
        used: list[TensorPiece] = []
        for piece in self._plan.parts[name]:
            outer, inner = box[: len(piece.index)], box[len(piece.index) :]
            placed = tuple(zip(piece.index, outer, strict=True))
            if not all(start <= at < end for at, (start, end) in placed):
                continue
            used.append(piece)
            into = wanted[tuple(at - start for at, (start, _) in placed)]
            into.copy_(self._read(piece, target.shape[len(outer) :], inner))
        if bool(wanted.isnan().any()):
            names = [piece.name for piece in used]
            here = [n for n in names if n in self._source.tensors]
            sick = [n for n in here if bool(self._source.read(n).isnan().any())] or names
            raise ConvertError(self._source.folder, [f"{n} contains NaN" for n in sick])
        for copy in self._copies.get(name, ()):
            if not torch.equal(self._source.read_box(copy, box).to(wanted.dtype), wanted):
                whose = "embedding" if name == _EMBED else "head"
                field = MULTI_TOKEN_FIELD if ".layers." in copy else "tie_word_embeddings"
                said = f"{copy} must equal the {whose} ({field} in config.json)"
                raise ConvertError(self._source.folder, [said])
        low = None if self._adapter is None else self._adapter.found.adapters.get(name)
        if self._adapter is None or low is None:
            return wanted
        a, b = (self._adapter[name + end] for end in (LORA_A, LORA_B))
        a = a[tuple(slice(*at) for at in (*box[: a.dim() - 2], (0, low.rank), box[-1]))]
        b = b[tuple(slice(*at) for at in box[:-1])]
        return merge_adapter(wanted, a, b, low.scale)

    def _read(self, piece: TensorPiece, shape: tuple[int, ...], box: Box) -> Tensor:
        """Return a box of ``piece``, a tensor on disk that has ``shape`` in the model."""
        scale = self._plan.scales.get(piece.name)
        if scale is not None and self._plan.block is not None:
            codes, scales = self._source.read(piece.name), self._source.read(scale)
            whole = piece.from_hf(dequantise(codes, scales, self._plan.block), shape)
            return whole[tuple(slice(start, end) for start, end in box)]
        if piece.rows is not None:
            places = dict.fromkeys(piece.rows.disk_rows(*box[0]))
            starts = [n for n in places if n - 1 not in places]
            ends = [n + 1 for n in places if n + 1 not in places]
            spans = zip(starts, ends, strict=True)
            return torch.cat([self._source.read_box(piece.name, (s, *box[1:])) for s in spans])
        if piece.perm:  # dims on disk are permuted, so whole experts are read
            stored = self._experts(piece.name + CODES if scale else piece.name, box)
            stored = multiplied(stored, self._experts(scale, box)) if scale else stored
            ours = piece.from_hf(stored, (len(stored), *shape[1:]))
            return ours[(slice(None), *(slice(*bounds) for bounds in box[1:]))]
        if piece.shape == shape:
            return self._source.read_box(piece.name, box)
        if len(piece.shape) > len(shape):  # additional dims of size 1
            small = self._source.read(piece.name).reshape(shape)
            return small[tuple(slice(*bounds) for bounds in box)]
        # [E, 2, F, D] in the model, [E, 2 * F, D] on disk; or both without E
        (*experts, halves, rows, columns), width = box, shape[-2]
        parts = [
            self._source.read_box(
                piece.name, (*experts, (h * width + rows[0], h * width + rows[1]), columns)
            )
            for h in range(*halves)
        ]
        return torch.stack(parts, len(experts))

    def _experts(self, name: str, box: Box) -> Tensor:
        """Return the whole experts of a box from a tensor on disk."""
        rest = self._source.tensors[name].shape[1:]
        return self._source.read_box(name, (box[0], *((0, size) for size in rest)))


@dataclass(frozen=True)
class Imported:
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
    """Holds the files open."""
    adapter: AdapterTensors | None = None
    """The adapter, if the folder is an adapter's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; tensors already read stay."""
        self.source.close()
        if self.adapter is not None:
            self.adapter.close()


def import_folder(
    folder: str | Path, weights: str | Path | None = None, reading: ParsedConfig | None = None
) -> Imported:
    """Open a Hugging Face folder and match all its tensors with the model's, without reading any.

    For an adapter's folder, the base is opened, with the adapter merged into the weights.
    ``weights`` is a pickled checkpoint to read instead (:mod:`moefold.convert.pickled`);
    ``reading`` describes the model if no family reads its ``config.json``. The result is a context
    manager, which is closed when the tensors are no longer needed.

    Raises:
        ValueError: if ``config.json`` has anything unsupported.
        ConvertError: with every tensor that is missing, unexpected, or of another shape.
    """
    own, folder = Path(folder), base_folder(Path(folder))
    reading = reading or read_config(folder)
    names = {row.param: row.hf_names[0] for row in reading.model.tensors}
    source: Weights
    if weights is None:
        source = SafetensorsWeights(folder)
        if reading.from_multimodal:
            source.enter()
    else:
        source = PickledWeights(Path(weights), names[_EMBED])
    try:
        known = _copies(reading, names[_HEAD])
        copies = {ours: [n for n in those if n in source.tensors] for ours, those in known.items()}

        def ignored(name: str) -> str | None:
            if reading.decoder.tied and name == names[_HEAD]:
                return "tied to the embedding"
            if any(name in those for those in copies.values()):
                return "copies of embedding or head"
            if reading.from_multimodal and BESIDE.match(name):
                return "not part of the language model"
            return reading.model.ignore_reason(name)

        plan = make_plan(
            folder,
            resolve_rows(reading.model.tensors, reading.decoder),
            targets(reading.decoder),
            source.tensors,
            ignored=ignored,
            block=reading.fp8_block,
        )
        said = list(_about_tokenizer(folder))
        base = FolderTensors(source, plan, copies)
        adapter = None if own == folder else open_adapter(own, folder, reading.decoder, base)
    except BaseException:
        source.close()
        raise
    left_out = (*source.notes, *_left_out(plan))
    four = sum(scale.endswith(SCALES) for scale in plan.scales.values())
    counts = {"FP8": len(plan.scales) - four, "MXFP4": four}
    scaled = [
        f"{kind} tensors dequantised with their block scales: {number}"
        for kind, number in counts.items()
        if number
    ]
    notes = (*reading.notes, *left_out, *scaled, *said)
    tensors = FolderTensors(source, plan, copies, adapter)
    return Imported(
        reading.decoder,
        reading.model,
        tensors,
        reading.special_tokens,
        notes,
        tuple(f"{folder}: {note}" for note in left_out),
        source,
        adapter,
    )


def _copies(reading: ParsedConfig, head: str) -> dict[str, tuple[str, ...]]:
    """Return names on disk of redundant copies of the embedding or head, by the model's name."""
    found = dict(reading.model.copies(reading.decoder))
    if reading.decoder.tied:
        found[_EMBED] = (*found.get(_EMBED, ()), head, *found.pop(_HEAD, ()))
    return found


def open_adapter(own: Path, base: Path, decoder: Decoder, tensors: FolderTensors) -> AdapterTensors:
    """Open an adapter's folder; the caller closes the result.

    Raises:
        ConvertError: if the adapter belongs to another base.
    """
    found = AdapterTensors(read_adapter(own, decoder))
    try:
        if found.found.identity not in (None, tensors.identity()):
            problem = (
                f"was trained on a base model with other weights than {base}; use that base model, "
                "or train an adapter for this one"
            )
            raise ConvertError(own, [problem])
    except BaseException:
        found.close()
        raise
    return found


def _about_tokenizer(folder: Path) -> Iterator[str]:
    """Yield notes on a folder's tokenizer."""
    config = folder / TOKENIZER_CONFIG
    if not (folder / "tokenizer.json").is_file():
        yield f"{folder} has no tokenizer.json; the checkpoint will have no tokenizer"
    elif config.is_file() and "auto_map" in read_json(config, limit=CONFIG_LIMIT):
        yield f"auto_map in {config.name} refers to Python code in the folder, which is never run"


def _left_out(plan: ImportPlan) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in plan.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 1} more" if names[1:] else ""
        yield f"tensors left out ({reason}): {names[0]}{more}"


def dequantise(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantise FP8 codes [R, C] with a scale per ``block`` of (rows, columns); return fp32.

    The arithmetic is that of DeepSeek-V3's release (arXiv 2412.19437, section 3.3).
    """
    rows, columns = codes.shape
    spread = scales.float().repeat_interleave(block[0], 0)[:rows]
    return codes.float() * spread.repeat_interleave(block[1], 1)[:, :columns]


def multiplied(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantise MXFP4 codes [E, O, I / 32, 16] with E8M0 scales; return fp32 [E, I, O].

    A byte has two E2M1 numbers, the first in its low half (OCP Microscaling Formats 1.0).
    """
    numbers = value_e2m1(unpack(codes), torch.float32)
    return (numbers * scales.view(E8M0).float()[..., None]).flatten(2).transpose(1, 2)
