"""Buckets that gather weights as low-precision codes, where one set of codes serves all products.

The codes are bitwise those of quantising the full weight: ranks reduce the amaxes of blocks once a
step, after the masters change, and gather only codes when weights are unsharded.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import max_
from moefold.comm.group import Group
from moefold.kernels.quantise.elements import pack
from moefold.kernels.quantise.shards import BlockGrid
from moefold.kernels.scaled.products import QuantisedWeight
from moefold.layers.precision import Narrow, PrecisionPolicy
from moefold.parallel.data.bucket import Bucket, BucketSlot


class CodedBucket(Bucket):
    """A bucket whose unsharded weights are stored as codes.

    Args:
        narrow: the number format and history of each parameter's products.
        slice_group: the ranks that hold the tp or etp shards of the matrices.
        args: arguments of :class:`Bucket`.
    """

    def __init__(self, narrow: Mapping[str, Narrow], slice_group: Group, *args: Any) -> None:
        self._recipe = next(iter(narrow.values())).recipe
        self._form = form = self._recipe.format("weight")
        self.storage_dtype = torch.uint8
        self.elements_per_item = 2 if form.element is None else 1
        super().__init__(*args)
        self._slice_group = slice_group
        self._narrow = narrow
        self._grids = {
            name: BlockGrid.of(form, slot.shape, narrow[name].first_expert is not None)
            for name, slot in self.slots.items()
        }
        self._amaxes: dict[str, Tensor] = {}
        self._matrices: dict[str, Tensor] = {}
        self._local_amaxes: dict[str, Tensor] = {}
        """Current amaxes of this rank's elements, under delayed scaling."""

    def _view(self, slot: BucketSlot) -> Tensor:
        return self.values[
            slot.start // self.elements_per_item : -(-slot.stop // self.elements_per_item)
        ]

    @property
    def unsharded_tensors(self) -> list[Tensor]:
        """Codes, and the amaxes from which scales are computed."""
        amaxes = self._amaxes, self._matrices, self._local_amaxes
        return [self.values, *(amax for by_name in amaxes for amax in by_name.values())]

    def free_derived(self) -> None:
        """Free the amaxes, too."""
        super().free_derived()
        self._amaxes = {}
        self._matrices = {}
        self._local_amaxes = {}

    def register_weights(self, policy: PrecisionPolicy) -> None:
        """Register with ``policy`` the functions by which products read the codes."""
        for name, handle in self.handles.items():
            policy.set_value(handle, partial(self._read, name))

    def refresh_weights(self) -> None:
        """Recompute the amaxes, then start to gather codes that stay unsharded."""
        run_L = super()._gather_input()
        amaxes = {
            name: self._grids[name].block_amax(
                self.local_view(slot, run_L), self.local_range(slot)[0]
            )
            for name, slot in self.slots.items()
        }
        if all(self._narrow[name].history is not None for name in amaxes):
            self._local_amaxes = amaxes
            self._amaxes = self._matrices = {
                name: self._narrow[name].delayed(amax, "weight", range(amax.numel()), False)
                for name, amax in amaxes.items()
            }
        else:
            self._reduce_amaxes(amaxes)
        super().refresh_weights()

    def _reduce_amaxes(self, local_amaxes: Mapping[str, Tensor]) -> None:
        """Reduce amaxes to those of full blocks and matrices."""
        with self.shard_group.recorder.module("weights"):
            self._amaxes = self._maximum([*local_amaxes.values()], self.shard_group)
            if self._recipe.has_matrix_scale:
                most = [amax.amax((-2, -1), keepdim=True) for amax in self._amaxes.values()]
                self._matrices = self._maximum(most, self._slice_group)
                if self._form.columns is None:
                    self._amaxes = self._matrices

    def _maximum(self, local: list[Tensor], ranks: Group) -> dict[str, Tensor]:
        """Return the maximum over ranks of each parameter's tensor, in one all-reduce."""
        reduced = local
        if ranks.size > 1:
            flat = max_(torch.cat([amax.flatten() for amax in local]), ranks)
            split = flat.split([amax.numel() for amax in local])
            reduced = [values.view_as(amax) for values, amax in zip(split, local, strict=True)]
        return dict(zip(self.slots, reduced, strict=True))

    def _gather_input(self) -> Tensor:
        run_L = super()._gather_input()
        coded_L = torch.zeros(run_L.shape, dtype=torch.uint8, device=run_L.device)
        for name, slot in self.slots.items():
            largest = self._amaxes[name], self._matrices.get(name)
            codes = self._grids[name].encode(
                self.local_view(slot, run_L), self.local_range(slot)[0], *largest
            )
            self.local_view(slot, coded_L).copy_(codes)
        return coded_L if self.elements_per_item == 1 else pack(coded_L)

    def _read(self, name: str) -> QuantisedWeight:
        assert self.values.untyped_storage().size(), "a weight is read outside of its unit's pass"
        largest = self._amaxes[name], self._matrices.get(name)
        decoded = self._grids[name].decode(self.weights[name], *largest)
        return QuantisedWeight(self._recipe, decoded, decoded, self._local_amaxes.get(name))
