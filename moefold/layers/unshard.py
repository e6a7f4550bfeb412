"""Hooks that gather a unit's weights before it runs and reduce its gradients after its backward.

A unit is a block, the embedding, the last norm or the head. Its weight gradients are complete once
the gradient of its inputs is. Its beginning and end are therefore identity functions whose backward
calls the backward hooks. A schedule that runs a unit in segments calls the hooks itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

EMBEDDING = "embed"
"""Name of the unit that holds the embedding."""


def unit_of(name: str) -> str:
    """Return the unit of a parameter by its name: ``embed``, ``layers.3``, ``norm``, ``head``."""
    path = name.split(".")
    return ".".join(path[: 2 if path[0] == "layers" else 1])


class UnshardHooks:
    """Hooks of one micro-batch's pass through a model chunk; this base class does nothing.

    ``parallel/data/fsdp_hooks.py`` has the subclass that gathers and reduces.
    """

    def pre_forward(self, unit: str) -> None:
        """Called before the unit's forward."""

    def post_forward(self, unit: str) -> None:
        """Called after the unit's forward."""

    def pre_backward(self, unit: str) -> None:
        """Called before the unit's backward."""

    def post_backward(self, unit: str) -> None:
        """Called after the unit's backward."""

    def unsharded(self, unit: str) -> AbstractContextManager[None]:
        """Context for a unit whose forward and backward run together: the head and the loss."""
        return nullcontext()

    def pre_weight_gradients(self) -> None:
        """Called before deferred weight gradients are computed."""

    def post_weight_gradients(self) -> None:
        """Called once all weight gradients of the chunk are accumulated."""


RESIDENT = UnshardHooks()
"""Hooks of weights that are never sharded over data ranks."""


def begin_unit(hooks: UnshardHooks, unit: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Mark the beginning of a unit; returns its inputs."""
    if hooks is RESIDENT:
        return tensors
    if not tensors:
        hooks.pre_forward(unit)
        return ()
    return _call_hooks(hooks.pre_forward, hooks.post_backward, unit, tensors)


def end_unit(hooks: UnshardHooks, unit: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Mark the end of a unit; returns its outputs."""
    if hooks is RESIDENT:
        return tensors
    return _call_hooks(hooks.post_forward, hooks.pre_backward, unit, tensors)


def _call_hooks(
    forward: Callable[[str], None],
    backward: Callable[[str], None],
    unit: str,
    tensors: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    calls = partial(forward, unit), partial(backward, unit)
    # torch's stubs state Tensor | None; the result is that of forward.
    return _HookCalls.apply(*calls, *tensors)


class _HookCalls(Function):
    """An identity that calls one function in forward and another in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        forward_hook: Callable[[], None],
        backward_hook: Callable[[], None],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.back = backward_hook
        ctx.set_materialize_grads(False)
        forward_hook()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.back()
        return None, None, *gradients
