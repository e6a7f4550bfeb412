"""Who sees whom among context ranks, against the mask written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefold.data.batch import zigzag_rows
from moefold.kernels.attention.block import Tile
from moefold.layers.context.attend import rank_tiles
from moefold.layers.context.visibility import Visibility


def mask(lengths: tuple[int, ...], rows: int) -> Tensor:
    """Return which row (first dim) sees which, in the order of the micro-batch."""
    segment = torch.full((rows,), -1)
    segment[: sum(lengths)] = torch.arange(len(lengths)).repeat_interleave(
        torch.tensor(lengths, dtype=torch.int64)
    )
    same = (segment[:, None] == segment) & (segment[:, None] >= 0)
    return same.tril()


def shown(tiles: list[Tile], rows: int, keys: int) -> Tensor:
    """Return how often tiles show each key to each row."""
    seen = torch.zeros(rows, keys, dtype=torch.int64)
    for tile in tiles:
        part = seen[tile.queries, tile.keys]
        if not tile.segments:
            part += 1
            continue
        length = part.shape[0] // tile.segments
        for start in range(0, part.shape[0], length):
            part[start : start + length, start : start + length] += torch.ones(
                length, length, dtype=torch.int64
            ).tril()
    return seen


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Return lengths, rows of each rank, and ranks; some rows at the end may be padding."""
    ranks = draw(st.integers(1, 5))
    piece = draw(st.integers(1, 6))
    left, lengths = 2 * ranks * piece, []
    while left and draw(st.integers(0, 7)):
        lengths.append(draw(st.integers(1, left)))
        left -= lengths[-1]
    return tuple(lengths), 2 * piece, ranks


@settings(max_examples=150, deadline=None)
@given(cuts())
def test_each_rank_sees_exactly_what_the_mask_shows(cut: tuple[tuple[int, ...], int, int]) -> None:
    lengths, rows, ranks = cut
    sight, whole = Visibility(lengths, rows, ranks), mask(lengths, rows * ranks)
    places = [
        torch.cat([torch.arange(p.start, p.stop) for p in zigzag_rows(rows * ranks, r, ranks)])
        for r in range(ranks)
    ]
    for asking in range(ranks):
        expected = whole[places[asking]][:, torch.cat(places)]
        assert shown(rank_tiles(sight, asking), rows, rows * ranks).equal(expected.long())
        for owner in set(range(ranks)) - {asking}:
            view = sight.visible_rows(asking, owner)
            block = whole[places[asking]][:, places[owner]]
            # Rows that travel are those that someone sees, each and no other.
            assert block.any(0).nonzero().flatten().tolist() == list(view.keys)
            assert block.any(1).nonzero().flatten().tolist() == list(view.queries)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_document_gives_all_ranks_the_same_work(ranks: int) -> None:
    sight = Visibility((16 * ranks,), 16, ranks)
    work = [shown(rank_tiles(sight, rank), 16, 16 * ranks).sum() for rank in range(ranks)]
    assert len({int(pairs) for pairs in work}) == 1
    for asking in range(ranks):
        others = [sight.visible_rows(asking, owner) for owner in range(ranks) if owner != asking]
        assert {len(view.queries) * len(view.keys) for view in others} == {16 * 8}


def test_short_documents_are_seen_by_nobody_else() -> None:
    sight = Visibility((4,) * 8, 8, 4)
    assert not any(sight.visible_rows(a, b).keys for a in range(4) for b in range(4) if a != b)
