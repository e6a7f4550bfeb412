"""Attention by blocks: each kernel against the plain one, and any cut against the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.kernels.attention import block_fused, block_plain, sdpa
from moefold.kernels.attention.block import Band, Tile, attention, causal_tiles, choose_kernel
from tests import references
from tests.cpu.small import relative

SCALE = 0.35
DIMS = [(4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 8, 8), (4, 4, 12, 6), (2, 2, 4, 7)]
"""Query heads, key-value heads, query-key dims, value dims."""
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16)}


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def inputs(rows: int, keys: int, dims: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    heads, kv_heads, d, v = dims
    shapes = ((rows, heads, d), (keys, kv_heads, d), (keys, kv_heads, v))
    return [drawn(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def run(function: Any, given: list[Tensor], *args: Any) -> list[Tensor]:
    """Return the output and the gradients of all inputs."""
    fresh = [x.detach().clone().requires_grad_() for x in given]
    out = function(*fresh, *args)
    out.backward(drawn(*out.shape, dtype=out.dtype, seed=9))
    return [out.detach(), *(x.grad for x in fresh if x.grad is not None)]


@pytest.fixture(params=["plain", "fused"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block goes through these."""
    monkeypatch.setattr(block_fused, "fits", lambda q, v: request.param == "fused")


@pytest.mark.parametrize("widened", [True, False])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize(("rows", "keys", "causal"), [(6, 6, True), (5, 7, False), (1, 3, False)])
def test_the_fused_kernels_equal_the_plain_ones(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    rows: int,
    keys: int,
    causal: bool,
    widened: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not widened:
        monkeypatch.setattr(block_fused, "FP32_LIMIT", 0)
    q, k, v = (x.detach()[None].transpose(1, 2) for x in inputs(rows, keys, dims, dtype))
    wide = q.double(), k.double(), v.double()
    out, lse = block_plain.forward(*wide, SCALE, causal)
    got, got_lse = block_fused.forward(q, k, v, SCALE, causal)
    assert got.dtype == dtype and got_lse.dtype == torch.promote_types(dtype, torch.float32)
    assert relative(got, out) < 4 * EPS[dtype]
    assert relative(got_lse, lse) < 4 * EPS[got_lse.dtype]
    # Statistics of rows that saw more than this block.
    out, lse = out * 0.7, lse + 0.3
    grad = drawn(*out.shape, seed=5)
    expected = block_plain.backward(grad, *wide, out, lse, SCALE, causal)
    merged = out.to(dtype), lse.to(got_lse.dtype)
    got_shares = block_fused.backward(grad.to(dtype), q, k, v, *merged, SCALE, causal)
    for share, of in zip(got_shares, expected, strict=True):
        assert share.shape == of.shape and relative(share, of) < 8 * EPS[dtype]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("lengths", [(12,), (5, 5, 2), (1, 4, 4, 3), (3, 3, 3), ()])
def test_segments_equal_the_reference(lengths: tuple[int, ...], dims: tuple[int, ...]) -> None:
    given = inputs(14, 14, dims, torch.float64)
    ours = run(attention, given, causal_tiles(lengths), SCALE)
    theirs = (
        run(references.attention, given, lengths, SCALE)
        if lengths
        else [torch.zeros_like(x) for x in ours]
    )
    assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(ours, theirs, strict=True))
    assert not ours[0][sum(lengths) :].any() and not ours[1][sum(lengths) :].any()


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("order", [1, -1])
def test_a_causal_segment_is_the_same_in_any_cut_and_order(dtype: torch.dtype, order: int) -> None:
    """Triangles on the diagonal, and below it rectangles of any shape."""
    tiles = [
        *causal_tiles((4, 4, 5)),
        Tile(slice(4, 13), slice(0, 3)),
        Tile(slice(4, 8), slice(3, 4)),
        Tile(slice(8, 13), slice(3, 8)),
    ]
    given = inputs(13, 13, DIMS[1], dtype)
    ours = run(attention, given, tiles[::order], SCALE)
    theirs = run(references.attention, [x.double() for x in given], (13,), SCALE)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype and relative(a, b) < 8 * EPS[dtype]


def test_large_scores_neither_overflow_nor_vanish() -> None:
    """Denominators overflow fp32 unless their logarithms are merged; errors grow as scores do."""
    given = [x.detach() * 30 for x in inputs(8, 8, DIMS[0], torch.float32)]
    tiles = [*causal_tiles((4, 4)), Tile(slice(4, 8), slice(0, 4))]
    ours = run(attention, given, tiles, SCALE)
    theirs = run(references.attention, [x.double() for x in given], (8,), SCALE)
    largest = float(torch.einsum("qhd,khd->hqk", given[0], given[1]).abs().max()) * SCALE
    assert largest > 1000
    assert all(a.isfinite().all() for a in ours)
    # Not of queries' and keys' gradients: they are differences of what is nearly equal here.
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert name in ("dq", "dk") or relative(a, b) < 4 * largest * EPS[torch.float32]


def test_gradients_of_short_segments_in_bf16_are_rounded_once() -> None:
    """Of keys and values they are sums over rows, which the 16-bit kernel rounds as it goes."""
    given = inputs(512, 512, (4, 2, 32, 32), torch.bfloat16)
    wide = [x.detach().double() for x in given]
    ours = run(sdpa.attention, given, (256, 256), SCALE)
    theirs = run(references.attention, wide, (256, 256), SCALE)
    assert all(
        relative(a, b) < 0.4 * EPS[torch.bfloat16] for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.usefixtures("kernels")
def test_rows_of_no_tile_leak_nothing() -> None:
    """Padding rows hold NaN and infinity everywhere, the gradient too."""
    given = [x.detach() for x in inputs(9, 9, DIMS[0], torch.float64)]
    clean = run(attention, [x[:6] for x in given], causal_tiles((4, 2)), SCALE)
    for x, value in zip(given, (float("nan"), float("inf"), float("nan")), strict=True):
        x[6:] = value
    q, k, v = fresh = [x.requires_grad_() for x in given]
    out = attention(q, k, v, causal_tiles((4, 2)), SCALE)
    grad = drawn(6, *out.shape[1:], seed=9)
    out.backward(torch.cat([grad, grad.new_full((3, *out.shape[1:]), float("nan"))]))
    for got, expected in zip((out, *(x.grad for x in fresh)), clean, strict=True):
        assert got is not None and torch.allclose(got[:6], expected, rtol=1e-14)
        assert not got[6:].any()


def test_kernels_are_chosen_by_what_fits() -> None:
    q = torch.zeros(1, 2, 3, 4)
    triangle, square = Tile(slice(3), slice(3), 1), Tile(slice(3), slice(3))
    assert choose_kernel(triangle, q, q) == (block_fused, (True,))
    assert choose_kernel(square, q, q) == (block_fused, (False,))
    assert choose_kernel(square, q.to("meta"), q.to("meta")) == (block_plain, (False,))
    band = Band(0, 2)
    assert choose_kernel(triangle._replace(band=band), q, q) == (block_plain, (False, band))
