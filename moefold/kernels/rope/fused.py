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
def _rotate_pairs(a, b, c, s, BACK: tl.constexpr):
    """Rotate pairs by their angles, or back."""
    if BACK:
        s = -s
    return a * c - b * s, b * c + a * s


@jit
def _heads(
    x, cos, sin, y,
    heads, stay, pairs, row_stride, head_stride,
    FIRST: tl.constexpr, APART, BACK: tl.constexpr, HEADS: tl.constexpr, STAY: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate the last dims of a row's heads."""
    row, pair = tl.program_id(0).to(tl.int64), tl.arange(0, PAIRS)
    some, first = pair < pairs, (stay + pair * FIRST)[None, :]
    c = tl.load(cos + row * pairs + pair, mask=some, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * pairs + pair, mask=some, other=0.0).to(tl.float32)[None, :]
    for block in range(0, heads, HEADS):
        head = (block + tl.arange(0, HEADS))[:, None]
        source = x + row * row_stride + head.to(tl.int64) * head_stride
        aim = y + (row * heads + head) * (stay + 2 * pairs)
        if STAY:
            n = tl.arange(0, STAY)[None, :]
            kept = (head < heads) & (n < stay)
            tl.store(aim + n, tl.load(source + n, mask=kept, other=0.0), mask=kept)
        inside = (head < heads) & some[None, :]
        a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + first + APART, mask=inside, other=0.0).to(tl.float32)
        a, b = _rotate_pairs(a, b, c, s, BACK)
        tl.store(aim + first, a.to(y.dtype.element_ty), mask=inside)
        tl.store(aim + first + APART, b.to(y.dtype.element_ty), mask=inside)


