"""Runs of elements as boxes, places in a bucket, owners of matrices: arithmetic by brute force."""

import math
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.mesh.partition import ALIGN, assign_owners
from moefold.parallel.data.bucket import assign_slots, box_size, boxes, to_global

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_of_a_run_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    tensor = np.arange(count).reshape(shape)
    found = boxes(shape, start, stop)
    read = [tensor[tuple(slice(*ends) for ends in box)].ravel().tolist() for box in found]
    assert list(chain.from_iterable(read)) == list(range(start, stop))
    assert [box_size(box) for box in found] == [len(part) for part in read]
    assert len(found) <= 2 * len(shape) - 1


def test_a_box_of_a_piece_lies_where_the_piece_does() -> None:
    assert to_global(((1, 2), (0, 4)), ((8, 12), (4, 8))) == ((9, 10), (4, 8))


@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(2, 9))
def test_every_element_has_one_owner_and_runs_are_equal(
    shapes: list[tuple[int, ...]], ranks: int
) -> None:
    slots, length = assign_slots(((str(i), shape) for i, shape in enumerate(shapes)), ranks)
    assert length % ALIGN == 0 and all(slot.start % ALIGN == 0 for slot in slots)
    for slot, shape in zip(slots, shapes, strict=True):
        parts = [slot.range_in(rank * length, (rank + 1) * length) for rank in range(ranks)]
        owned = [e for first, last in parts for e in range(first, last)]
        assert owned == list(range(math.prod(shape)))
    assert all(one.stop <= next_.start for one, next_ in pairwise(slots))
    # Padding: what each parameter, and then each run, is short of a multiple.
    assert length * ranks < sum(slot.stop - slot.start + ALIGN for slot in slots) + ranks * ALIGN


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_owners_are_balanced_and_the_same_each_time(ranks: int) -> None:
    sizes = [96, 96, 12, 12, 12, 48, 7, 96, 1, 1]
    owners = assign_owners(sizes, ranks)
    load = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(ranks)]
    assert max(load) <= max(max(sizes), sum(sizes) / ranks * 4 / 3)
    assert owners == assign_owners(sizes, ranks)
