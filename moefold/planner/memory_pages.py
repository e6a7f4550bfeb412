"""Pages for experts' rows: how many a rank has, and what a block keeps beside them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from math import ceil
from operator import or_

from moefold.model.config import Block
from moefold.planner.case import Keeping
from moefold.planner.memory_steps import Running
from moefold.spec.layer import INDEX, Saved, Shape, described

COUNTERS = 3 * INDEX
"""Bytes of a ring's counters."""


def here(part: Saved, keeping: Keeping) -> Saved:
    """Return what a tensor leaves where it was made: numbers of pages, where its rows lie there."""
    if not (keeping.page and part.rows and part.saved):
        return part
    return replace(part, bytes=ceil(part.rows / keeping.page) * INDEX)


def pages(
    chunks: Sequence[Iterable[tuple[Block, int]]],
    shape: Shape,
    keeping: Keeping,
    steps: Iterable[Running],
) -> dict[int, int]:
    """Return how many pages there are of rows of so many bytes.

    They are enough for all that is in flight at once where a rank has ``page_load`` times the mean
    of its rows on average, each tensor in pages of its own.

    Args:
        chunks: the blocks of each chunk of a rank, and how many of each.
        shape: of a layer, with its stated room.
        keeping: with rows of a page.
        steps: of the rank's line.
    """
    if not keeping.page:
        return {}
    layers = [[(_of_block(one, shape, keeping), count) for one, count in c] for c in chunks]
    whole = [sum((_times(one, count) for one, count in c), Counter[int]()) for c in layers]
    most = Counter[int]()
    for step in steps:
        held = sum(map(_times, whole, step.kept), Counter[int]())
        if step.forward is not None:
            coming = whole[step.forward]
            if step.backward is not None and step.frees:
                # Layer by layer in turns: one comes as another goes.
                coming = coming - whole[step.backward]
                coming = reduce(or_, (one for one, _ in layers[step.forward]), coming)
            held += coming
        most |= held
    return dict(most)


def page_bytes(found: dict[int, int], page: int) -> int:
    """Return the bytes of pages, with the page and the place in the ring for what has none."""
    return sum((n + 1) * (page * row + INDEX) + COUNTERS for row, n in found.items())


def _of_block(block: Block, shape: Shape, keeping: Keeping) -> Counter[int]:
    """Return the pages that one block's rows take, by bytes of a row."""
    spec, found = described(block.ffn), Counter[int]()
    if spec.routing is None:
        return found
    even = replace(shape, room=None, load=keeping.page_load).received(spec.routing)
    for part in spec.saved(shape):
        if part.rows and part.saved and part.kept and part.stays(keeping.recompute):
            rows = min(even, part.rows)
            found[part.bytes // part.rows] += ceil(rows / keeping.page)
    return found


def _times(pages: Counter[int], count: int) -> Counter[int]:
    return Counter({row: n * count for row, n in pages.items()})
