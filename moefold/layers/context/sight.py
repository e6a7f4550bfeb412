"""Causal visibility between the rows of context ranks, computed on the host.

A micro-batch is cut into ``2 * ranks`` pieces, of which rank r holds piece r and piece
``2 * ranks - 1 - r``. Between two ranks at most one segment is visible: one that reaches from a
piece of one rank into a later piece of the other. All its rows in the later pieces attend to all
its rows in the earlier ones, so that visibility is a single rectangle, and no mask is needed. With
a window it is a stripe along the diagonal of each pair of pieces.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

from torch import Tensor

from moefold.kernels.attention.block import Band, Tile, causal_tiles


class Heads(NamedTuple):
    """Input of attention on one rank.

    T rows, H query heads, G key-value heads, d query-key dims and v value dims per head.
    """

    q_THd: Tensor
    k_TGd: Tensor
    v_TGv: Tensor
    scale: float
    """Factor on the scores."""
    lengths: tuple[int, ...]
    """Length of each segment of the whole micro-batch; further rows are padding."""
    window: int | None = None
    """Number of rows that a row attends to, including itself; None is no limit."""
    sinks_H: Tensor | None = None
    """Attention sinks: a logit of each local head whose value is zero."""

    def sight(self, ranks: int) -> "Sight":
        """Return the visibility of rows if ``ranks`` share the micro-batch."""
        return Sight(self.lengths, self.q_THd.shape[0], ranks, self.window)


class View(NamedTuple):
    """Rows that attend, and rows attended to, as local indices on their ranks."""

    queries: range
    keys: range


NOTHING = View(range(0), range(0))


@dataclass(frozen=True)
class Sight:
    """Visibility among ``ranks`` with ``rows`` rows each; a single rank has its rows in order.

    ``lengths`` and ``window`` are those of :class:`Heads`.
    """

    lengths: tuple[int, ...]
    rows: int
    ranks: int
    window: int | None = None

    def tiles(self, asking: int, owner: int) -> list[Tile]:
        """Return the tiles of queries of ``asking`` and keys of ``owner``, which may be equal."""
        if self.window is not None:
            return list(self._stripes(asking, owner, self.window))
        if asking == owner:  # a segment's rows lie in order
            here = (len(self._inside(span, asking)) for span in self._spans)
            return causal_tiles(here)
        view = self.view(asking, owner)
        queries, keys = (slice(rows.start, rows.stop) for rows in view)
        return [Tile(queries, keys)] if view.keys else []

    def view(self, asking: int, owner: int) -> View:
        """Return the rows of ``asking`` that attend to another rank, and those of ``owner`` needed.

        With a window these are the bounding rectangle.
        """
        if self.window is not None:
            if not (tiles := self.tiles(asking, owner)):
                return NOTHING
            sides = [tile.queries for tile in tiles], [tile.keys for tile in tiles]
            return View(*(range(min(s.start for s in x), max(s.stop for s in x)) for x in sides))
        piece = self._piece
        if owner < asking:
            # Both pieces of ``asking`` see the last rows of the owner's first piece.
            span = self._span((owner + 1) * piece - 1)
            queries, keys = self._inside(span, asking), self._inside(span, owner)
            keys = range(keys.start, min(keys.stop, piece))
        else:
            # The second piece of ``asking`` sees both of the owner, as far as the segment reaches.
            span = self._span((2 * self.ranks - 1 - asking) * piece)
            queries, keys = self._inside(span, asking), self._inside(span, owner)
            queries = range(max(queries.start, piece), queries.stop)
        return View(queries, keys) if queries and keys else NOTHING

    def _stripes(self, asking: int, owner: int, window: int) -> Iterator[Tile]:
        """Yield the tiles of a window, by document and pair of pieces."""
        for span in self._spans:
            keys = list(self._inside_pieces(span, owner))
            for (queries, at), (seen, lies) in product(self._inside_pieces(span, asking), keys):
                if queries.start == seen.start:
                    yield from _diagonal(queries, window, at)
                elif seen.start < queries.start:
                    yield from _corner(queries, seen, window, at, lies)

    @property
    def _piece(self) -> int:
        assert self.rows % 2 == 0, f"{self.rows} rows cannot be cut into two equal pieces"
        return self.rows // 2

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.lengths))

    @cached_property
    def _spans(self) -> list[range]:
        return [range(e - n, e) for e, n in zip(self._ends, self.lengths, strict=True)]

    def _span(self, row: int) -> range:
        """Return the segment of a row of the whole micro-batch; empty for padding."""
        number = bisect_right(self._ends, row)
        return self._spans[number] if number < len(self._spans) else range(0)

    def _inside(self, span: range, rank: int) -> range:
        """Return the local rows of a rank that lie in a span of the whole micro-batch.

        Parts of both pieces form one range: the span then includes the end of the first piece.
        """
        parts = [
            range(part.start + shift, part.stop + shift)
            for part, shift in self._inside_pieces(span, rank)
        ]
        return range(parts[0].start, parts[-1].stop) if parts else range(0)

    def _inside_pieces(self, span: range, rank: int) -> Iterator[tuple[range, int]]:
        """Yield the part of a span in each piece of a rank, and its offset to local rows."""
        if self.ranks == 1:
            pieces = [(range(self.rows), 0)]
        else:
            piece = self._piece
            pieces = [
                (range(number * piece, (number + 1) * piece), (place - number) * piece)
                for place, number in enumerate((rank, 2 * self.ranks - 1 - rank))
            ]
        for piece, shift in pieces:
            start, end = max(span.start, piece.start), min(span.stop, piece.stop)
            if start < end:
                yield range(start, end), shift


def _diagonal(rows: range, window: int, shift: int) -> Iterator[Tile]:
    """Yield the windowed tiles of consecutive rows with themselves, in chunks of window length.

    Within a chunk they are causal; of the preceding chunk each row sees a band.
    """
    first, count = rows.start + shift, len(rows) // window
    last = first + count * window
    end = rows.stop + shift
    if count:
        yield Tile(slice(first, last), slice(first, last), count)
    if count > 1:
        queries, keys = slice(first + window, last), slice(first, last - window)
        yield Tile(queries, keys, count - 1, Band(window, window))
    if last < end:
        yield Tile(slice(last, end), slice(last, end), 1)
        if count:
            yield Tile(slice(last, end), slice(last - window, last), 1, Band(window, window))


def _corner(rows: range, seen: range, window: int, at: int, lies: int) -> Iterator[Tile]:
    """Yield the windowed tile of rows with an earlier piece, given the offsets to local rows."""
    start, end = max(seen.start, rows.start - window + 1), min(rows.stop, seen.stop - 1 + window)
    if start < seen.stop and rows.start < end:
        queries, keys = slice(rows.start + at, end + at), slice(start + lies, seen.stop + lies)
        yield Tile(queries, keys, 1, Band(rows.start - start, window))
