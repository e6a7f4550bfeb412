"""Rotary embedding as Triton kernels for forward and backward: of heads, and of MLA's keys.

T rows, H heads; a head has n unchanged dims, then r rotated dims in p = r / 2 pairs; values have v
dims. Arithmetic is fp32. Each kernel reads its inputs and writes its outputs once.
"""

from typing import Any

from torch import Tensor

from moefold.kernels.fused import Op, contiguous_in_rows, jit, next_power_of_2, tl

ELEMENTS = 2048
"""Elements of a program's block."""


@jit
def _rotate_pairs(a, b, c, s, INVERSE: tl.constexpr):
    """Rotate pairs by their angles, or by minus these."""
    if INVERSE:
        s = -s
    return a * c - b * s, b * c + a * s


@jit
def _heads(
    x, cos, sin, y,
    heads, nope, pairs, row_stride, head_stride,
    STRIDE: tl.constexpr, DISTANCE, INVERSE: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate the last dims of a row's heads."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    mask = pair < pairs
    first = (nope + pair * STRIDE)[None, :]
    c = tl.load(cos + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)[None, :]
    for block in range(0, heads, HEADS):
        head = (block + tl.arange(0, HEADS))[:, None]
        source = x + row * row_stride + head.to(tl.int64) * head_stride
        target = y + (row * heads + head) * (nope + 2 * pairs)
        if NOPE:
            n = tl.arange(0, NOPE)[None, :]
            nope_mask = (head < heads) & (n < nope)
            tl.store(target + n, tl.load(source + n, mask=nope_mask, other=0.0), mask=nope_mask)
        inside = (head < heads) & mask[None, :]
        a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + first + DISTANCE, mask=inside, other=0.0).to(tl.float32)
        a, b = _rotate_pairs(a, b, c, s, INVERSE)
        tl.store(target + first, a.to(y.dtype.element_ty), mask=inside)
        tl.store(target + first + DISTANCE, b.to(y.dtype.element_ty), mask=inside)


