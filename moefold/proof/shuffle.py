"""Adds up in another order: what any layout may do to a number format's last bits, on one rank.

A product's inner dim is dealt out to two halves by chance; each half is multiplied on its own and
rounded, then both are added, as two ranks would.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Shuffled(TorchDispatchMode):
    """Runs matrix products in two shuffled halves; everything else as it is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draws = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operation."""
        if func is aten.mm.default:
            return self._product(func, *args)
        if func is aten.bmm.default:
            return self._product(func, *args)
        if func is aten.addmm_.default and not kwargs:
            into, *factors = args
            return into.add_(self._product(aten.mm.default, *factors))
        return func(*args, **(kwargs or {}))

    def _product(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        inner = a.shape[-1]
        if inner < 2:
            return func(a, b)
        order = torch.randperm(inner, generator=self._draws).to(a.device)
        halves = [
            func(a.index_select(-1, part), b.index_select(-2, part)) for part in order.chunk(2)
        ]
        return halves[0] + halves[1]
