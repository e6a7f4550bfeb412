"""Numbering of ranks by named axes, fastest first: strides, coordinates, offsets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

Offsets = range | tuple[int, ...]
"""Ascending offsets from 0; a range if evenly spaced, so that equal offsets compare equal."""
Runs = tuple[tuple[int, int], ...]
"""(stride, size) pairs that offsets span, smallest stride first, with adjacent ones merged."""


@dataclass(frozen=True)
class Grid:
    """Ranks ``0 .. world - 1`` as mixed-radix numbers over axes.

    A group that spans some axes is ``{start + offset}``: its smallest rank, where those axes are 0,
    plus offsets that are equal for all groups of its kind.
    """

    axes: tuple[tuple[str, int], ...]
    """Names and sizes; neighbouring ranks differ in the first."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes by axis, fastest first."""
        return dict(self.axes)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance between ranks that differ by one along one axis."""
        steps = accumulate(self.sizes.values(), mul, initial=1)
        return dict(zip(self.sizes, steps, strict=False))

    def coordinate(self, rank: int, axis: str) -> int:
        """Return a rank's coordinate along an axis."""
        return rank // self.strides[axis] % self.sizes[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinates along all axes, fastest first."""
        return {axis: self.coordinate(rank, axis) for axis in self.sizes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at coordinates; an omitted axis is at 0.

        Raises:
            ValueError: if a coordinate is outside its axis.
        """
        for axis, index in coordinates.items():
            if not 0 <= index < self.sizes[axis]:
                raise ValueError(f"{axis} {index}: this axis runs from 0 to {self.sizes[axis] - 1}")
        return sum(index * self.strides[axis] for axis, index in coordinates.items())

    def runs(self, axes: Collection[str]) -> Runs:
        """Return the strides and sizes spanned by ranks at which all axes but ``axes`` are 0."""
        runs: list[tuple[int, int]] = []
        for axis, size in self.axes:
            if axis in axes and size > 1:
                stride = self.strides[axis]
                last = runs[-1] if runs else (0, 0)
                if last[0] * last[1] == stride:
                    runs[-1] = last[0], last[1] * size
                else:
                    runs.append((stride, size))
        return tuple(runs)

    def offsets(self, axes: Collection[str]) -> Offsets:
        """Return the ranks at which all axes but ``axes`` are 0, ascending."""
        return offsets_of(self.runs(axes))

    def starts(self, axes: Collection[str]) -> Offsets:
        """Return the smallest rank of every group over ``axes``, ascending."""
        return self.offsets([axis for axis in self.sizes if axis not in axes])

    def start(self, rank: int, axes: Collection[str]) -> int:
        """Return the smallest rank of a rank's group over ``axes``."""
        offsets = [self.coordinate(rank, axis) * self.strides[axis] for axis in axes]
        return rank - sum(offsets)


def offsets_of(runs: Runs) -> Offsets:
    """Return the offsets spanned by strides and sizes."""
    if len(runs) < 2:
        stride, size = runs[0] if runs else (1, 1)
        return range(0, stride * size, stride)
    offsets = [0]
    for stride, size in runs:
        steps = range(0, stride * size, stride)
        offsets = [high + low for high in steps for low in offsets]
    return tuple(offsets)


def shifted(offsets: Offsets, start: int) -> tuple[int, ...]:
    """Return ``start`` plus each offset."""
    if isinstance(offsets, range):
        return tuple(range(start, start + offsets.stop, offsets.step))
    return tuple([start + offset for offset in offsets])
