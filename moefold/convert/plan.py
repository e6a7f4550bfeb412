"""Maps tensors on disk to parts of parameters, before any byte is read.

Every parameter is filled once and completely; every tensor on disk is used once or listed as left
out, with the reason. Anything else is refused with the full list.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from moefold.convert.source import DTYPES, ConvertError, TensorInfo
from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.model.families.names import (
    Layout,
    ParamMapping,
    TensorPiece,
    detect_layout,
    find_mappings,
    pieces,
    resolve_rows,
)
from moefold.model.families.registry import family_of

Dtype = Literal["float32", "bfloat16"]
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes in which weights are written."""
SCALE = "_scale_inv"
"""Name suffix of an FP8 tensor's scales."""
CODES, SCALES = "_blocks", "_scales"
"""Name suffixes of an MXFP4 tensor's codes and their scales."""
MXFP4 = 32
"""Elements that share a scale, two per byte."""


def targets(decoder: Decoder) -> dict[str, Tensor]:
    """Return every tensor of a decoder's checkpoint, in model order, on the meta device."""
    return DecoderModel(decoder, precision="fp32", device="meta").state_dict()


@dataclass(frozen=True, kw_only=True)
class Sent(TensorPiece):
    """One tensor of an exported folder, and the part of the model's tensor that it is."""

    dtype: torch.dtype
    ours: str
    whole: tuple[int, ...]
    """Shape of the model's tensor ``ours``."""
    others: "tuple[Sent, ...]" = ()
    """Further tensors of the model whose rows are in this one."""


def contract(
    decoder: Decoder,
    dtype: Dtype = "bfloat16",
    layout: Layout = "per_expert",
    exact: str = ".router.",
) -> list[Sent]:
    """Return every tensor of an exported folder or a weight stream, in order.

    Args:
        decoder: the description.
        dtype: dtype of the tensors.
        layout: one tensor per expert, or all experts in one tensor.
        exact: tensors with this in their name stay float32.

    Raises:
        ValueError: if no known family has this decoder, or dtype or layout are unknown.
    """
    for name, asked, known in (("dtype", dtype, Dtype), ("layout", layout, Layout)):
        if asked not in get_args(known):
            raise ValueError(f"{name} {asked!r}: must be one of {', '.join(get_args(known))}")
    wanted, sent, family = targets(decoder), dict[str, Sent](), family_of(decoder)
    copies = family.copies(decoder)
    for name, (row, layer) in find_mappings(resolve_rows(family.tensors, decoder), wanted).items():
        kept, whole = torch.float32 if exact in name else KINDS[dtype], wanted[name].shape
        again = (TensorPiece(copy, whole, ()) for copy in copies.get(name, ()))
        for piece in (*pieces(row, layer, whole, layout), *again):
            made = Sent(**vars(piece), dtype=kept, ours=name, whole=whole)
            first = sent.get(piece.name)
            joined = made if first is None else replace(first, others=(*first.others, made))
            sent[piece.name] = joined
    return list(sent.values())


@dataclass(frozen=True)
class ImportPlan:
    """The tensors on disk from which each parameter is read, and those that are not read."""

    parts: Mapping[str, tuple[TensorPiece, ...]]
    """The tensors on disk of which each parameter consists."""
    left_out: Mapping[str, str]
    """Tensors on disk that are not used, with the reason."""
    scales: Mapping[str, str]
    """Name of the scales of each FP8 or MXFP4 tensor on disk."""
    targets: Mapping[str, Tensor]
    """Shape and dtype of each parameter."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale, if the folder is FP8."""


