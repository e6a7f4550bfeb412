"""Whether boxes tile a shape: cover it, and overlap nowhere. Imports no torch."""

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Index of the first element, and shape."""


def tiles(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return whether the boxes lie in ``shape``, are disjoint and cover it.

    Boxes are swept along the first dim, so that only those which share a row are compared: the
    usual splits cost little more than a sort.
    """
    if not boxes or any(not _inside(shape, box) for box in boxes):
        return False
    full = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(box[1]) for box in full) != math.prod(shape):
        return False
    if not shape:
        return True
    open_boxes: list[Box] = []
    for box in sorted(full):
        open_boxes = [b for b in open_boxes if b[0][0] + b[1][0] > box[0][0]]
        if any(_overlap(b, box) for b in open_boxes):
            return False
        open_boxes.append(box)
    return True


def _inside(shape: tuple[int, ...], box: Box) -> bool:
    at, size = box
    return len(at) == len(size) == len(shape) and all(
        a + n <= whole for a, n, whole in zip(at, size, shape, strict=True)
    )


def _overlap(one: Box, other: Box) -> bool:
    """Return whether two boxes that are not empty share an element."""
    sides = zip(*one, *other, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in sides)
