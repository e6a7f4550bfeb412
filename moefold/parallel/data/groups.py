"""Quantisation groups of optimizer moments where data ranks shard the parameter.

A group is part of one row of the full parameter. No axis of a layout cuts it
(:func:`moefold.spec.quantised.cut_violations`), but runs of a bucket may: ranks then reduce its
maximum.
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
from moefold.parallel.data.bucket import Bucket, box_size, boxes, to_global

MOMENTS = 2


class SharedGroups:
    """Positions of this rank's elements, and maxima over ranks that have parts of a group.

    Args:
        size: elements of a group; 0 without groups.
        shards: this rank's shard of each parameter.
        buckets: buckets of the parameters; the same list on all ranks that share them.
        policy: the model's precision policy, which has the run's seed.
    """

    def __init__(
        self,
        size: int,
        shards: Mapping[str, Shard],
        buckets: Iterable[Bucket],
        policy: PrecisionPolicy,
    ) -> None:
        self._shards = shards
        self._first_element = dict[str, int]()
        self._policy = policy
        self._device = torch.device("cpu")
        cut: dict[Group, dict[tuple[str, int], None]] = {}
        for bucket in buckets:
            self._first_element |= {
                name: bucket.local_range(slot)[0] for name, slot in bucket.slots.items()
            }
            self._device = bucket.values.device
            if bucket.is_unsharded or not (bucket.trained and size):
                continue
            ends = range(bucket.length, bucket.length * bucket.shard_group.size, bucket.length)
            for slot, end in product(bucket.slots.values(), ends):
                if slot.start < end < slot.stop and len(slot.shape) > 1:
                    before = ElementRun(0, end - slot.start, slot.shape[-1], size)
                    # A dict, since several borders may cut the same group.
                    keys = ((slot.name, group) for group in before.partial_groups)
                    cut.setdefault(bucket.shard_group, {}).update(dict.fromkeys(keys))
        self._cut = {ranks: list(keys) for ranks, keys in cut.items() if keys}

    def position(self, name: str) -> MomentPosition:
        """Return the position of this rank's elements in a parameter."""
        shard = self._shards[name]
        first = self._first_element.get(name, 0)
        return MomentPosition(name, first, shard.box, shard.shape, self._policy.seed)

    def maxima(self, parts: Mapping[tuple[str, int], Tensor]) -> Mapping[tuple[str, int], Tensor]:
        """Return the maximum over ranks for each cut group; a collective of the sharing ranks."""
        maxima: dict[tuple[str, int], Tensor] = {}
        for ranks, keys in self._cut.items():
            absent = torch.full((MOMENTS, 2), -torch.inf)
            local = [parts.get(key, absent).to(self._device) for key in keys]
            with ranks.recorder.module("optimizer"):
                combined = max_(torch.stack(local), ranks)
            for key, maximum in zip(keys, combined, strict=True):
                if key in parts:  # on the host, if the host updates the group
                    maxima[key] = maximum.to(parts[key].device)
        return maxima


def group_boxes(
    shard: Shard, size: int, run: tuple[int, int], factors_G3: Tensor
) -> Iterable[tuple[Tensor, tuple[int, ...], Box, bool]]:
    """Yield factors of quantisation groups as boxes of the full parameter's, in order.

    ``run`` is the range of the shard's elements on this rank, and ``factors_G3`` holds the factors
    of all groups with elements in it. Each item is (values, global shape, box, whether this rank
    has the group's first element).
    """
    piece, full = (
        (*shape[:-1], -(-shape[-1] // size)) for shape in (shard.local_shape, shard.shape)
    )
    local = ElementRun(run[0], run[1] - run[0], shard.local_shape[-1], size)
    *lead, (start, stop) = shard.box
    group_box = *lead, (start // size, -(-stop // size))
    groups = local.groups
    offset = 0
    # A cut group is a separate box, which all ranks with part of the group name alike.
    cut = local.partial_groups
    borders = {groups[0], groups[-1] + 1, *cut, *(group + 1 for group in cut)}
    begins_inside = run[0] % local.row % size > 0
    for first, last in pairwise(sorted(borders)):
        for box in boxes(piece, first, last):
            end = offset + box_size(box)
            values = factors_G3[offset:end].view(*(b - a for a, b in box), FACTORS)
            owned = not (begins_inside and first == groups[0])
            yield values, (*full, FACTORS), (*to_global(box, group_box), (0, FACTORS)), owned
            offset = end
