"""Quantisation groups of optimizer moments where data ranks shard the parameter.

A group is part of one row of the whole parameter. No axis of a layout cuts it
(:func:`moefold.spec.quantised.cut_violations`), but runs of a bucket may: ranks reduce its maximum.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise, product

import torch
from torch import Tensor

from moefold.comm.collectives import max_
from moefold.comm.group import Group
from moefold.layers.placement import Box, Shard
from moefold.layers.precision import PrecisionPolicy
from moefold.optim.moments import FACTORS, ElementRun, MomentPosition
from moefold.parallel.data.bucket import Bucket, boxes, moved, size_of

MOMENTS = 2


class SharedGroups:
    """Positions of this rank's elements, and maxima over the ranks that hold parts of groups.

    Args:
        size: elements of a group; 0 without groups.
        shards: this rank's shard of each parameter.
        buckets: buckets of the parameters; the same list on all ranks that share them.
        recipe: the model's precision policy, read for the run's seed.
    """

    def __init__(
        self,
        size: int,
        shards: Mapping[str, Shard],
        buckets: Iterable[Bucket],
        recipe: PrecisionPolicy,
    ) -> None:
        self._shards, self._first, self._recipe = shards, dict[str, int](), recipe
        self._device = torch.device("cpu")
        cut: dict[Group, dict[tuple[str, int], None]] = {}
        for bucket in buckets:
            self._first |= {name: bucket.part(slot)[0] for name, slot in bucket.slots.items()}
            self._device = bucket.values.device
            if bucket.alone or not (bucket.trained and size):
                continue
            ends = range(bucket.length, bucket.length * bucket.inside.size, bucket.length)
            for slot, end in product(bucket.slots.values(), ends):
                if slot.start < end < slot.stop and len(slot.shape) > 1:
                    before = ElementRun(0, end - slot.start, slot.shape[-1], size)
                    # A dict, since several borders may cut the same group.
                    keys = ((slot.name, group) for group in before.partial_groups)
                    cut.setdefault(bucket.inside, {}).update(dict.fromkeys(keys))
        self._cut = {ranks: list(keys) for ranks, keys in cut.items() if keys}

    def position(self, name: str) -> MomentPosition:
        """Return the position of this rank's elements in a parameter."""
        shard, first = self._shards[name], self._first.get(name, 0)
        return MomentPosition(name, first, shard.box, shard.shape, self._recipe.seed)

    def maxima(self, parts: Mapping[tuple[str, int], Tensor]) -> Mapping[tuple[str, int], Tensor]:
        """Return the maximum over ranks for each cut group; a collective of the sharing ranks."""
        found: dict[tuple[str, int], Tensor] = {}
        for ranks, keys in self._cut.items():
            nothing = torch.full((MOMENTS, 2), -torch.inf)
            here = [parts.get(key, nothing).to(self._device) for key in keys]
            with ranks.recorder.module("optimizer"):
                whole = max_(torch.stack(here), ranks)
            for key, one in zip(keys, whole, strict=True):
                if key in parts:  # On the host, if the host updates the group.
                    found[key] = one.to(parts[key].device)
        return found


def group_boxes(
    shard: Shard, size: int, run: tuple[int, int], factors_G3: Tensor
) -> Iterable[tuple[Tensor, tuple[int, ...], Box, bool]]:
    """Yield the factors of quantisation groups as boxes of the whole parameter's, in order.

    ``run`` is the range of the shard's elements on this rank, and ``factors_G3`` holds the factors
    of all groups with elements in it. Each item is (values, global shape, box, whether this rank
    has the group's first element).
    """
    piece, whole = (
        (*shape[:-1], -(-shape[-1] // size)) for shape in (shard.local_shape, shard.shape)
    )
    here = ElementRun(run[0], run[1] - run[0], shard.local_shape[-1], size)
    *lead, (start, stop) = shard.box
    by = *lead, (start // size, -(-stop // size))
    groups, at = here.groups, 0
    # A cut group is a separate box, which all ranks with part of the group name alike.
    cut = here.partial_groups
    borders = {groups[0], groups[-1] + 1, *cut, *(group + 1 for group in cut)}
    begun = run[0] % here.row % size > 0
    for first, last in pairwise(sorted(borders)):
        for box in boxes(piece, first, last):
            part = factors_G3[at : at + size_of(box)].view(*(b - a for a, b in box), FACTORS)
            owned = not (begun and first == groups[0])
            yield part, (*whole, FACTORS), (*moved(box, by), (0, FACTORS)), owned
            at += size_of(box)
