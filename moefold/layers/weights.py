"""Weights that do not stay on a rank come before a unit of the model runs, and go after it.

A unit's gradients are complete when the gradient of its inputs is: all between has run. So the
places where a unit begins and ends are identities whose backward tells the rest. A schedule that
runs a unit in pieces makes the four calls itself.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

EMBEDDING = "embed"
"""The unit that holds the token table."""


def unit_of(name: str) -> str:
    """Return the unit that a parameter is of: ``embed``, ``layers.3``, ``norm``, ``head``."""
    words = name.split(".")
    return ".".join(words[: 2 if words[0] == "layers" else 1])


class Weights(Protocol):
    """Told of what one micro-batch does on its way through some units, there and back."""

    def enter(self, unit: str) -> None:
        """The unit is about to run."""
        ...

    def leave(self, unit: str) -> None:
        """The unit has run."""
        ...

    def returns(self, unit: str) -> None:
        """The unit's backward is about to run."""
        ...

    def returned(self, unit: str) -> None:
        """The unit's backward has run."""
        ...

    def using(self, unit: str) -> AbstractContextManager[None]:
        """While open, the unit runs and its gradients are added at once: the head and the loss."""
        ...

    def collect(self) -> None:
        """Products of weights that have waited are about to run."""
        ...

    def end(self) -> None:
        """All gradients of the way's weights are added."""
        ...


class Here:
    """All weights are here all the time."""

    def enter(self, unit: str) -> None:
        """Do nothing."""

    def leave(self, unit: str) -> None:
        """Do nothing."""

    def returns(self, unit: str) -> None:
        """Do nothing."""

    def returned(self, unit: str) -> None:
        """Do nothing."""

    def using(self, unit: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def collect(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


HERE = Here()


def entering(weights: Weights, unit: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Begin a unit; returns its inputs."""
    if weights is HERE:
        return tensors
    if not tensors:
        weights.enter(unit)
        return ()
    return _Enter.apply(weights, unit, *tensors)  # type: ignore[return-value]


def leaving(weights: Weights, unit: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """End a unit; returns its outputs."""
    if weights is HERE:
        return tensors
    return _Leave.apply(weights, unit, *tensors)  # type: ignore[return-value]


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, weights: Weights, unit: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.weights, ctx.unit = weights, unit
        weights.enter(unit)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.weights.returned(ctx.unit)
        return None, None, *gradients


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, weights: Weights, unit: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.weights, ctx.unit = weights, unit
        ctx.set_materialize_grads(False)
        weights.leave(unit)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.weights.returns(ctx.unit)
        return None, None, *gradients