def make_plan(
    where: Path,
    table: tuple[ParamMapping, ...],
    targets: Mapping[str, Tensor],
    present: Mapping[str, TensorInfo],
    *,
    ignored: Callable[[str], str | None],
    block: tuple[int, int] | None,
) -> ImportPlan:
    """Match parameters with tensors on disk.

    Args:
        where: the folder, for messages.
        table: names of the family.
        targets: every parameter to be filled.
        present: every tensor on disk.
        ignored: returns why a tensor is left out, or None.
        block: rows and columns that share a scale, if the folder is FP8.

    Raises:
        ConvertError: with all tensors missing, unexpected, used twice, or of another shape or
            dtype.
    """
    parts: dict[str, tuple[TensorPiece, ...]] = {}
    for name, (row, layer) in find_mappings(table, targets).items():
        there, layout = detect_layout(row, layer, present)
        parts[name] = pieces(there, layer, targets[name].shape, layout)
    wanted = [piece for found in parts.values() for piece in found]
    matrices = (p.name for p in wanted if p.perm and len(p.shape) == 3)
    coded = {name for name in matrices if name + CODES in present}
    missing = dict.fromkeys(p.name for p in wanted if p.name not in {*present, *coded})
    problems = [f"{name} is missing" for name in missing]
    scales, scale_problems = _scales(wanted, present, block)
    for piece in wanted:
        if piece.name in coded:
            scales[piece.name] = piece.name + SCALES
            scale_problems += _code_problems(piece, present)
    problems += scale_problems
    once = {(p.name, p.rows): p for p in wanted if p.rows}.values()
    alone = [*(p for p in wanted if not p.rows), *{p.name: p for p in once}.values()]
    stored_as = [p.name + CODES if p.name in coded else p.name for p in alone]
    uses = Counter(stored_as + list(scales.values()))
    problems += [f"{n} is needed {count} times, not once" for n, count in uses.items() if count > 1]
    left_out: dict[str, str] = {}
    for name in present:
        reason = None if name in uses else ignored(name)
        if reason is not None:
            left_out[name] = reason
        elif name not in uses:
            held = present[name]
            problems.append(
                f"{held.stored or name} in {held.file} is not a tensor of the model that "
                "config.json describes; remove it, or correct config.json"
            )
    for piece in wanted:
        stored = present.get(piece.name)
        if stored is not None and stored.shape != piece.shape:
            shapes = f"{list(stored.shape)}, expected {list(piece.shape)}"
            problems.append(f"{piece.name} has shape {shapes}")
        elif stored is not None and stored.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            problems.append(f"{piece.name} is of type {stored.dtype}; supported: {known}")
    if problems:
        raise ConvertError(where, problems)
    return ImportPlan(parts, left_out, scales, targets, block)


def _scales(
    wanted: list[TensorPiece], present: Mapping[str, TensorInfo], block: tuple[int, int] | None
) -> tuple[dict[str, str], list[str]]:
    """Return the scales' name for each FP8 tensor, and all problems with scales."""
    scales: dict[str, str] = {}
    problems: list[str] = []
    for piece in wanted:
        stored = present.get(piece.name)
        if stored is None or stored.dtype != "F8_E4M3":
            continue
        scale = piece.name + SCALE
        held = present.get(scale)
        if block is None:
            problems.append(f"{piece.name} is FP8, but config.json has no weight_block_size")
        elif held is None:
            problems.append(f"{scale} is missing")
        else:
            scales[piece.name] = scale
            sizes = [-(-n // b) for n, b in zip(piece.shape, block, strict=False)]
            if len(piece.shape) != 2 or list(held.shape) != sizes:
                problems.append(f"{scale} has shape {list(held.shape)}, expected {sizes}")
            if held.dtype not in ("F32", "BF16"):
                problems.append(f"{scale} is of type {held.dtype}; supported: F32, BF16")
    return scales, problems


def _code_problems(piece: TensorPiece, present: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield the problems of a tensor ``[E, in, out]`` stored as MXFP4 codes.

    Codes are bytes ``[E, out, in / 32, 16]``, their scales ``[E, out, in / 32]``.
    """
    codes, scales = piece.name + CODES, piece.name + SCALES
    if scales not in present:
        yield (
            f"{scales} is missing, but needed to dequantise {codes} in {present[codes].file}; "
            "download the file that has it, or the same weights in BF16"
        )
    experts, inner, outer = piece.shape
    shape = (experts, outer, inner // MXFP4)
    for name, expected in ((codes, (*shape, MXFP4 // 2)), (scales, shape)):
        held = present.get(name)
        if held is not None and (held.shape != expected or inner % MXFP4):
            yield f"{name} has shape {list(held.shape)}, expected {list(expected)}"
        if held is not None and held.dtype != "U8":
            yield f"{name} is of type {held.dtype}; supported: U8"
