"""Buckets that gather weights as low-precision codes, where one set of codes serves all products.

The codes are bitwise those of quantising the whole weight: ranks reduce the amaxes of blocks once a
step, after the masters change, and gather only codes whenever weights are unsharded.
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
    """A bucket whose whole weights are stored as codes.

    Args:
        narrow: the number format and history of each parameter's products.
        cut: the ranks that hold the other tp or etp shards of the matrices.
        given: arguments of :class:`Bucket`.
    """

    def __init__(self, narrow: Mapping[str, Narrow], cut: Group, *given: Any) -> None:
        self._recipe = next(iter(narrow.values())).recipe
        self._form = form = self._recipe.format("weight")
        self.stored, self.per_item = torch.uint8, 2 if form.element is None else 1
        super().__init__(*given)
        self._cut, self._narrow = cut, narrow
        self._grids = {
            name: BlockGrid.of(form, slot.shape, narrow[name].first_expert is not None)
            for name, slot in self.slots.items()
        }
        self._amaxes: dict[str, Tensor] = {}
        self._matrices: dict[str, Tensor] = {}
        self._here: dict[str, Tensor] = {}
        """Present amaxes of this rank's elements, under delayed scaling."""

    def _view(self, slot: BucketSlot) -> Tensor:
        return self.values[slot.start // self.per_item : -(-slot.stop // self.per_item)]

    @property
    def whole(self) -> list[Tensor]:
        """Codes, and the amaxes that give their scales."""
        told = self._amaxes, self._matrices, self._here
        return [self.values, *(one for each in told for one in each.values())]

    def lend(self, recipe: PrecisionPolicy) -> None:
        """Register functions with ``recipe`` by which products read the codes."""
        for name, handle in self.handles.items():
            recipe.give(handle, partial(self._read, name))

    def renew(self) -> None:
        """Recompute the amaxes, then start to gather codes that stay whole."""
        run_L = super()._sent()
        found = {
            name: self._grids[name].block_amax(self.own(slot, run_L), self.part(slot)[0])
            for name, slot in self.slots.items()
        }
        if all(self._narrow[name].history is not None for name in found):
            self._here = found
            self._amaxes = self._matrices = {
                name: self._narrow[name].delayed(one, "weight", range(one.numel()), False)
                for name, one in found.items()
            }
        else:
            self._exchange(found)
        super().renew()

    def _exchange(self, found: Mapping[str, Tensor]) -> None:
        """Reduce amaxes to those of whole blocks and matrices."""
        with self.inside.recorder.module("weights"):
            self._amaxes = self._maximum([*found.values()], self.inside)
            if self._recipe.has_matrix_scale:
                most = [one.amax((-2, -1), keepdim=True) for one in self._amaxes.values()]
                self._matrices = self._maximum(most, self._cut)
                if self._form.columns is None:
                    self._amaxes = self._matrices

    def _maximum(self, parts: list[Tensor], ranks: Group) -> dict[str, Tensor]:
        """Return the maximum over ranks of each parameter's tensor, in one all-reduce."""
        whole = parts
        if ranks.size > 1:
            flat = max_(torch.cat([one.flatten() for one in parts]), ranks)
            split = flat.split([one.numel() for one in parts])
            whole = [one.view_as(part) for one, part in zip(split, parts, strict=True)]
        return dict(zip(self.slots, whole, strict=True))

    def _sent(self) -> Tensor:
        run_L = super()._sent()
        coded_L = torch.zeros(run_L.shape, dtype=torch.uint8, device=run_L.device)
        for name, slot in self.slots.items():
            largest = self._amaxes[name], self._matrices.get(name)
            codes = self._grids[name].encode(self.own(slot, run_L), self.part(slot)[0], *largest)
            self.own(slot, coded_L).copy_(codes)
        return coded_L if self.per_item == 1 else pack(coded_L)

    def _read(self, name: str) -> QuantisedWeight:
        assert self.values.untyped_storage().size(), "a weight is read outside of its unit's pass"
        largest = self._amaxes[name], self._matrices.get(name)
        made = self._grids[name].decode(self.weights[name], *largest)
        return QuantisedWeight(self._recipe, made, made, self._here.get(name))
