"""Which rows of one context rank see which of another's: arithmetic on the host.

A micro-batch is cut into ``2 * ranks`` pieces, of which rank r holds piece r and piece
``2 * ranks - 1 - r``. Between two ranks at most one segment is seen: it reaches from a piece of
the one into a later piece of the other. All its rows in the earlier pieces are seen by all its
rows in the later ones, so what one rank sees of another is one rectangle, and no mask is needed.
With a window it is a stripe along the diagonal of each pair of pieces.
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
    """What attention is given of the rows of a rank, and what these see.

    T rows, H query heads, G key-value heads, d query-key dims and v value dims per head.
    """

    q_THd: Tensor
    k_TGd: Tensor
    v_TGv: Tensor
    scale: float
    """Factor on the scores."""
    lengths: tuple[int, ...]
    """Rows of each segment of the whole micro-batch; rows beyond them are padding."""
    window: int | None = None
    """Rows that a row sees, itself among them; None is all before it."""
    sinks_H: Tensor | None = None
    """A logit of each head here that takes weight and gives nothing."""

    def sight(self, ranks: int) -> "Sight":
        """Return who sees whom where as many ranks share the micro-batch."""
        return Sight(self.lengths, self.q_THd.shape[0], ranks, self.window)


class View(NamedTuple):
    """Rows that see, and rows that are seen, each by their places on their own rank."""

    queries: range
    keys: range


NOTHING = View(range(0), range(0))


@dataclass(frozen=True)
class Sight:
    """Who sees whom among ``ranks`` that have so many ``rows`` each; one rank has them in order.

    For lengths and window see :class:`Heads`.
    """

    lengths: tuple[int, ...]
    rows: int
    ranks: int
    window: int | None = None

    def tiles(self, asking: int, owner: int) -> list[Tile]:
        """Return what rows of one rank see of rows of another, or of their own."""
        if self.window is not None:
            return list(self._stripes(asking, owner, self.window))
        if asking == owner:  # a segment's rows lie in order
            here = (len(self._inside(span, asking)) for span in self._spans)
            return causal_tiles(here)
        view = self.view(asking, owner)
        queries, keys = (slice(rows.start, rows.stop) for rows in view)
        return [Tile(queries, keys)] if view.keys else []

    def view(self, asking: int, owner: int) -> View:
        """Return what rows of ``asking`` see of rows of ``owner``, another rank.

        With a window it is the least rectangle around that.
        """
        if self.window is not None:
            return _around(self.tiles(asking, owner))
        piece = self._piece
        if owner < asking:
            # Seen from both pieces of the other: the last rows of the owner's first piece.
            span = self._span((owner + 1) * piece - 1)
            queries, keys = self._inside(span, asking), self._inside(span, owner)
            keys = range(keys.start, min(keys.stop, piece))
        else:
            # The second piece of the one sees both of the other, or what the segment has of them.
            span = self._span((2 * self.ranks - 1 - asking) * piece)
            queries, keys = self._inside(span, asking), self._inside(span, owner)
            queries = range(max(queries.start, piece), queries.stop)
        return View(queries, keys) if queries and keys else NOTHING

    def _stripes(self, asking: int, owner: int, window: int) -> Iterator[Tile]:
        """Yield the tiles of a window: documents apart, each pair of pieces by itself."""
        for span in self._spans:
            keys = list(self._inside_pieces(span, owner))
            for (queries, at), (seen, lies) in product(self._inside_pieces(span, asking), keys):
                if queries.start == seen.start:
                    yield from _diagonal(queries, window, at)
                elif seen.start < queries.start:
                    yield from _corner(queries, seen, window, at, lies)

    @property
    def _piece(self) -> int:
        assert self.rows % 2 == 0, f"{self.rows} rows are not two pieces"
        return self.rows // 2

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.lengths))

    @cached_property
    def _spans(self) -> list[range]:
        return [range(e - n, e) for e, n in zip(self._ends, self.lengths, strict=True)]

    def _span(self, row: int) -> range:
        """Return the segment that a row of the whole micro-batch is in; padding is in none."""
        number = bisect_right(self._ends, row)
        return self._spans[number] if number < len(self._spans) else range(0)

    def _inside(self, span: range, rank: int) -> range:
        """Return which of a rank's rows belong to a stretch of the whole micro-batch.

        What is there of both pieces is one stretch: it has the end of the first piece then.
        """
        parts = [
            range(part.start + shift, part.stop + shift)
            for part, shift in self._inside_pieces(span, rank)
        ]
        return range(parts[0].start, parts[-1].stop) if parts else range(0)

    def _inside_pieces(self, span: range, rank: int) -> Iterator[tuple[range, int]]:
        """Yield what of a stretch each of a rank's pieces has, and how far its rows are moved."""
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
    """Yield what rows in order see of themselves, in chunks as long as the window.

    Within a chunk they are causal, and of the chunk before each sees what the window leaves.
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
    """Yield what rows see of an earlier piece, moved by ``at`` and ``lies`` on their ranks."""
    start, end = max(seen.start, rows.start - window + 1), min(rows.stop, seen.stop - 1 + window)
    if start < seen.stop and rows.start < end:
        queries, keys = slice(rows.start + at, end + at), slice(start + lies, seen.stop + lies)
        yield Tile(queries, keys, 1, Band(rows.start - start, window))


def _around(tiles: list[Tile]) -> View:
    """Return the least rectangle around tiles."""
    if not tiles:
        return NOTHING
    queries = [tile.queries for tile in tiles]
    keys = [tile.keys for tile in tiles]
    return View(*(range(min(s.start for s in x), max(s.stop for s in x)) for x in (queries, keys)))
