"""PyTorch dispatch modes that observe or change the operations of a proof's step.

``NarrowWatch`` records where a step in fp64 creates a tensor of a narrower floating-point format.
``ShuffledSums`` changes the order of sums in matrix products, to show on one rank how a layout may
change the last bits. The inner dim of a product is split at random into two halves, which are
multiplied and rounded separately and then added, as on two ranks.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moefold.kernels.function import EagerMode

aten = torch.ops.aten
PACKAGE = str(Path(__file__).parents[1])

ANGLES = "angles are fp32 in every published model, a function of positions alone"
ALLOWED: Mapping[str, str] = {
    "layers/rope.py:Angles.of": ANGLES,
    "layers/rope.py:inverse_frequencies": ANGLES,
    "layers/rope.py:_yarn_frequencies": ANGLES,
    "comm/world.py:World._warm_up": "a group's first word carries no value of the step",
    "moe/balance.py:sum_counters": "the mean probability of experts is reported and enters no loss",
}
"""Functions that may create narrower tensors, each with its reason."""
QUANTISERS = ("kernels/quantise/", "kernels/scaled/", "layers/history.py")
"""Code in which values are fp32 by definition before they are quantised."""


class NarrowWatch(EagerMode):
    """Records where narrower tensors are created, not where they are passed on or updated."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        """Operations, each with the package's line that ran it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operation and check the tensors that it creates."""
        out = func(*args, **(kwargs or {}))
        if type(out) is Tensor and out.dtype is torch.float64:  # most operations
            return out
        leaves = (out,) if isinstance(out, Tensor) else tree_leaves(out)
        if narrow := [leaf for leaf in leaves if _is_narrow(leaf)]:
            # The caller comes first: finding it is faster than walking the inputs.
            file, function, line = _caller()
            if f"{file}:{function}" not in ALLOWED and not file.startswith(QUANTISERS):
                inputs = {id(leaf) for leaf in tree_leaves((args, kwargs))}
                created = [leaf for leaf in narrow if id(leaf) not in inputs]
                if any(leaf._base is None or id(leaf._base) not in inputs for leaf in created):
                    self.operations.add(f"{func} in {file}:{line}")
        return out


def _is_narrow(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype != torch.float64
        and value.is_floating_point()
        and value.numel() > 0
    )


def _caller() -> tuple[str, str, int]:
    """Return file, function and line of the package's innermost frame outside ``proof/``."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.startswith(f"{PACKAGE}/proof/"):
            function = frame.f_code.co_qualname.partition(".<")[0]
            return file[len(PACKAGE) + 1 :], function, frame.f_lineno
        frame = frame.f_back
    return "torch", "", 0


class ShuffledSums(EagerMode):
    """Runs matrix products in two shuffled halves and leaves other operations unchanged.

    Halves of quantised products, which are summed in fp32, are rounded to the exchanged dtype.
    """

    def __init__(self, seed: int, exchanged: torch.dtype) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._exchanged = exchanged

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operation, in two halves if it is a matrix product."""
        if func in (aten.mm.default, aten.bmm.default):
            return self._product(func, *args)
        if func is aten.mm.out and kwargs is not None:
            return kwargs["out"].copy_(self._product(aten.mm.default, *args))
        if func is aten.addmm_.default and not kwargs:
            target, *factors = args
            return target.add_(self._product(aten.mm.default, *factors))
        return func(*args, **(kwargs or {}))

    def _product(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        inner = a.shape[-1]
        if inner < 2:
            return func(a, b)
        order = torch.randperm(inner, generator=self._generator).to(a.device)
        halves = [func(a.index_select(-1, i), b.index_select(-2, i)) for i in order.chunk(2)]
        if _caller()[0].startswith("kernels/scaled/"):
            halves = [half.to(self._exchanged).to(half.dtype) for half in halves]
        return halves[0] + halves[1]
