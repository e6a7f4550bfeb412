"""Causal visibility between the rows of context ranks, computed on the host.

A micro-batch is cut into ``2 * ranks`` pieces, of which rank r holds piece r and piece
``2 * ranks - 1 - r``. Between two ranks at most one segment is visible: one that reaches from a
piece of one rank into a later piece of the other. All its rows in the later pieces attend to all
its rows in the earlier ones, so visibility is a single rectangle and needs no mask. With a window
it is a band along the diagonal of each pair of pieces.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

from torch import Tensor

from moefold.kernels.attention.block import Band, Tile, causal_tiles


class AttentionInputs(NamedTuple):
    """Inputs of attention on one rank.

    T rows, H query heads, G key-value heads, d query-key dims and v value dims per head.
    """

    q_THd: Tensor
    k_TGd: Tensor
    v_TGv: Tensor
    scale: float
    """Factor on the scores."""
    lengths: tuple[int, ...]
    """Length of each segment of the whole micro-batch; remaining rows are padding."""
    window: int | None = None
    """Number of rows that a row attends to, including itself; None is no limit."""
    sinks_H: Tensor | None = None
    """Attention sinks: a logit of each local head whose value is zero."""

    def visibility(self, ranks: int) -> "Visibility":
        """Return the visibility of rows among ``ranks`` that share the micro-batch."""
        return Visibility(self.lengths, self.q_THd.shape[0], ranks, self.window)


class VisibleRows(NamedTuple):
    """Rows that attend, and rows attended to, as local indices on their ranks."""

    queries: range
    keys: range


NO_ROWS = VisibleRows(range(0), range(0))


@dataclass(frozen=True)
class Visibility:
    """Visibility among ``ranks`` with ``rows`` rows each; a single rank has its rows in order.

    ``lengths`` and ``window`` are those of :class:`AttentionInputs`.
    """

    lengths: tuple[int, ...]
    rows: int
    ranks: int
    window: int | None = None

    def tiles(self, query_rank: int, key_rank: int) -> list[Tile]:
        """Return the tiles of one rank's queries and the keys of the same or another rank."""
        if self.window is not None:
            return list(self._window_tiles(query_rank, key_rank, self.window))
        if query_rank == key_rank:  # a segment's rows are in order
            lengths = (len(self._local_rows(span, query_rank)) for span in self._segments)
            return causal_tiles(lengths)
        view = self.visible_rows(query_rank, key_rank)
        queries, keys = (slice(rows.start, rows.stop) for rows in view)
        return [Tile(queries, keys)] if view.keys else []

    def visible_rows(self, query_rank: int, key_rank: int) -> VisibleRows:
        """Return the query rows that attend to another rank's keys, and the key rows they need.

        With a window these form the bounding rectangle.
        """
        if self.window is not None:
            if not (tiles := self.tiles(query_rank, key_rank)):
                return NO_ROWS
            sides = [tile.queries for tile in tiles], [tile.keys for tile in tiles]
            bounds = (range(min(s.start for s in x), max(s.stop for s in x)) for x in sides)
            return VisibleRows(*bounds)
        piece = self._piece
        if key_rank < query_rank:
            # Both query pieces see the last rows of the first key piece.
            span = self._segment((key_rank + 1) * piece - 1)
            queries = self._local_rows(span, query_rank)
            keys = self._local_rows(span, key_rank)
            keys = range(keys.start, min(keys.stop, piece))
        else:
            # The second query piece sees both key pieces, as far as the segment reaches.
            number = 2 * self.ranks - 1 - query_rank
            span = self._segment(number * piece)
            queries = self._local_rows(span, query_rank)
            keys = self._local_rows(span, key_rank)
            queries = range(max(queries.start, piece), queries.stop)
        return VisibleRows(queries, keys) if queries and keys else NO_ROWS

    def _window_tiles(self, query_rank: int, key_rank: int, window: int) -> Iterator[Tile]:
        """Yield the tiles of a window, by document and pair of pieces."""
        for span in self._segments:
            key_pieces = list(self._local_pieces(span, key_rank))
            for (queries, shift), (keys, key_shift) in product(
                self._local_pieces(span, query_rank), key_pieces
            ):
                if queries.start == keys.start:
                    yield from _diagonal_tiles(queries, window, shift)
                elif keys.start < queries.start:
                    yield from _earlier_piece_tile(queries, keys, window, shift, key_shift)

    @property
    def _piece(self) -> int:
        assert self.rows % 2 == 0, f"{self.rows} rows cannot be cut into two equal pieces"
        return self.rows // 2

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.lengths))

    @cached_property
    def _segments(self) -> list[range]:
        lengths_and_ends = zip(self.lengths, self._ends, strict=True)
        return [range(end - length, end) for length, end in lengths_and_ends]

    def _segment(self, row: int) -> range:
        """Return the segment of a row of the whole micro-batch; empty for padding."""
        number = bisect_right(self._ends, row)
        if number == len(self._segments):
            return range(0)
        return self._segments[number]

    def _local_rows(self, span: range, rank: int) -> range:
        """Return the local rows of a rank that are in a span of the whole micro-batch.

        Parts in both pieces form one range, as the span then includes the end of the first piece.
        """
        parts = list(self._local_pieces(span, rank))
        if not parts:
            return range(0)
        first, first_shift = parts[0]
        last, last_shift = parts[-1]
        return range(first.start + first_shift, last.stop + last_shift)

    def _local_pieces(self, span: range, rank: int) -> Iterator[tuple[range, int]]:
        """Yield the part of a span in each piece of a rank, and its shift to local rows."""
        if self.ranks == 1:
            pieces = [(range(self.rows), 0)]
        else:
            pieces = []
            for local_index, number in enumerate((rank, 2 * self.ranks - 1 - rank)):
                start = number * self._piece
                local_start = local_index * self._piece
                pieces.append((range(start, start + self._piece), local_start - start))
        for piece, shift in pieces:
            start = max(span.start, piece.start)
            end = min(span.stop, piece.stop)
            if start < end:
                yield range(start, end), shift


def _diagonal_tiles(rows: range, window: int, shift: int) -> Iterator[Tile]:
    """Yield the tiles of a window over consecutive rows, in chunks of window length.

    Within a chunk they are causal; each row sees a band of the preceding chunk.
    """
    first = rows.start + shift
    count = len(rows) // window
    last = first + count * window
    end = rows.stop + shift
    if count:
        yield Tile(slice(first, last), slice(first, last), count)
    if count > 1:
        queries = slice(first + window, last)
        keys = slice(first, last - window)
        yield Tile(queries, keys, count - 1, Band(window, window))
    if last < end:
        yield Tile(slice(last, end), slice(last, end), 1)
        if count:
            keys = slice(last - window, last)
            yield Tile(slice(last, end), keys, 1, Band(window, window))


def _earlier_piece_tile(
    queries: range, keys: range, window: int, query_shift: int, key_shift: int
) -> Iterator[Tile]:
    """Yield the windowed tile of rows with an earlier piece, given the shifts to local rows."""
    start = max(keys.start, queries.start - window + 1)
    end = min(queries.stop, keys.stop - 1 + window)
    if start < keys.stop and queries.start < end:
        query_slice = slice(queries.start + query_shift, end + query_shift)
        key_slice = slice(start + key_shift, keys.stop + key_shift)
        yield Tile(query_slice, key_slice, 1, Band(queries.start - start, window))
