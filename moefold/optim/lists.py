"""Elementwise optimizers of one momentum, in plain torch operations over lists of tensors.

Tensors with equal settings are updated together, in pieces of limited size: temporaries stay small,
and on a CPU a piece stays in the cache from one operation to the next.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moefold.optim.base import Optimizer, state_dtype, zeros_for
from moefold.optim.config import MomentumRule, UpdateSettings, update_settings

aten = torch.ops.aten

PIECE = {"cpu": 1 << 17}
DEFAULT_PIECE = 1 << 24
"""Most elements that are updated at a time."""


class MomentumOptimizer(Optimizer):
    """An elementwise rule over named parameters. State: ``momentum``, where the rule has it."""

    def __init__(self, rule: MomentumRule, params: Mapping[str, Tensor]) -> None:
        super().__init__(params)
        self.rule = rule
        self._momenta = {
            name: self._add_state(name, what, zeros_for(p))
            for name, p in self.params.items()
            for what in rule.state_names(name, p.shape)
        }
        self._settings = {
            n: update_settings(rule.groups, n, rule.lr, rule.decay_of(n, p.shape))
            for n, p in self.params.items()
        }

    @abstractmethod
    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        momenta: Sequence[Tensor],
        lr: float,
        weight_decay: float,
    ) -> None:
        """Update parameters and momenta in place; gradients may be overwritten.

        All have the dtype of the state. ``momenta`` is empty if the rule has no state.
        """

    @torch.no_grad()
    def step(self, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Update every parameter by the rule."""
        grads = self._gradients(scale)
        groups: dict[tuple[torch.device, torch.dtype, UpdateSettings], list[str]]
        groups = defaultdict(list)
        for name, p in self.params.items():
            groups[p.device, p.dtype, self._settings[name]].append(name)
        for (_, _, settings), names in groups.items():
            lists = [[self.params[n] for n in names], [grads[n].contiguous() for n in names]]
            if self._momenta:
                lists.append([self._momenta[n] for n in names])
            for params, piece_grads, *momenta in pieces(lists):
                if scale != 1:
                    aten._foreach_mul_(piece_grads, scale)
                wide = [p.to(state_dtype(p)) for p in params]
                lr = settings.lr * lr_factor
                decay = settings.weight_decay
                self.update(wide, piece_grads, momenta[0] if momenta else (), lr, decay)
                for param, updated in zip(params, wide, strict=True):
                    if updated is not param:
                        param.copy_(updated)

    def lr(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return the learning rates of this step."""
        return {self.rule.kind: self.rule.lr * lr_factor, **self.rule.group_rates(lr_factor)}

    def describe(self) -> dict[str, str]:
        """Return the number of tensors."""
        return {self.rule.kind: f"{len(self.params)} tensors in plain torch"}


def pieces(lists: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Split lists of tensors of the same shapes into lists of views of limited size in all.

    A tensor whose elements are not consecutive in memory is not split.
    """
    taken: list[list[Tensor]] = [[] for _ in lists]
    size = 0
    for tensors in zip(*lists, strict=True):
        most = PIECE.get(tensors[0].device.type, DEFAULT_PIECE)
        parts = [tensors]
        if all(tensor.is_contiguous() for tensor in tensors):
            parts = list(zip(*(tensor.view(-1).split(most) for tensor in tensors), strict=True))
        for part in parts:
            if size and size + part[0].numel() > most:
                yield taken
                taken = [[] for _ in lists]
                size = 0
            for taken_list, view in zip(taken, part, strict=True):
                taken_list.append(view)
            size += part[0].numel()
    if taken and taken[0]:
        yield taken
