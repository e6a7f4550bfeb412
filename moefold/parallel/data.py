"""What data ranks do together as a step ends: gradients summed, each counted once in the norm.

A gradient is complete once three sums are made: over the tensor ranks that hold a parameter whole
and read it with different rows, over the stages that hold a tied embedding, and over the ranks
that hold copies and saw other tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moefold.comm.collectives import sum_
from moefold.comm.group import Group
from moefold.optim.norm import squared_norm
from moefold.parallel.apply import Placed

EMBEDDING = "embed.weight"


class Copies:
    """Gradients of parameters that several ranks hold copies of."""

    def __init__(self, placed: Placed) -> None:
        self._world, self._shards = placed.world, placed.shards
        self._trained = {n: p for n, p in placed.model.named_parameters() if p.requires_grad}
        self._stages = placed.embedding_stages
        if len(self._stages) > 1:
            # Every rank takes part in making the group, those on stages between too.
            self._ends = placed.world.stage_group(self._stages)

    def finish(self) -> Tensor:
        """Complete every gradient; returns this rank's share of the squared norm, fp64.

        A parameter that got none has a gradient of zero: the optimizer goes on with its state.
        """
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        world = self._world
        whole = [p for n, p in self._trained.items() if self._shards[n].placement.shared_over_tp]
        self._sum(whole, world.group("tp"))
        if EMBEDDING in self._trained and len(self._stages) > 1:
            self._sum([self._trained[EMBEDDING]], self._ends)
        for kind in ("dp_cp", "edp"):
            copied = [
                p for n, p in self._trained.items() if self._shards[n].placement.copies == kind
            ]
            self._sum(copied, world.group(kind))
        counted = [p.grad for n, p in self._trained.items() if self._counts(n)]
        return squared_norm([grad for grad in counted if grad is not None])

    def _sum(self, parameters: Sequence[nn.Parameter], ranks: Group) -> None:
        if ranks.size == 1 or not parameters:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        sum_(flat, ranks)
        for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(summed.view_as(grad))

    def _counts(self, name: str) -> bool:
        """Whether this rank is the one of a parameter's copies that states it in the norm."""
        placement, world = self._shards[name].placement, self._world
        if world.group(placement.copies).index:
            return False
        if placement.shared_over_tp and world.attention.tp:
            return False
        return name != EMBEDDING or world.attention.pp == min(self._stages)
