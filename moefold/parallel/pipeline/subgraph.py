"""A part of a pass with a separate autograd graph, so that backward runs part by part."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

Gradients = tuple[Tensor | None, ...]


class Subgraph:
    """One function of a pass, with an autograd graph from its detached inputs to its outputs.

    It keeps alive what the function saves for backward, but not its inputs and outputs.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], is_exchange: bool = False
    ) -> None:
        """Wrap a function; ``is_exchange``: it mostly waits for other ranks."""
        self._function = function
        self.is_exchange = is_exchange
        self._input_gradients: list[Tensor | None] = []
        self._edges: list[Any] = []
        self.seeds: Gradients = ()
        """Gradients, known since forward, of outputs that the next subgraph does not read."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the function; return its outputs, detached but with their ``requires_grad``."""
        requires_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        self._input_gradients = [None] * len(inputs)
        if any(requires_grad):
            anchor = torch.empty(0, requires_grad=True)
            inputs = _CaptureGradients.apply(
                anchor, self._input_gradients, requires_grad, *map(detached, inputs)
            )
        outputs = self._function(*inputs)
        requires_grad = tuple(isinstance(y, Tensor) and y.requires_grad for y in outputs)
        pairs = zip(outputs, requires_grad, strict=True)
        self._edges = [get_gradient_edge(y) if required else None for y, required in pairs]
        return tuple(map(detached, outputs, requires_grad))

    def forward_no_grad(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the function without saving anything; it must run again before its backward.

        Outputs still require gradients, so that later parts compute them.
        """
        with torch.no_grad():
            outputs = self._function(*inputs)
        return tuple(detached(y, isinstance(y, Tensor) and y.is_floating_point()) for y in outputs)

    def backward(self, *gradients: Tensor | None) -> Gradients:
        """Return the inputs' gradients, given those of the outputs; can be called once."""
        all_gradients = zip(self._edges, (*gradients, *self.seeds), strict=True)
        pairs = [(edge, grad) for edge, grad in all_gradients if None not in (edge, grad)]
        self._edges = []
        if pairs:
            edges, grads = zip(*pairs, strict=True)
            torch.autograd.backward(edges, grads)
        input_gradients = tuple(self._input_gradients)
        # Break a cycle: deferred products hold rows, rows the graph, and the graph this list.
        self._input_gradients.clear()
        return input_gradients


def detached(value: Any, requires_grad: bool = False) -> Any:
    """Return a tensor without its autograd history; other values unchanged."""
    return value.detach().requires_grad_(requires_grad) if isinstance(value, Tensor) else value


class _CaptureGradients(torch.autograd.Function):
    """An identity that captures gradients without holding the tensors.

    The anchor makes autograd record the function: detached inputs would not, and inputs that
    require gradients would be kept alive, storage included, until backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        captured: list[Tensor | None],
        requires_grad: Sequence[bool],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.captured = captured
        ctx.set_materialize_grads(False)
        outputs = tuple(map(detached, tensors))
        constant = [x for x, required in zip(outputs, requires_grad, strict=True) if not required]
        ctx.mark_non_differentiable(*(x for x in constant if isinstance(x, Tensor)))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        ctx.captured[:] = gradients
        return (None,) * (3 + len(gradients))
