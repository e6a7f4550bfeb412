"""Attention in windows and with sinks, against a mask written out, in fp64.

T rows, H query heads, G key-value heads, d and v dims per head.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefold.data.batch import zigzag_rows
from moefold.kernels.attention.block import attention
from moefold.layers.context.attend import local_attention
from moefold.layers.context.visibility import AttentionInputs, Visibility
from tests import references

SCALE = 0.4
HEADS, KV_HEADS, DIM, VALUES = 4, 2, 6, 5


def drawn(rows: int) -> list[Tensor]:
    """Return queries, keys, values, sinks, and the output's gradient."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, HEADS, DIM), (rows, KV_HEADS, DIM), (rows, KV_HEADS, VALUES), (HEADS,))
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    grad = torch.randn(rows, HEADS, VALUES, dtype=torch.float64, generator=generator)
    return [*(x.requires_grad_() for x in made), grad]


def largest(found: Tensor, expected: Tensor, leaves: list[Tensor], grad: Tensor) -> float:
    """Return the largest difference of two outputs, and of the gradients that follow."""
    mine, theirs = (torch.autograd.grad(x, leaves, grad) for x in (found, expected))
    pairs = zip((found, *mine), (expected, *theirs), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=5), st.integers(0, 3), st.data())
def test_one_rank_equals_the_mask(lengths: list[int], padding: int, data: st.DataObject) -> None:
    window = data.draw(st.none() | st.integers(1, 16))
    q, k, v, sinks_H, grad = drawn(sum(lengths) + padding)
    with_sinks = data.draw(st.booleans())
    leaves, sinks = [q, k, v, *([sinks_H] if with_sinks else [])], sinks_H if with_sinks else None
    found = local_attention(AttentionInputs(q, k, v, SCALE, tuple(lengths), window, sinks))
    expected = references.attention(q, k, v, tuple(lengths), SCALE, window, sinks)
    assert largest(found, expected, leaves, grad) < 1e-13


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 6), st.integers(1, 9), st.data())
def test_tiles_of_context_ranks_equal_the_mask(
    ranks: int, piece: int, window: int, data: st.DataObject
) -> None:
    """The rows of all ranks, one rank after the other, each seeing what its tiles say."""
    rows, lengths = 2 * ranks * piece, list[int]()
    while sum(lengths) < rows and (not lengths or data.draw(st.integers(0, 7))):
        lengths.append(data.draw(st.integers(1, rows - sum(lengths))))
    q, k, v, sinks_H, grad = drawn(rows)
    order = torch.cat(
        [torch.arange(p.start, p.stop) for r in range(ranks) for p in zigzag_rows(rows, r, ranks)]
    )
    sight = Visibility(tuple(lengths), 2 * piece, ranks, window)
    tiles = []
    for asking in range(ranks):
        for owner in range(ranks):
            for tile in sight.tiles(asking, owner):
                first = asking * 2 * piece
                queries = slice(first + tile.queries.start, first + tile.queries.stop)
                tiles.append(tile.shift_keys(owner * 2 * piece)._replace(queries=queries))
    out = attention(q[order], k[order], v[order], tiles, SCALE, sinks_H=sinks_H)
    found = torch.empty_like(out).index_copy(0, order, out)
    expected = references.attention(q, k, v, tuple(lengths), SCALE, window, sinks_H)
    assert largest(found, expected, [q, k, v, sinks_H], grad) < 1e-13


@pytest.mark.parametrize(("window", "reach"), [(1, 0), (2, 1), (5, 1), (6, 2)])
def test_ranks_lend_only_rows_that_a_window_reaches(window: int, reach: int) -> None:
    """One document over four ranks of two pieces of four rows."""
    sight = Visibility((32,), 8, 4, window)
    for asking in range(4):
        for owner in range(4):
            tiles = sight.tiles(asking, owner)
            assert bool(tiles) == (abs(asking - owner) <= reach), (asking, owner)
            assert {row for t in tiles for row in range(8)[t.keys]} <= {
                *sight.visible_rows(asking, owner).keys
            }
