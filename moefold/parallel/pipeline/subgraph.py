"""Part of a pass whose autograd graph is apart: backward can stop at its borders."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

Gradients = tuple[Tensor | None, ...]


class Subgraph:
    """One function of a pass, from its inputs' border to its outputs' border.

    It keeps what its function saves for backward and nothing else: neither inputs nor outputs.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], exchanges: bool = False
    ) -> None:
        """Take the function, and whether it mostly waits for other ranks."""
        self._function, self.exchanges = function, exchanges
        self._caught: list[Tensor | None] = []
        self._edges: list[Any] = []
        self.seeds: Gradients = ()
        """Gradients, known from the forward on, of outputs that the next subgraph does not take."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the function; each output asks for a gradient where one would reach something."""
        live = tuple(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        self._caught = [None] * len(inputs)
        if any(live):
            anchor = torch.empty(0, requires_grad=True)
            inputs = _Border.apply(anchor, self._caught, live, *map(detached, inputs))  # type: ignore[assignment]
        outputs = self._function(*inputs)
        live = tuple(isinstance(y, Tensor) and y.requires_grad for y in outputs)
        pairs = zip(outputs, live, strict=True)
        self._edges = [get_gradient_edge(y) if lives else None for y, lives in pairs]
        return tuple(map(detached, outputs, live))

    def bare(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the function and keep nothing: it runs again before its backward.

        What follows still asks for gradients.
        """
        with torch.no_grad():
            outputs = self._function(*inputs)
        return tuple(detached(y, isinstance(y, Tensor) and y.is_floating_point()) for y in outputs)

    def backward(self, *gradients: Tensor | None) -> Gradients:
        """Run backward from the outputs' gradients, once; returns those of the inputs."""
        given = zip(self._edges, (*gradients, *self.seeds), strict=True)
        pairs = [(edge, grad) for edge, grad in given if None not in (edge, grad)]
        self._edges = []
        if pairs:
            edges, grads = zip(*pairs, strict=True)
            torch.autograd.backward(edges, grads)
        found = tuple(self._caught)
        # Products of weights that wait hold rows, rows hold the graph, and that holds this list.
        self._caught.clear()
        return found


def detached(value: Any, live: bool = False) -> Any:
    """Return a tensor without its history; a value of the host, which has none, as it is."""
    return value.detach().requires_grad_(live) if isinstance(value, Tensor) else value


class _Border(torch.autograd.Function):
    """Hands tensors on and catches their gradients; keeps nothing of the tensors themselves.

    The anchor is what makes autograd follow it: detached inputs would not, and inputs that ask for
    gradients would be kept alive, storage and all, until backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        caught: list[Tensor | None],
        live: Sequence[bool],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        handed = tuple(map(detached, tensors))
        dead = [x for x, lives in zip(handed, live, strict=True) if not lives]
        ctx.mark_non_differentiable(*(x for x in dead if isinstance(x, Tensor)))
        return handed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        ctx.caught[:] = gradients
        return (None,) * (3 + len(gradients))