@jit
def _expand(
    kv, rope, cos, sin, k, v,
    heads, nope, values, pairs, rope_stride,
    STRIDE: tl.constexpr, DISTANCE, HEADS: tl.constexpr, NOPE: tl.constexpr, VALUES: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Write a row's keys, with a common position part, and its values."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    n = tl.arange(0, NOPE)[None, :]
    m = tl.arange(0, VALUES)[None, :]
    mask = pair < pairs
    first = pair * STRIDE
    c = tl.load(cos + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)
    rope_ptrs = rope + row * rope_stride + first
    a = tl.load(rope_ptrs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(rope_ptrs + DISTANCE, mask=mask, other=0.0).to(tl.float32)
    a, b = _rotate_pairs(a, b, c, s, False)
    for block in range(0, heads, HEADS):
        head = (block + tl.arange(0, HEADS))[:, None]
        head_mask = head < heads
        index = row * heads + head
        source = kv + index * (nope + values)
        target = k + index * (nope + 2 * pairs)
        nope_mask = head_mask & (n < nope)
        tl.store(target + n, tl.load(source + n, mask=nope_mask, other=0.0), mask=nope_mask)
        value_mask = head_mask & (m < values)
        value = tl.load(source + nope + m, mask=value_mask, other=0.0)
        tl.store(v + index * values + m, value, mask=value_mask)
        inside = head_mask & mask[None, :]
        rotated_ptrs = target + nope + first[None, :]
        a_hp = tl.broadcast_to(a[None, :], (HEADS, PAIRS))
        tl.store(rotated_ptrs, a_hp.to(k.dtype.element_ty), mask=inside)
        b_hp = tl.broadcast_to(b[None, :], (HEADS, PAIRS))
        tl.store(rotated_ptrs + DISTANCE, b_hp.to(k.dtype.element_ty), mask=inside)


@jit
def _expand_backward(
    dk, dv, cos, sin, dkv, drope,
    heads, nope, values, pairs,
    STRIDE: tl.constexpr, DISTANCE, HEADS: tl.constexpr, NOPE: tl.constexpr, VALUES: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Compute a row's gradients: that of the position part is the sum over heads, rotated back."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    n = tl.arange(0, NOPE)[None, :]
    m = tl.arange(0, VALUES)[None, :]
    mask = pair < pairs
    first = pair * STRIDE
    a = tl.zeros((PAIRS,), tl.float32)
    b = tl.zeros((PAIRS,), tl.float32)
    for block in range(0, heads, HEADS):
        head = (block + tl.arange(0, HEADS))[:, None]
        head_mask = head < heads
        index = row * heads + head
        source = dk + index * (nope + 2 * pairs)
        target = dkv + index * (nope + values)
        nope_mask = head_mask & (n < nope)
        tl.store(target + n, tl.load(source + n, mask=nope_mask, other=0.0), mask=nope_mask)
        value_mask = head_mask & (m < values)
        value = tl.load(dv + index * values + m, mask=value_mask, other=0.0)
        tl.store(target + nope + m, value, mask=value_mask)
        inside = head_mask & mask[None, :]
        rotated_ptrs = source + nope + first[None, :]
        a += tl.sum(tl.load(rotated_ptrs, mask=inside, other=0.0).to(tl.float32), 0)
        b += tl.sum(tl.load(rotated_ptrs + DISTANCE, mask=inside, other=0.0).to(tl.float32), 0)
    c = tl.load(cos + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + row * pairs + pair, mask=mask, other=0.0).to(tl.float32)
    a, b = _rotate_pairs(a, b, c, s, True)
    rope_ptrs = drope + row * (2 * pairs) + first
    tl.store(rope_ptrs, a.to(drope.dtype.element_ty), mask=mask)
    tl.store(rope_ptrs + DISTANCE, b.to(drope.dtype.element_ty), mask=mask)


def rotate_heads(
    x_THd: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, interleaved: bool, inverse: bool
) -> Tensor:
    """Rotate the last 2 p dims of heads by their rows' angles, or by minus these if ``inverse``.

    A pair is dims i and i + p of these, or 2i and 2i + 1 if ``interleaved``.
    """
    y_THd = _empty_like(x_THd)
    (tokens, heads, dims) = x_THd.shape
    pairs = cos_Tp.shape[1]
    nope = dims - 2 * pairs
    x_THd = contiguous_in_rows(x_THd)
    lanes = next_power_of_2(nope) if nope else 0, next_power_of_2(pairs)
    most = max(1, ELEMENTS // (lanes[0] + 2 * lanes[1]))
    block = min(next_power_of_2(heads), 1 << (most.bit_length() - 1))
    if y_THd.numel():
        _heads[(tokens,)](
            x_THd, cos_Tp, sin_Tp, y_THd, heads, nope, pairs, x_THd.stride(0), x_THd.stride(1),
            *_pairs(pairs, interleaved), inverse, block, *lanes,
        )  # fmt: skip
    return y_THd


def expand_latents(
    kv_THx: Tensor,
    rope_Tr: Tensor,
    cos_Tp: Tensor,
    sin_Tp: Tensor,
    nope_dim: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return MLA's keys [T, H, n + r] and values [T, H, v].

    Args:
        kv_THx: n dims of each head's key, then v dims of its value.
        rope_Tr: position part of all heads' keys before rotation.
        cos_Tp: cosines of each row's angles.
        sin_Tp: sines of each row's angles.
        nope_dim: n.
        interleaved: pairing of dims, as in :func:`rotate_heads`.
    """
    results = _empty_expanded(kv_THx, rope_Tr, cos_Tp, sin_Tp, nope_dim)
    (tokens, heads, dims) = kv_THx.shape
    pairs = cos_Tp.shape[1]
    rope_Tr = contiguous_in_rows(rope_Tr)
    sizes = nope_dim, dims - nope_dim, pairs
    if tokens:
        _expand[(tokens,)](
            kv_THx.contiguous(), rope_Tr, cos_Tp, sin_Tp, *results, heads, *sizes,
            rope_Tr.stride(0), *_pairs(pairs, interleaved), *_tile(heads, sizes),
        )  # fmt: skip
    return results


def expand_latents_backward(
    dk_THd: Tensor, dv_THv: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, nope_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients ``dkv_THx`` and ``drope_Tr``."""
    results = _empty_gradients(dk_THd, dv_THv, cos_Tp, sin_Tp, nope_dim)
    (tokens, heads, dims) = dv_THv.shape
    pairs = cos_Tp.shape[1]
    sizes = nope_dim, dims, pairs
    if tokens:
        _expand_backward[(tokens,)](
            dk_THd.contiguous(), dv_THv.contiguous(), cos_Tp, sin_Tp, *results, heads, *sizes,
            *_pairs(pairs, interleaved), *_tile(heads, sizes),
        )  # fmt: skip
    return results


def _pairs(pairs: int, interleaved: bool) -> tuple[int, int]:
    """Return the distance of first dims of adjacent pairs, and of the two dims of a pair."""
    return 1 + interleaved, 1 if interleaved else pairs


def _tile(heads: int, sizes: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Return the heads of a block, and the padded sizes n, v and p."""
    nope, values, pairs = map(next_power_of_2, sizes)
    most = max(1, 2 * ELEMENTS // (nope + values + pairs))
    return min(next_power_of_2(heads), 1 << (most.bit_length() - 1)), nope, values, pairs


def _empty_like(x_THd: Tensor, *_: Any) -> Tensor:
    return x_THd.new_empty(x_THd.shape)


def _empty_expanded(
    kv_THx: Tensor, rope_Tr: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, nope: int, *_: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads, dims = kv_THx.shape
    k_THd = kv_THx.new_empty(tokens, heads, nope + rope_Tr.shape[1])
    return k_THd, kv_THx.new_empty(tokens, heads, dims - nope)


def _empty_gradients(
    dk_THd: Tensor, dv_THv: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, nope: int, *_: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads, dims = dv_THv.shape
    dkv_THx = dk_THd.new_empty(tokens, heads, nope + dims)
    return dkv_THx, dk_THd.new_empty(tokens, dk_THd.shape[2] - nope)


rotate = Op(rotate_heads, _empty_like)
expand = Op(expand_latents, _empty_expanded)
expand_backward = Op(expand_latents_backward, _empty_gradients)
