"""Quantised tensors: low-precision codes, a scale per block, and for some kinds one per matrix.

Kinds, with blocks of rows (activations and gradients) and of weights, across and along the summed
dim:

* ``fp8_tensor``: FP8, the whole matrix; scale 448 / amax in fp32. Gradients are E5M2.
* ``fp8_block``: E4M3, 1 x 128, weights 128 x 128; scale 448 / amax rounded down to a power of two
  (TransformerEngine), or unrounded (``scales="fp32"``).
* ``mxfp8``: E4M3, 1 x 32; E8M0 of amax / 448 rounded up, or OCP's rule (``scales="floor"``).
* ``nvfp4``: E2M1, 1 x 16, weights 16 x 16; E4M3 per block and fp32 per matrix.

All arithmetic is fp32. Stored scales are those for dequantisation. A block (or matrix, if that has
the scale) with a NaN or an Inf is dequantised to NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise import elements
from moefold.kernels.quantise.config import QUANTISE
from moefold.kernels.quantise.elements import E4M3, E5M2, E8M0, LARGEST, LARGEST_E2M1

Role = Literal["rows", "gradient", "weight"]
BLOCKS: dict[str, int | None] = {k: r.block_length for k, r in QUANTISE.kinds.items()}  # type: ignore[attr-defined]
"""Elements of a block along the summed dim; None if a matrix is one block."""
SQUARE_BLOCKS = ("fp8_block", "nvfp4")
"""Kinds with square blocks of weights."""
SCALES = {
    "fp8_tensor": ("fp32",),
    "fp8_block": ("power", "fp32"),
    "mxfp8": ("up", "floor"),
    "nvfp4": ("e4m3",),
}
"""Rules for scales of each kind, its default first."""
LARGEST_FP32 = torch.finfo(torch.float32).max


class Format(NamedTuple):
    """Quantisation format of one tensor."""

    kind: str
    role: str
    element: torch.dtype | None
    """dtype of codes; None is E2M1."""
    rows: int | None
    """Elements of a block across the summed dim; None is all."""
    columns: int | None
    """Elements of a block along the summed dim; None is all."""
    scales: str


def format_of(kind: str, role: str, scales: str | None = None, block: int | None = None) -> Format:
    """Return the format of a tensor.

    Args:
        kind: a kind of this module.
        role: ``rows`` of activations, their ``gradient``, or a ``weight``.
        scales: the rule for scales; None is the kind's default.
        block: elements along the summed dim instead of the published number, for small tensors.

    Raises:
        ValueError: the kind, role or rule is unknown.
    """
    if kind not in BLOCKS:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(BLOCKS)}")
    if role not in ("rows", "gradient", "weight"):
        raise ValueError(f"role is {role!r}; it must be one of rows, gradient, weight")
    rule = scales or SCALES[kind][0]
    if rule not in SCALES[kind]:
        raise ValueError(f"scales of {kind} are {scales!r}; must be {' or '.join(SCALES[kind])}")
    if kind == "fp8_tensor":
        return Format(kind, role, E5M2 if role == "gradient" else E4M3, None, None, rule)
    length = block or BLOCKS[kind]
    across = length if role == "weight" and kind in SQUARE_BLOCKS else 1
    return Format(kind, role, None if kind == "nvfp4" else E4M3, across, length, rule)


@dataclass(frozen=True)
class Quantised:
    """A tensor of one or more matrices (the last two dims) as codes and scales."""

    codes: Tensor
    """float8, or two E2M1 codes in a uint8 along ``dim``, padded to whole blocks there."""
    scales: Tensor
    """Scale of each block: fp32, E8M0 or E4M3."""
    matrix_scale: Tensor | None
    """fp32 scale of each matrix in addition to block scales; None if the kind has none."""
    format: Format
    dim: int
    """Summed dim, along which blocks lie: -1 or -2."""
    shape: torch.Size

    @property
    def output_scale(self) -> Tensor | None:
        """fp32 scale of each matrix, applied to a product after summation, or None."""
        return self.scales if self.format.columns is None else self.matrix_scale

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        tensors = (self.codes, self.scales, self.matrix_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _map(self, view: Callable[[Tensor], Tensor], dim: int) -> "Quantised":
        matrix_scale = None if self.matrix_scale is None else view(self.matrix_scale)
        shape = view(torch.empty(self.shape, device="meta")).shape
        return Quantised(view(self.codes), view(self.scales), matrix_scale, self.format, dim, shape)

    @property
    def mT(self) -> "Quantised":
        """Transpose of the last two dims."""
        return self._map(lambda x: x.mT, -3 - self.dim)

    def matrix(self, index: int) -> "Quantised":
        """Return a matrix of a tensor with three dims."""
        return self._map(lambda x: x[index], self.dim)

    def factors(self, dtype: torch.dtype) -> Tensor:
        """Return codes times block scales, the factors of a product, exact in fp32 and wider."""
        if self.dim == -2:
            return self.mT.factors(dtype).mT
        if len(self.shape) == 1:
            return self._map(lambda x: x[None], -1).factors(dtype)[0]
        codes = self.codes
        form = self.format
        if form.element is None:
            values = elements.decode_e2m1(elements.unpack(codes), dtype)[..., : self.shape[-1]]
        else:
            values = codes.to(dtype)
        if form.columns is None:
            return values
        assert form.rows is not None
        scales = self.scales.to(torch.float32).to(dtype)
        blocks = _to_blocks(values, form.rows, form.columns).mul_(scales[..., :, None, :, None])
        return _from_blocks(blocks, *self.shape[-2:])

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor's numbers in ``dtype``."""
        scale = self.output_scale
        values = self.factors(dtype if dtype == torch.float64 else torch.float32)
        return (values if scale is None else values * scale).to(dtype)