@jit
def _expand(
    kv, rope, cos, sin, k, v,
    heads, stay, values, pairs, rope_stride,
    FIRST: tl.constexpr, APART, HEADS: tl.constexpr, STAY: tl.constexpr, VALUES: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Write a row's keys, with a common position part, and its values."""
    row, pair = tl.program_id(0).to(tl.int64), tl.arange(0, PAIRS)
    n, m = tl.arange(0, STAY)[None, :], tl.arange(0, VALUES)[None, :]
    some, first = pair < pairs, pair * FIRST
    c = tl.load(cos + row * pairs + pair, mask=some, other=0.0).to(tl.float32)
    s = tl.load(sin + row * pairs + pair, mask=some, other=0.0).to(tl.float32)
    at = rope + row * rope_stride + first
    a = tl.load(at, mask=some, other=0.0).to(tl.float32)
    b = tl.load(at + APART, mask=some, other=0.0).to(tl.float32)
    a, b = _rotate_pairs(a, b, c, s, False)
    for block in range(0, heads, HEADS):
        head = (block + tl.arange(0, HEADS))[:, None]
        there, place = head < heads, row * heads + head
        source, aim = kv + place * (stay + values), k + place * (stay + 2 * pairs)
        kept = there & (n < stay)
        tl.store(aim + n, tl.load(source + n, mask=kept, other=0.0), mask=kept)
        valued = there & (m < values)
        value = tl.load(source + stay + m, mask=valued, other=0.0)
        tl.store(v + place * values + m, value, mask=valued)
        inside, turned = there & some[None, :], aim + stay + first[None, :]
        a_hp = tl.broadcast_to(a[None, :], (HEADS, PAIRS))
        tl.store(turned, a_hp.to(k.dtype.element_ty), mask=inside)
        b_hp = tl.broadcast_to(b[None, :], (HEADS, PAIRS))
        tl.store(turned + APART, b_hp.to(k.dtype.element_ty), mask=inside)


@jit
def _expand_backward(
    dk, dv, cos, sin, dkv, drope,
    heads, stay, values, pairs,
    FIRST: tl.constexpr, APART, HEADS: tl.constexpr, STAY: tl.constexpr, VALUES: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Compute a row's gradients: that of the position part is the sum over heads, rotated back."""
    row, pair = tl.program_id(0).to(tl.int64), tl.arange(0, PAIRS)
    n, m = tl.arange(0, STAY)[None, :], tl.arange(0, VALUES)[None, :]
    some, first = pair < pairs, pair * FIRST
    a = tl.zeros((PAIRS,), tl.float32)
    b = tl.zeros((PAIRS,), tl.float32)
    for block in range(0, heads, HEADS):
        head = (block + tl.arange(0, HEADS))[:, None]
        there, place = head < heads, row * heads + head
        source, aim = dk + place * (stay + 2 * pairs), dkv + place * (stay + values)
        kept = there & (n < stay)
        tl.store(aim + n, tl.load(source + n, mask=kept, other=0.0), mask=kept)
        valued = there & (m < values)
        value = tl.load(dv + place * values + m, mask=valued, other=0.0)
        tl.store(aim + stay + m, value, mask=valued)
        inside = there & some[None, :]
        at = source + stay + first[None, :]
        a += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
        b += tl.sum(tl.load(at + APART, mask=inside, other=0.0).to(tl.float32), 0)
    c = tl.load(cos + row * pairs + pair, mask=some, other=0.0).to(tl.float32)
    s = tl.load(sin + row * pairs + pair, mask=some, other=0.0).to(tl.float32)
    a, b = _rotate_pairs(a, b, c, s, True)
    at = drope + row * (2 * pairs) + first
    tl.store(at, a.to(drope.dtype.element_ty), mask=some)
    tl.store(at + APART, b.to(drope.dtype.element_ty), mask=some)


def rotate_heads(
    x_THd: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, interleaved: bool, inverse: bool
) -> Tensor:
    """Rotate the last 2 p dims of heads by their rows' angles, or ``back``.

    A pair is dims i and i + p of these, or 2i and 2i + 1 if ``interleaved``.
    """
    y_THd = _empty_like(x_THd)
    (tokens, heads, dims), pairs = x_THd.shape, cos_Tp.shape[1]
    stay = dims - 2 * pairs
    x_THd = contiguous_in_rows(x_THd)
    lanes = next_power_of_2(stay) if stay else 0, next_power_of_2(pairs)
    most = max(1, ELEMENTS // (lanes[0] + 2 * lanes[1]))
    block = min(next_power_of_2(heads), 1 << (most.bit_length() - 1))
    if y_THd.numel():
        _heads[(tokens,)](
            x_THd, cos_Tp, sin_Tp, y_THd, heads, stay, pairs, x_THd.stride(0), x_THd.stride(1),
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
        stay: n.
        interleaved: pairing of dims, as in :func:`turn_heads`.
    """
    results = _empty_expanded(kv_THx, rope_Tr, cos_Tp, sin_Tp, nope_dim)
    (tokens, heads, dims), pairs = kv_THx.shape, cos_Tp.shape[1]
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
    (tokens, heads, dims), pairs = dv_THv.shape, cos_Tp.shape[1]
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
    stay, values, pairs = map(next_power_of_2, sizes)
    most = max(1, 2 * ELEMENTS // (stay + values + pairs))
    return min(next_power_of_2(heads), 1 << (most.bit_length() - 1)), stay, values, pairs


def _empty_like(x_THd: Tensor, *_: Any) -> Tensor:
    return x_THd.new_empty(x_THd.shape)


def _empty_expanded(
    kv_THx: Tensor, rope_Tr: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, stay: int, *_: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads, dims = kv_THx.shape
    k_THd = kv_THx.new_empty(tokens, heads, stay + rope_Tr.shape[1])
    return k_THd, kv_THx.new_empty(tokens, heads, dims - stay)


def _empty_gradients(
    dk_THd: Tensor, dv_THv: Tensor, cos_Tp: Tensor, sin_Tp: Tensor, stay: int, *_: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads, dims = dv_THv.shape
    dkv_THx = dk_THd.new_empty(tokens, heads, stay + dims)
    return dkv_THx, dk_THd.new_empty(tokens, dk_THd.shape[2] - stay)


rotate = Op(rotate_heads, _empty_like)
expand = Op(expand_latents, _empty_expanded)
expand_backward = Op(expand_latents_backward, _empty_gradients)
