"""Which tensor on disk fills which part of which parameter, accounted for before a byte is read.

Every parameter is written once and whole; every tensor on disk is used once or stands on a list
of what is left out, with the reason. Anything else is refused with the full list.
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
    Entry,
    Layout,
    TensorPiece,
    choose_layout,
    find,
    pieces,
    sized,
)
from moefold.model.families.registry import family_of

Dtype = Literal["float32", "bfloat16"]
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types that weights are written in."""
SCALE = "_scale_inv"
"""Ending of the name of an FP8 tensor's scales."""
CODES, SCALES = "_blocks", "_scales"
"""Endings of the names of an MXFP4 tensor's codes, and of their scales."""
MXFP4 = 32
"""Elements that share a scale, two to a byte."""


def targets(decoder: Decoder) -> dict[str, Tensor]:
    """Return every tensor that a decoder's checkpoint holds, in the model's order, without values.

    They are the model's own, built on the meta device.
    """
    return DecoderModel(decoder, precision="fp32", device="meta").state_dict()


@dataclass(frozen=True, kw_only=True)
class Sent(TensorPiece):
    """One tensor of a Hugging Face folder, and which part of ours it is."""

    dtype: torch.dtype
    ours: str
    whole: tuple[int, ...]
    """Shape of ours."""
    others: "tuple[Sent, ...]" = ()
    """Further ones of ours whose rows are in the tensor."""


def contract(
    decoder: Decoder,
    dtype: Dtype = "bfloat16",
    layout: Layout = "per_expert",
    exact: str = ".router.",
) -> list[Sent]:
    """Return every tensor that a decoder is handed on as, in order.

    Args:
        decoder: the description.
        dtype: type of the tensors.
        layout: experts each on their own, or all in one tensor.
        exact: what has this in its name stays float32.

    Raises:
        ValueError: where no known family has this decoder, or none writes this type or layout.
    """
    for name, asked, known in (("dtype", dtype, Dtype), ("layout", layout, Layout)):
        if asked not in get_args(known):
            raise ValueError(f"{name} {asked!r}: one of {', '.join(get_args(known))}")
    wanted, sent, family = targets(decoder), dict[str, Sent](), family_of(decoder)
    copies = family.copies(decoder)
    for name, (row, layer) in find(sized(family.tensors, decoder), wanted).items():
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
    """What is read into what, and what is not read at all."""

    parts: Mapping[str, tuple[TensorPiece, ...]]
    """The tensors on disk that each parameter consists of."""
    left_out: Mapping[str, str]
    """Tensors on disk that are not used, and why."""
    scales: Mapping[str, str]
    """The scales that belong to each FP8 tensor on disk, and to each that lies as MXFP4 codes."""
    targets: Mapping[str, Tensor]
    """Shape and type of each parameter."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale, where the folder is quantised."""


def make_plan(
    where: Path,
    table: tuple[Entry, ...],
    targets: Mapping[str, Tensor],
    present: Mapping[str, TensorInfo],
    *,
    ignored: Callable[[str], str | None],
    block: tuple[int, int] | None,
) -> ImportPlan:
    """Match parameters with tensors on disk.

    Args:
        where: the folder, for the message.
        table: names of the family.
        targets: every parameter that must be filled.
        present: every tensor there is.
        ignored: says why a tensor is left out, or None.
        block: rows and columns that share a scale, where the folder is quantised.

    Raises:
        ConvertError: listing all that is missing, unexpected, doubly used, or of another shape
            or type.
    """
    parts: dict[str, tuple[TensorPiece, ...]] = {}
    for name, (row, layer) in find(table, targets).items():
        there, layout = choose_layout(row, layer, present)
        parts[name] = pieces(there, layer, targets[name].shape, layout)
    wanted = [piece for found in parts.values() for piece in found]
    matrices = (p.name for p in wanted if p.order and len(p.shape) == 3)
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
    problems += [f"{n} would be used {count} times" for n, count in uses.items() if count > 1]
    left_out: dict[str, str] = {}
    for name in present:
        reason = None if name in uses else ignored(name)
        if reason is not None:
            left_out[name] = reason
        elif name not in uses:
            held = present[name]
            problems.append(
                f"{held.stored or name} in {held.file} is not a tensor of this model: remove it, "
                "or mend config.json, which says what the model has"
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
    """Find the scales of each FP8 tensor; without them its numbers mean nothing."""
    scales: dict[str, str] = {}
    problems: list[str] = []
    for piece in wanted:
        stored = present.get(piece.name)
        if stored is None or stored.dtype != "F8_E4M3":
            continue
        scale = piece.name + SCALE
        held = present.get(scale)
        if block is None:
            problems.append(f"{piece.name} is FP8, and config.json has no block size for it")
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
    """Yield what is wrong with a tensor ``[E, in, out]`` that lies as MXFP4 codes.

    Those are bytes ``[E, out, in / 32, 16]``, their scales ``[E, out, in / 32]``.
    """
    codes, scales = piece.name + CODES, piece.name + SCALES
    if scales not in present:
        yield (
            f"{scales} is missing, without which {codes} in {present[codes].file} says nothing; "
            "fetch the file that holds it, or a folder of the same weights as BF16"
        )
    experts, inner, outer = piece.shape
    shape = (experts, outer, inner // MXFP4)
    for name, expected in ((codes, (*shape, MXFP4 // 2)), (scales, shape)):
        held = present.get(name)
        if held is not None and (held.shape != expected or inner % MXFP4):
            yield f"{name} has shape {list(held.shape)}, expected {list(expected)}"
        if held is not None and held.dtype != "U8":
            yield f"{name} is of type {held.dtype}; MXFP4 is read as U8"
