"""Which elements of a bucket each rank owns, and what boxes of parameters these are.

A bucket is one row of elements: parameters one after the other, each at an aligned place, cut into
as many equal runs as ranks share it. A rank's run covers some parameters whole and at most two in
part; any run of a row-major tensor is a few boxes, which is what checkpoints name.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moefold.layers.placement import Box
from moefold.mesh.share import aligned


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket."""

    name: str
    shape: tuple[int, ...]
    """Of what this rank computes with."""
    start: int

    @property
    def stop(self) -> int:
        """The place after its last element."""
        return self.start + math.prod(self.shape)

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Return which of its own elements lie in a run of the bucket; ``(a, a)`` for none."""
        first = min(max(start, self.start), self.stop)
        return first - self.start, max(first, min(stop, self.stop)) - self.start


def lay_out(shapes: Iterable[tuple[str, tuple[int, ...]]], ranks: int) -> tuple[list[Slot], int]:
    """Return the parameters' places and the length of each rank's run."""
    slots, end = [], 0
    for name, shape in shapes:
        slots.append(Slot(name, shape, end))
        end = aligned(slots[-1].stop)
    return slots, aligned(-(-end // ranks))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes that the elements ``start`` to ``stop`` of a row-major tensor are, in order.

    At most ``2 * dims - 1`` of them; each is contiguous in memory.
    """
    if start >= stop:
        return []
    rest = shape[1:]
    inner = math.prod(rest)
    whole = tuple((0, size) for size in rest)
    a, b = -(-start // inner), stop // inner
    if a > b:  # inside one index
        return [((b, a), *box) for box in boxes(rest, start - b * inner, stop - b * inner)]
    found: list[Box] = []
    if start < a * inner:
        found += [((a - 1, a), *box) for box in boxes(rest, start - (a - 1) * inner, inner)]
    if a < b:
        found.append(((a, b), *whole))
    if b * inner < stop:
        found += [((b, b + 1), *box) for box in boxes(rest, 0, stop - b * inner)]
    return found


def size_of(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def moved(box: Box, by: Box) -> Box:
    """Return a box of a tensor's piece as a box of the tensor, given where the piece is."""
    return tuple((a + at, b + at) for (a, b), (at, _) in zip(box, by, strict=True))
