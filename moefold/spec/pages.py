"""Pages for experts' saved rows: how many a rank needs, and what a block saves besides."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

from moefold.layers.config import Offload, OffloadToPages, offloaded_layers
from moefold.model.config import Block
from moefold.schedule.table import Action, Line, Step, actions_of
from moefold.spec.layer import INDEX, Modules, Saved, Shape, as_layer_spec

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


def unpaged(part: Saved, pages: OffloadToPages | None, offloaded: bool = False) -> Saved:
    """Return a saved tensor without the bytes of its pages; the indices of its pages remain.

    ``offloaded``: its pages are offloaded to the host, where they have indices too.
    """
    if pages is None or not (part.rows and part.saved):
        return part
    numbers = ceil(part.rows / pages.page)
    return replace(part, bytes=numbers * INDEX * (1 + offloaded))


def count_pages(
    chunks: Sequence[ChunkBlocks],
    shape: Shape,
    recompute: Modules,
    offload: Offload | None,
    line: Line,
) -> tuple[Pages, Pages]:
    """Return the numbers of pages on the device and on the host.

    They suffice for all passes in flight if the rank gets on average ``offload.pages.load`` times
    the mean number of rows; each tensor has pages of its own.

    Args:
        chunks: chunks of the rank.
        shape: shape of a layer, with its stated room.
        recompute: kinds of module that are recomputed.
        offload: the layout's record, with the pages.
        line: the rank's line in the schedule's table.
    """
    if offload is None or offload.pages is None:
        return Pages(), Pages()
    simulation = _PageSimulation(chunks, shape, recompute, offload.pages, offload.in_flight)
    for step, after in zip_longest(line, line[1:]):
        if not any(action.kind in "BI" for action in actions_of(step)):
            simulation.prefetch(after)
        simulation.run(step)
        simulation.prefetch(after)
    return simulation.peak, simulation.host_peak


class _PageSimulation:
    """Simulation of the pages in use, layer by layer, as a rank runs its line.

    Use of pages by :class:`moefold.layers.stash.PagedStash` follows from that order alone.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkBlocks],
        shape: Shape,
        recompute: Modules,
        record: OffloadToPages,
        in_flight: int,
    ) -> None:
        self._in_flight = in_flight
        self._pages = list[dict[int, Pages]]()
        self._num_offloaded = list[int]()
        """Pages by layer that has any, and the number of offloaded layers, of each chunk."""
        for layers, multi_token, has_loss in chunks:
            blocks = (*layers, *multi_token)
            pages = [_block_pages(block, shape, recompute, record) for block in blocks]
            self._pages.append({layer: size for layer, size in enumerate(pages) if size})
            self._num_offloaded.append(offloaded_layers(record.spill, len(layers), has_loss))
        self._used = Pages()
        self._host = Pages()
        self.peak = Pages()
        self.host_peak = Pages()
        self._leaving: deque[tuple[dict[int, str], int, Pages]] = deque()
        self._passes: dict[tuple[int, int], dict[int, str]] = {}
        """Where rows are, by pass in flight and layer: ``device``, ``leaving`` or ``host``."""

    def run(self, step: Step) -> None:
        """Run a step; the layers of a pair alternate, one storing rows and one freeing them."""
        layers = [[(action, layer) for layer in self._order(action)] for action in actions_of(step)]
        for turn in zip_longest(*layers):
            for action, layer in filter(None, turn):
                if action.kind == "F":
                    self._store(action, layer)
                else:
                    self._free(action, layer)

    def prefetch(self, step: Step | None) -> None:
        """Fetch the pages that the backward of the next step, if there is one, reads first."""
        for action in () if step is None else actions_of(step):
            if action.kind in "BI" and (action.chunk, action.micro) in self._passes:
                num_offloaded = self._num_offloaded[action.chunk]
                first = next((at for at in self._order(action) if at < num_offloaded), -1)
                self._fetch(action, first, self._in_flight - 1)

    def _order(self, action: Action) -> list[int]:
        """Return the layers with pages of a pass, in order of execution."""
        if action.kind == "W":
            return []
        return sorted(self._pages[action.chunk], reverse=action.kind != "F")

    def _store(self, action: Action, layer: int) -> None:
        pages = self._pages[action.chunk][layer]
        places = self._passes.setdefault((action.chunk, action.micro), {})
        places[layer] = "device"
        if layer < self._num_offloaded[action.chunk]:
            if len(self._leaving) == self._in_flight:
                left, left_layer, left_pages = self._leaving.popleft()
                if left.get(left_layer) == "leaving":
                    left[left_layer] = "host"
                    self._used -= left_pages
            self._leaving.append((places, layer, pages))
            places[layer] = "leaving"
            self._host += pages
            self.host_peak |= self._host
        self._used += pages
        self.peak |= self._used

    def _free(self, action: Action, layer: int) -> None:
        pages = self._pages[action.chunk][layer]
        if layer < self._num_offloaded[action.chunk]:
            self._fetch(action, layer, self._in_flight)
            self._host -= pages
        self._used -= pages
        del self._passes[action.chunk, action.micro][layer]

    def _fetch(self, action: Action, first: int, more: int) -> None:
        """Fetch the pages of a layer, and of ``more`` layers before it."""
        places = self._passes[action.chunk, action.micro]
        for layer in range(first, max(first - more, 0) - 1, -1):
            if places.get(layer) == "host":
                self._used += self._pages[action.chunk][layer]
                self.peak |= self._used
            if layer in places:
                places[layer] = "device"


def page_bytes(device: Pages, host: Pages, page: int) -> tuple[int, int]:
    """Return the bytes of pages on the device and on the host, each with a page for rows without
    one; those on the device include both rings of free pages.
    """
    stored = [sum((n + 1) * page * row for row, n in pool.items()) for pool in (device, host)]
    rings = sum((n + 1) * INDEX + COUNTERS for pool in (device, host) for n in pool.values())
    return stored[0] + rings, stored[1]


def _block_pages(block: Block, shape: Shape, recompute: Modules, record: OffloadToPages) -> Pages:
    """Return the pages of one block's rows, by bytes per row."""
    spec = as_layer_spec(block.ffn)
    pages = Pages()
    if spec.routing is None:
        return pages
    planned = shape._replace(room=None, load=record.load).received_rows(spec.routing)
    for part in spec.saved(shape):
        if part.rows and part.saved and part.from_forward and part.is_saved_under(recompute):
            pages[part.bytes // part.rows] += ceil(min(planned, part.rows) / record.page)
    return pages
