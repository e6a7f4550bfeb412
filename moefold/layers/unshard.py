"""Hooks that gather a unit's weights before it runs and reduce its gradients after its backward.

A unit is a block, the token table, the last norm or the head. Its gradients are complete when the
gradient of its inputs is: all between has run. So the places where a unit begins and ends are
identities whose backward calls the hooks of backward. A schedule that runs a unit in pieces calls
them itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

EMBEDDING = "embed"
"""The unit that holds the token table."""


def unit_of(name: str) -> str:
    """Return the unit that a parameter is of: ``embed``, ``layers.3``, ``norm``, ``head``."""
    words = name.split(".")
    return ".".join(words[: 2 if words[0] == "layers" else 1])


class UnshardHooks:
    """Called as one micro-batch runs through a model chunk; as it stands, all weights stay here.

    ``parallel/data/fsdp_hooks.py`` is the form that gathers and reduces.
    """

    def pre_forward(self, unit: str) -> None:
        """The unit is about to run."""

    def post_forward(self, unit: str) -> None:
        """The unit has run."""

    def pre_backward(self, unit: str) -> None:
        """The unit's backward is about to run."""

    def post_backward(self, unit: str) -> None:
        """The unit's backward has run."""

    def unsharded(self, unit: str) -> AbstractContextManager[None]:
        """While open, the unit runs and its gradients are added at once: the head and the loss."""
        return nullcontext()

    def pre_weight_gradients(self) -> None:
        """Products of weights that were deferred are about to run."""

    def post_weight_gradients(self) -> None:
        """All gradients of the chunk's weights are added."""


RESIDENT = UnshardHooks()
"""All weights are here all the time."""


def begin_unit(hooks: UnshardHooks, unit: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Begin a unit; returns its inputs."""
    if hooks is RESIDENT:
        return tensors
    if not tensors:
        hooks.pre_forward(unit)
        return ()
    return _border(hooks.pre_forward, hooks.post_backward, unit, tensors)


def end_unit(hooks: UnshardHooks, unit: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """End a unit; returns its outputs."""
    if hooks is RESIDENT:
        return tensors
    return _border(hooks.post_forward, hooks.pre_backward, unit, tensors)


def _border(
    now: Callable[[str], None], back: Callable[[str], None], unit: str, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    calls = partial(now, unit), partial(back, unit)
    # torch's stubs have it return a tensor or None; it returns what forward does.
    return _Border.apply(*calls, *tensors)  # type: ignore[return-value]


class _Border(Function):
    """An identity that calls one function now, and the other when gradients come back."""

    @staticmethod
    def forward(
        ctx: Any, now: Callable[[], None], back: Callable[[], None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = back
        ctx.set_materialize_grads(False)
        now()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.back()
        return None, None, *gradients
