"""Pages for experts' rows: how many a rank has, and what a block keeps beside them."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

from moefold.layers.config import leaving
from moefold.model.config import Block
from moefold.planner.case import Keeping
from moefold.schedule.table import Action, Line, Step, actions_of
from moefold.spec.layer import INDEX, Saved, Shape, described

COUNTERS = 3 * INDEX
"""Bytes of a ring's counters."""
Pages = Counter[int]
"""How many there are of rows of so many bytes."""


class ChunkBlocks(NamedTuple):
    """What a chunk of a rank runs."""

    layers: Sequence[Block]
    ahead: Sequence[Block] = ()
    """Those of further tokens."""
    ends: bool = False
    """Whether it ends in the loss."""


def here(part: Saved, keeping: Keeping, gone: bool = False) -> Saved:
    """Return what a tensor leaves where it was made: numbers of pages, where its rows lie there.

    ``gone``: of those on the host too.
    """
    if not (keeping.page and part.rows and part.saved):
        return part
    return replace(part, bytes=ceil(part.rows / keeping.page) * INDEX * (1 + gone))


def pages(
    chunks: Sequence[ChunkBlocks], shape: Shape, keeping: Keeping, line: Line
) -> tuple[Pages, Pages]:
    """Return how many pages there are on the device and on the host.

    They are enough for all that is in flight at once where a rank has ``page_load`` times the mean
    of its rows on average, each tensor in pages of its own.

    Args:
        chunks: of a rank.
        shape: of a layer, with its stated room.
        keeping: with rows of a page.
        line: the rank's.
    """
    if not keeping.page:
        return Pages(), Pages()
    used = _Used(chunks, shape, keeping)
    for at, step in enumerate(line):
        if not any(action.kind in "BI" for action in actions_of(step)):
            used.fetch_for(line[at + 1 : at + 2])
        used.run(step)
        used.fetch_for(line[at + 1 : at + 2])
    return used.most, used.most_host


class _Used:
    """Pages in use layer by layer, in the order in which a rank runs its line.

    What :class:`moefold.layers.stash.PagedStash` does with pages follows from that order alone.
    """

    def __init__(self, chunks: Sequence[ChunkBlocks], shape: Shape, keeping: Keeping) -> None:
        self._in_flight = keeping.in_flight
        each = [[_of_block(one, shape, keeping) for one in (*c.layers, *c.ahead)] for c in chunks]
        self._sizes = [{at: size for at, size in enumerate(of) if size} for of in each]
        self._gone = [leaving(keeping.spill, len(one.layers), one.ends) for one in chunks]
        self._now, self._host, self.most, self.most_host = Pages(), Pages(), Pages(), Pages()
        self._out: deque[tuple[dict[int, str], int, Pages]] = deque()
        self._passes: dict[tuple[int, int], dict[int, str]] = {}
        """Of each pass in flight where its layers' rows are: here, on their way out, or away."""

    def run(self, step: Step) -> None:
        """Run a step. Of a pair layers take turns: one comes as another goes."""
        layers = [[(one, at) for at in self._order(one)] for one in actions_of(step)]
        for turn in zip_longest(*layers):
            for action, at in filter(None, turn):
                if action.kind == "F":
                    self._put(action, at)
                else:
                    self._take(action, at)

    def fetch_for(self, steps: Sequence[Step]) -> None:
        """Bring back what the backward of a step takes first."""
        for action in (one for step in steps for one in actions_of(step)):
            if action.kind in "BI" and (action.chunk, action.micro) in self._passes:
                gone = [at for at in self._order(action) if at < self._gone[action.chunk]]
                self._fetch(action, gone[0] if gone else -1, self._in_flight - 1)

    def _order(self, action: Action) -> list[int]:
        """Return the layers with pages of a pass, in the order in which it runs them."""
        if action.kind == "W":
            return []
        return sorted(self._sizes[action.chunk], reverse=action.kind != "F")

    def _put(self, action: Action, at: int) -> None:
        spot, size = (action.chunk, action.micro), self._sizes[action.chunk][at]
        states = self._passes.setdefault(spot, {})
        states[at] = "here"
        if at < self._gone[action.chunk]:
            if len(self._out) == self._in_flight:
                then, layer, pages = self._out.popleft()
                if then.get(layer) == "out":
                    then[layer] = "away"
                    self._now -= pages
            self._out.append((states, at, size))
            states[at] = "out"
            self._host += size
            self.most_host |= self._host
        self._now += size
        self.most |= self._now

    def _take(self, action: Action, at: int) -> None:
        spot, size = (action.chunk, action.micro), self._sizes[action.chunk][at]
        if at < self._gone[action.chunk]:
            self._fetch(action, at, self._in_flight)
            self._host -= size
        self._now -= size
        del self._passes[spot][at]

    def _fetch(self, action: Action, first: int, more: int) -> None:
        """Bring a layer back, and so many before it."""
        states = self._passes[action.chunk, action.micro]
        for at in range(first, max(first - more, 0) - 1, -1):
            if states.get(at) == "away":
                self._now += self._sizes[action.chunk][at]
                self.most |= self._now
            if at in states:
                states[at] = "here"


def page_bytes(found: Pages, host: Pages, page: int) -> tuple[int, int]:
    """Return the bytes of pages here and on the host, with the page for what has none, and here
    with the places in both rings.
    """
    stored = [sum((n + 1) * page * row for row, n in one.items()) for one in (found, host)]
    rings = sum((n + 1) * INDEX + COUNTERS for one in (found, host) for n in one.values())
    return stored[0] + rings, stored[1]


def _of_block(block: Block, shape: Shape, keeping: Keeping) -> Pages:
    """Return the pages that one block's rows take, by bytes of a row."""
    spec, found = described(block.ffn), Pages()
    if spec.routing is None:
        return found
    even = replace(shape, room=None, load=keeping.page_load).received(spec.routing)
    for part in spec.saved(shape):
        if part.rows and part.saved and part.kept and part.stays(keeping.recompute):
            rows = min(even, part.rows)
            found[part.bytes // part.rows] += ceil(rows / keeping.page)
    return found
