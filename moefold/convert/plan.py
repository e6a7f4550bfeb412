"""Maps tensors on disk to parts of parameters, before any byte is read.

Every parameter is filled completely, and every tensor on disk is used once or ignored for a reason.
Otherwise the import is refused, with all problems.
"""

import re
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
WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes in which weights are written."""
FP8_SCALES = ("_scale_inv", "_scale")
"""Name suffixes of an FP8 tensor's scales, by which its codes are multiplied in either case."""
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
"""Dtypes of scales; bytes are exponents as in E8M0."""
ACTIVATION_SCALES = re.compile(r".*[._](input|activation|input_activation)_scale(_inv)?")
"""Names of scales for products of quantised activations."""
MXFP4_CODES = "_blocks"
MXFP4_SCALES = "_scales"
"""Name suffixes of an MXFP4 tensor's codes and their scales."""
MXFP4_BLOCK = 32
"""Elements that share a scale, two per byte."""


def meta_state_dict(decoder: Decoder) -> dict[str, Tensor]:
    """Return the state dict of a decoder on the meta device, in the model's order."""
    return DecoderModel(decoder, precision="fp32", device="meta").state_dict()


@dataclass(frozen=True, kw_only=True)
class ExportTensor(TensorPiece):
    """A tensor of an exported folder, and the part of the model's tensor that it holds."""

    dtype: torch.dtype
    param: str
    full_shape: tuple[int, ...]
    """Shape of the model's tensor ``param``."""
    others: "tuple[ExportTensor, ...]" = ()
    """Entries of other tensors of the model whose rows are in this one."""


def contract(
    decoder: Decoder,
    dtype: Dtype = "bfloat16",
    layout: Layout = "per_expert",
    exact: str = ".router.",
) -> list[ExportTensor]:
    """Return every tensor of an exported folder or a weight stream, in order.

    Args:
        decoder: the model's description.
        dtype: dtype of the tensors.
        layout: one tensor per expert, or all experts in one tensor.
        exact: tensors whose name contains this stay float32.

    Raises:
        ValueError: if no known family has this decoder, or dtype or layout are unknown.
    """
    for name, value, known in (("dtype", dtype, Dtype), ("layout", layout, Layout)):
        if value not in get_args(known):
            raise ValueError(f"{name} {value!r}: must be one of {', '.join(get_args(known))}")
    params = meta_state_dict(decoder)
    entries = dict[str, ExportTensor]()
    family = family_of(decoder)
    copies = family.copies(decoder)
    mappings = find_mappings(resolve_rows(family.tensors, decoder), params)
    for name, (mapping, layer) in mappings.items():
        kept = torch.float32 if exact in name else WEIGHT_DTYPES[dtype]
        shape = params[name].shape
        again = (TensorPiece(copy, shape, ()) for copy in copies.get(name, ()))
        for piece in (*pieces(mapping, layer, shape, layout), *again):
            entry = ExportTensor(**vars(piece), dtype=kept, param=name, full_shape=shape)
            first = entries.get(piece.name)
            joined = entry if first is None else replace(first, others=(*first.others, entry))
            entries[piece.name] = joined
    return list(entries.values())


@dataclass(frozen=True)
class StoredScales:
    """The scales of an FP8 or MXFP4 tensor."""

    name: str
    block: tuple[int, int] = (1, MXFP4_BLOCK)
    """Rows and columns that share a scale, as stored."""


@dataclass(frozen=True)
class ImportPlan:
    """The tensors on disk from which each parameter is read, and those that are ignored."""

    parts: Mapping[str, tuple[TensorPiece, ...]]
    """The tensors on disk of which each parameter consists; none of one that is zeros."""
    ignored: Mapping[str, str]
    """Reasons for ignoring tensors on disk, by name."""
    scales: Mapping[str, StoredScales]
    """The scales, by name of FP8 or MXFP4 tensor."""
    targets: Mapping[str, Tensor]
    """Shape and dtype of each parameter."""