def quantise(
    x: Tensor,
    kind: str,
    dim: int = -1,
    *,
    role: str = "rows",
    scales: str | None = None,
    chance: Tensor | None = None,
) -> Quantised:
    """Quantise a tensor as training does.

    Args:
        x: floating point, at least one dim; the last two are a matrix, dims before are batches.
        kind: ``fp8_tensor``, ``fp8_block``, ``mxfp8`` or ``nvfp4``.
        dim: summed dim, along which blocks lie: -1 or -2.
        role: ``rows`` of activations, their ``gradient``, or a ``weight``.
        scales: a rule for scales other than the default: ``fp32`` of ``fp8_block``, ``floor`` of
            ``mxfp8``.
        chance: multiples of 2^-16 in [0, 1), shaped as ``x``: stochastic rounding for ``nvfp4``.

    Raises:
        ValueError: kind, role, rule or dim is unknown, ``x`` has no dims or is not floating point,
            or ``chance`` has another shape or is given for another kind.
    """
    if dim not in (-1, -2) or x.ndim < -dim:
        raise ValueError(f"dim {dim} of {x.ndim} dims: it must be -1, or -2 with 2 dims or more")
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; it must be floating point")
    if chance is not None and (kind != "nvfp4" or chance.shape != x.shape):
        raise ValueError(f"chance is for nvfp4 alone, in the shape of x, {tuple(x.shape)}")
    if x.ndim == 1:
        row = None if chance is None else chance[None]
        quantised = quantise(x[None], kind, role=role, scales=scales, chance=row)
        return quantised._map(lambda matrix: matrix[0], -1)
    return encode(x, format_of(kind, role, scales), dim, chance)


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude of each matrix, fp32 [..., 1, 1]; NaN if it contains NaN."""
    if not x.shape[-1] * x.shape[-2]:
        return x.new_zeros(*x.shape[:-2], 1, 1, dtype=torch.float32)
    return x.abs().amax((-2, -1), keepdim=True).float()


def encode(
    x: Tensor,
    form: Format,
    dim: int = -1,
    chance: Tensor | None = None,
    amax: Tensor | None = None,
) -> Quantised:
    """Quantise ``x`` to a format.

    Args:
        x: at least two dims.
        form: the format.
        dim: summed dim, along which blocks lie: -1 or -2.
        chance: for stochastic rounding, as in :func:`quantise`.
        amax: fp32 [..., 1, 1] of the full matrices if ``x`` is parts of them; None is that of x.
    """
    if dim == -2:
        return encode(x.mT, form, -1, None if chance is None else chance.mT, amax).mT
    values = x.float()
    if form.columns is None or form.kind == "nvfp4":
        amax = amax_of(values) if amax is None else amax
    if form.columns is None:
        assert amax is not None
        scale = compute_scales(amax, amax, form)
        return Quantised(cast(values * scale.factor, form), scale.block, None, form, -1, x.shape)
    assert form.rows is not None
    blocks = _to_blocks(values, form.rows, form.columns)
    scale = compute_scales(blocks.abs().amax((-3, -1)), amax, form)
    chance_blocks = None if chance is None else _to_blocks(chance, form.rows, form.columns)
    codes = cast(blocks * scale.factor[..., :, None, :, None], form, chance_blocks)
    if form.element is None:
        codes = elements.pack(_from_blocks(codes, x.shape[-2]))
    else:
        # A contiguous copy, without the memory of padding.
        codes = _from_blocks(codes.view(torch.uint8), *x.shape[-2:]).contiguous().view(form.element)
    return Quantised(codes, scale.block, scale.matrix, form, -1, x.shape)


class Scales(NamedTuple):
    """Scales derived from the largest magnitudes of blocks."""

    factor: Tensor
    """fp32 factor on the numbers of a block before the cast to codes."""
    block: Tensor
    """Scale of a block for dequantisation."""
    matrix: Tensor | None
    """fp32 scale of each matrix in addition to block scales; None if the kind has none."""


def compute_scales(block: Tensor, amax: Tensor | None, form: Format) -> Scales:
    """Return the scales of blocks.

    Args:
        block: fp32 [..., blocks down, blocks across], largest magnitudes of blocks.
        amax: fp32 [..., 1, 1], largest magnitudes of matrices; None if these have no scale.
        form: the format.
    """
    if form.kind == "nvfp4":
        # By TransformerEngine's rule, which never computes ``6 / amax`` of a block.
        assert amax is not None
        ratio = _ratio(LARGEST[E4M3] * LARGEST_E2M1, amax)
        ratio = torch.where(ratio == 0, 1.0, ratio)  # amax is near the largest fp32
        sixth = torch.tensor(LARGEST_E2M1, device=amax.device).reciprocal()
        scales = elements.cast(block * (ratio * sixth), E4M3)
        matrix = ratio.reciprocal()
        factor = (scales.float() * matrix).reciprocal().clamp_(max=LARGEST_FP32)
        return Scales(factor, scales, _or_nan(matrix, amax))
    assert form.element is not None
    if form.kind == "mxfp8":
        if form.scales == "up":
            largest = torch.full_like(block, LARGEST[form.element])
            exponent = elements.ceil_exponent(torch.div(block, largest))
        else:
            exponent = elements.floor_exponent(block, 8)
        exponent = torch.where(block.isfinite(), exponent, 255)
        # The reciprocal of 2^127, the exponent 254, is the E8M0 number 2^-127.
        factor = elements.power_of_2((254 - exponent.int()).clamp_(min=0).to(torch.uint8))
        return Scales(factor, exponent.view(E8M0), None)
    factor = _ratio(LARGEST[form.element], block)
    if form.scales == "power":
        factor = elements.floor_power_of_2(factor)
    factor = torch.where(block == 0, 1.0, factor)
    return Scales(factor, _or_nan(factor.reciprocal(), block), None)


def cast(x: Tensor, form: Format, chance: Tensor | None = None) -> Tensor:
    """Cast scaled numbers to codes; E2M1 has one code per uint8."""
    if form.element is None:
        return elements.cast_e2m1(x, chance)
    return elements.cast(x, form.element)


def _ratio(largest: float, amax: Tensor) -> Tensor:
    # Torch divides a number by a tensor as number * reciprocal, which rounds twice.
    return torch.div(torch.full_like(amax, largest), amax).clamp_(max=LARGEST_FP32)


def _or_nan(scale: Tensor, amax: Tensor) -> Tensor:
    return torch.where(amax.isfinite(), scale, torch.nan)


def _to_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return [..., R / rows, rows, C / columns, columns]; the last blocks are padded with zeros."""
    extra_rows = -x.shape[-2] % rows
    extra_columns = -x.shape[-1] % columns
    x = F.pad(x, (0, extra_columns, 0, extra_rows)) if extra_rows or extra_columns else x
    return x.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns))


def _from_blocks(blocks: Tensor, rows: int, columns: int | None = None) -> Tensor:
    """Return matrices from their blocks, without padding."""
    return blocks.flatten(-2).flatten(-3, -2)[..., :rows, :columns]
