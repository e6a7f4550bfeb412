"""Watches that a step in fp64 makes no tensor of a narrower floating-point format."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGE = str(Path(__file__).parents[1])

ANGLES = "angles are fp32 in every published model, a function of positions alone"
ALLOWED: Mapping[str, str] = {
    "layers/rope.py:Angles.of": ANGLES,
    "layers/rope.py:inverse_frequencies": ANGLES,
    "layers/rope.py:_stretched": ANGLES,
    "comm/world.py:World._warm_up": "a group's first word carries no value of the step",
    "moe/balance.py:sum_counters": "the mean probability of experts is reported and enters no loss",
}
"""Functions that may make narrower tensors, each with its reason."""

HANDS_ON = ("proof/", "comm/plain.py", "comm/collectives.py")
"""Files that work on what others give them, and choose no format."""


class NarrowWatch(TorchDispatchMode):
    """Notes where a narrower tensor is made; what is only handed on or updated is not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        """Operations and the lines of the package that ran them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operation and look at what it makes."""
        out = func(*args, **(kwargs or {}))
        if any(_narrow(leaf) for leaf in tree_leaves(out)):
            given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
            made = [leaf for leaf in tree_leaves(out) if _narrow(leaf) and id(leaf) not in given]
            if any(leaf._base is None or id(leaf._base) not in given for leaf in made):
                self._note(func)
        return out

    def _note(self, func: Callable[..., Any]) -> None:
        file, function, line = _place()
        if f"{file}:{function}" not in ALLOWED:
            self.found.add(f"{func} in {file}:{line}")


def _narrow(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return value.dtype != torch.float64


def _place() -> tuple[str, str, int]:
    """Return file, function and line of the package's innermost frame, this room left out."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.startswith(f"{PACKAGE}/proof/"):
            return (
                file[len(PACKAGE) + 1 :],
                frame.f_code.co_qualname.partition(".<")[0],
                frame.f_lineno,
            )
        frame = frame.f_back
    return "torch", "", 0