def plan_import(
    folder: Path,
    table: tuple[ParamMapping, ...],
    targets: Mapping[str, Tensor],
    present: Mapping[str, TensorInfo],
    *,
    ignore_reason: Callable[[str], str | None],
    block: tuple[int, int] | None,
) -> ImportPlan:
    """Match parameters with tensors on disk.

    Args:
        folder: the folder, for messages.
        table: the family's mappings.
        targets: every parameter to fill.
        present: every tensor on disk.
        ignore_reason: returns why a tensor is ignored, or None.
        block: rows and columns of FP8 blocks, if the folder states them.

    Raises:
        ConvertError: with all tensors that are missing, unexpected, used twice, or of another shape
            or dtype.
    """
    parts: dict[str, tuple[TensorPiece, ...]] = {}
    optional: dict[str, list[str]] = {}
    for name, (mapping, layer) in find_mappings(table, targets).items():
        used, layout = detect_layout(mapping, layer, present)
        parts[name] = pieces(used, layer, targets[name].shape, layout)
        if mapping.optional:
            optional.setdefault(mapping.param, []).append(name)
    for names in optional.values():
        # A folder that has the tensors of some layers only is not whole.
        if not any(piece.name in present for name in names for piece in parts[name]):
            parts |= dict.fromkeys(names, ())
    needed = [piece for of_param in parts.values() for piece in of_param]
    matrices = (p.name for p in needed if p.perm and len(p.shape) == 3)
    coded = {name for name in matrices if name + MXFP4_CODES in present}
    missing = dict.fromkeys(p.name for p in needed if p.name not in {*present, *coded})
    problems = [f"{name} is missing" for name in missing]
    scales, scale_problems = _scales(needed, present, block)
    for piece in needed:
        if piece.name in coded:
            scales[piece.name] = StoredScales(piece.name + MXFP4_SCALES)
            scale_problems += _code_problems(piece, present)
    problems += scale_problems
    once = {(p.name, p.rows): p for p in needed if p.rows}.values()
    in_rows = {piece.name: piece for piece in once}
    alone = [*(piece for piece in needed if not piece.rows), *in_rows.values()]
    stored_as = [p.name + MXFP4_CODES if p.name in coded else p.name for p in alone]
    uses = Counter(stored_as + [scale.name for scale in scales.values()])
    repeated = {name: count for name, count in uses.items() if count > 1}
    problems += [f"{name} is needed {count} times, not once" for name, count in repeated.items()]
    ignored: dict[str, str] = {}
    for name in present:
        reason = None if name in uses else ignore_reason(name)
        if reason is None and scales and ACTIVATION_SCALES.fullmatch(name):
            reason = "scales of activations, which are not quantised here"
        if reason is not None:
            ignored[name] = reason
        elif name not in uses:
            info = present[name]
            problems.append(
                f"{info.disk_name or name} in {info.file} is not a tensor of the model that "
                "config.json describes; remove it, or correct config.json"
            )
    for piece in needed:
        stored = present.get(piece.name)
        if stored is not None and stored.shape != piece.shape:
            shapes = f"{list(stored.shape)}, expected {list(piece.shape)}"
            problems.append(f"{piece.name} has shape {shapes}")
        elif stored is not None and stored.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            problems.append(f"{piece.name} is of type {stored.dtype}; supported: {known}")
    if problems:
        raise ConvertError(folder, problems)
    return ImportPlan(parts, ignored, scales, targets)


def _scales(
    needed: list[TensorPiece], present: Mapping[str, TensorInfo], block: tuple[int, int] | None
) -> tuple[dict[str, StoredScales], list[str]]:
    """Return the scales of FP8 tensors by their names, and all problems with scales."""
    scales: dict[str, StoredScales] = {}
    problems: list[str] = []
    for piece in needed:
        stored = present.get(piece.name)
        if stored is None or stored.dtype != "F8_E4M3":
            continue
        names = [name for name in _scale_names(piece.name) if name in present]
        if not names:
            problems.append(f"{piece.name}{FP8_SCALES[0]} is missing")
            continue
        info = present[names[0]]
        found = _scale_block(stored.shape, info.shape, block)
        if found is None:
            expected = _expected_scales(stored.shape, block)
            problems.append(
                f"{names[0]} in {info.file} has shape {list(info.shape)}, expected {expected}"
            )
        if info.dtype not in SCALE_DTYPES:
            known = ", ".join(SCALE_DTYPES)
            problems.append(
                f"{names[0]} in {info.file} is of type {info.dtype}; supported: {known}"
            )
        scales[piece.name] = StoredScales(names[0], found or (1, 1))
    return scales, problems


def _scale_names(name: str) -> Iterator[str]:
    """Yield the names under which programs store an FP8 tensor's scales."""
    yield from (name + ending for ending in FP8_SCALES)
    if name.endswith(".weight"):
        module = name.removesuffix(".weight")
        yield from (f"{module}.scale", f"{module}.qscale_weight")


def _scale_block(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the rows and columns of matrices ``[..., R, C]`` that share one of ``scales``.

    Scales are per block of the config, per row, per matrix, or one for all; None if of no such
    shape. The leading dim, if any, is that of experts.
    """
    if len(shape) < 2:
        return None
    *lead, rows, columns = shape
    if block is not None:
        grid = -(-rows // block[0]), -(-columns // block[1])
        if scales == (*lead, *grid):
            return block
    if scales in ((*lead, rows), (*lead, rows, 1)):
        return 1, columns
    whole = {tuple(lead), (*lead, 1), (*lead, 1, 1), (), (1,), (1, 1)}
    return (rows, columns) if scales in whole else None


def _expected_scales(shape: tuple[int, ...], block: tuple[int, int] | None) -> str:
    """Return the shapes that scales of a tensor may have, as text."""
    *lead, rows, columns = shape
    allowed = [[*lead, rows, 1], [*lead, 1]]
    if block is None:
        return (
            f"{' or '.join(map(str, allowed))}, as config.json has no weight_block_size; add it "
            "to quantization_config if scales are per block"
        )
    height, width = block
    grid = [*lead, -(-rows // height), -(-columns // width)]
    others = " or ".join(map(str, allowed))
    return f"{grid} for blocks of {height} x {width}, or {others}"


def _code_problems(piece: TensorPiece, present: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield the problems of a tensor ``[E, in, out]`` stored as MXFP4 codes.

    Codes are bytes ``[E, out, in / 32, 16]``, their scales ``[E, out, in / 32]``.
    """
    codes = piece.name + MXFP4_CODES
    scales = piece.name + MXFP4_SCALES
    if scales not in present:
        yield (
            f"{scales} is missing, but needed to dequantise {codes} in {present[codes].file}; "
            "download the file that has it, or the same weights in BF16"
        )
    experts, inner, outer = piece.shape
    shape = (experts, outer, inner // MXFP4_BLOCK)
    for name, expected in ((codes, (*shape, MXFP4_BLOCK // 2)), (scales, shape)):
        info = present.get(name)
        if info is not None and (info.shape != expected or inner % MXFP4_BLOCK):
            yield f"{name} has shape {list(info.shape)}, expected {list(expected)}"
        if info is not None and info.dtype != "U8":
            yield f"{name} is of type {info.dtype}; supported: U8"
