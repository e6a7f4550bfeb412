"""Pages for experts' saved rows: their number on a rank, and what a block saves besides."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

from moefold.layers.config import offloaded_layers
from moefold.model.config import Block
from moefold.planner.case import Keeping
from moefold.schedule.table import Action, Line, Step, actions_of
from moefold.spec.layer import INDEX, Saved, Shape, described

COUNTERS = 3 * INDEX
"""Bytes of a ring's counters."""
Pages = Counter[int]
"""Numbers of pages by bytes per row."""


class ChunkBlocks(NamedTuple):
    """Blocks of a chunk of a rank."""

    layers: Sequence[Block]
    multi_token: Sequence[Block] = ()
    """Multi-token prediction blocks."""
    has_loss: bool = False
    """Whether it ends in the loss."""


def unpaged(part: Saved, keeping: Keeping, offloaded: bool = False) -> Saved:
    """Return a saved tensor without the bytes of its pages; the indices of its pages remain.

    ``gone``: its pages are offloaded to the host, where they have indices too.
    """
    if not (keeping.page and part.rows and part.saved):
        return part
    return replace(part, bytes=ceil(part.rows / keeping.page) * INDEX * (1 + offloaded))


def count_pages(
    chunks: Sequence[ChunkBlocks], shape: Shape, keeping: Keeping, line: Line
) -> tuple[Pages, Pages]:
    """Return the numbers of pages on the device and on the host.

    They suffice for all passes in flight if the rank gets on average ``page_load`` times the mean
    number of rows; each tensor has pages of its own.

    Args:
        chunks: chunks of the rank.
        shape: shape of a layer, with its stated room.
        keeping: rows per page, load and spill.
        line: the rank's line in the schedule's table.
    """
    if not keeping.page:
        return Pages(), Pages()
    used = _PageSimulation(chunks, shape, keeping)
    for at, step in enumerate(line):
        if not any(action.kind in "BI" for action in actions_of(step)):
            used.fetch_for(line[at + 1 : at + 2])
        used.run(step)
        used.fetch_for(line[at + 1 : at + 2])
    return used.most, used.most_host


class _PageSimulation:
    """Simulation of the pages in use, layer by layer, as a rank runs its line.

    Use of pages by :class:`moefold.layers.stash.PagedStash` follows from that order alone.
    """

    def __init__(self, chunks: Sequence[ChunkBlocks], shape: Shape, keeping: Keeping) -> None:
        self._in_flight = keeping.in_flight
        each = [
            [_block_pages(one, shape, keeping) for one in (*c.layers, *c.multi_token)]
            for c in chunks
        ]
        self._sizes = [{at: size for at, size in enumerate(of) if size} for of in each]
        self._gone = [
            offloaded_layers(keeping.spill, len(one.layers), one.has_loss) for one in chunks
        ]
        self._now, self._host, self.most, self.most_host = Pages(), Pages(), Pages(), Pages()
        self._out: deque[tuple[dict[int, str], int, Pages]] = deque()
        self._passes: dict[tuple[int, int], dict[int, str]] = {}
        """Where rows are, by pass in flight and layer: ``here``, ``out`` (moving) or ``away``."""

    def run(self, step: Step) -> None:
        """Run a step; the layers of a pair alternate, one storing rows and one freeing them."""
        layers = [[(one, at) for at in self._order(one)] for one in actions_of(step)]
        for turn in zip_longest(*layers):
            for action, at in filter(None, turn):
                if action.kind == "F":
                    self._put(action, at)
                else:
                    self._take(action, at)

    def fetch_for(self, steps: Sequence[Step]) -> None:
        """Fetch the pages that the backward of a step reads first."""
        for action in (one for step in steps for one in actions_of(step)):
            if action.kind in "BI" and (action.chunk, action.micro) in self._passes:
                gone = [at for at in self._order(action) if at < self._gone[action.chunk]]
                self._fetch(action, gone[0] if gone else -1, self._in_flight - 1)

    def _order(self, action: Action) -> list[int]:
        """Return the layers with pages of a pass, in order of execution."""
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
        """Fetch the pages of a layer, and of ``more`` layers before it."""
        states = self._passes[action.chunk, action.micro]
        for at in range(first, max(first - more, 0) - 1, -1):
            if states.get(at) == "away":
                self._now += self._sizes[action.chunk][at]
                self.most |= self._now
            if at in states:
                states[at] = "here"


def page_bytes(found: Pages, host: Pages, page: int) -> tuple[int, int]:
    """Return the bytes of pages on the device and on the host, each with a page for rows without
    one; those on the device include both rings of free pages.
    """
    stored = [sum((n + 1) * page * row for row, n in one.items()) for one in (found, host)]
    rings = sum((n + 1) * INDEX + COUNTERS for one in (found, host) for n in one.values())
    return stored[0] + rings, stored[1]


def _block_pages(block: Block, shape: Shape, keeping: Keeping) -> Pages:
    """Return the pages of one block's rows, by bytes per row."""
    spec, found = described(block.ffn), Pages()
    if spec.routing is None:
        return found
    even = replace(shape, room=None, load=keeping.page_load).received(spec.routing)
    for part in spec.saved(shape):
        if part.rows and part.saved and part.kept and part.stays(keeping.recompute):
            rows = min(even, part.rows)
            found[part.bytes // part.rows] += ceil(rows / keeping.page)
    return found
