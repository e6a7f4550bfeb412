"""Which rows of one context rank see which of another's: arithmetic on the host.

A micro-batch is cut into ``2 * ranks`` pieces, of which rank r holds piece r and piece
``2 * ranks - 1 - r``. Between two ranks at most one segment is seen: it reaches from a piece of
the one into a later piece of the other. All its rows in the earlier pieces are seen by all its
rows in the later ones, so what one rank sees of another is one rectangle, and no mask is needed.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from moefold.kernels.attention.block import Tile, causal_tiles


class View(NamedTuple):
    """Rows that see, and rows that are seen, each by their places on their own rank."""

    queries: range
    keys: range

    def tile(self, first_key: int = 0) -> Tile:
        """Return it as a tile over keys of which the first one seen is at ``first_key``."""
        queries = slice(self.queries.start, self.queries.stop)
        return Tile(queries, slice(first_key, first_key + len(self.keys)))


NOTHING = View(range(0), range(0))


@dataclass(frozen=True)
class Sight:
    """Who sees whom among context ranks that share a micro-batch.

    Args:
        lengths: rows of each segment of the whole micro-batch; rows beyond them are padding.
        rows: rows of each rank.
        ranks: number of ranks.
    """

    lengths: tuple[int, ...]
    rows: int
    ranks: int

    def own(self, rank: int, first_key: int = 0) -> list[Tile]:
        """Return the tiles of a rank's rows among themselves: a segment's rows lie in order."""
        here = (len(self._inside(span, rank)) for span in self._spans)
        return causal_tiles(here, first_key)

    def view(self, asking: int, owner: int) -> View:
        """Return what rows of ``asking`` see of rows of ``owner``, another rank."""
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
        piece = self._piece
        parts = []
        for place, number in enumerate((rank, 2 * self.ranks - 1 - rank)):
            shift = (place - number) * piece
            start = max(span.start, number * piece)
            end = min(span.stop, (number + 1) * piece)
            if start < end:
                parts.append(range(start + shift, end + shift))
        return range(parts[0].start, parts[-1].stop) if parts else range(0)
