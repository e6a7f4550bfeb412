"""Gradient sinks: a weight's gradient is returned to autograd, added to ``.grad``, or queued.

Every product with a weight passes its gradient to one of these sinks. Accumulating in place saves a
temporary of the weight's size per micro-batch; a queue lets a pipeline schedule run the product
later, as its action W. With every sink, each product runs exactly once.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.operand import Operand

Product = Callable[[Tensor | None], Tensor]
"""``product(into)`` computes a weight's gradient and adds it to ``into`` in place unless None."""


class GradientSink(Protocol):
    """Receives the product that computes a weight's gradient."""

    def deliver(self, weight: Tensor, product: Product) -> Tensor | None:
        """Run ``product`` now or later; return the gradient for autograd, None for no gradient."""
        ...


class AutogradSink:
    """Returns gradients to autograd, which accumulates them."""

    def deliver(self, weight: Tensor, product: Product) -> Tensor:
        """Return the gradient in the weight's dtype."""
        return product(None).to(weight.dtype)


class AccumulatingSink:
    """Adds to ``weight.grad`` in place, in the weight's dtype (fp32 for master weights)."""

    def deliver(self, weight: Tensor, product: Product) -> None:
        """Run the product and add its result to ``.grad``; the first result becomes ``.grad``."""
        accumulate(weight, product)


class DeferredSink:
    """Queues the products of a micro-batch until :meth:`drain` runs them.

    Gradients of vectors, which are sums over rows, are computed immediately and queued as results:
    they cost little, and a queued product would keep its rows in memory.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Product]] = []
        """Weights and their products; a product keeps the tensors that it reads in memory."""

    def deliver(self, weight: Tensor, product: Product) -> None:
        """Queue the product."""
        if weight.ndim <= 1:
            with torch.no_grad():
                product = precomputed(product(None))
        self.pending.append((weight, product))

    def drain(self) -> int:
        """Run all queued products in order; return their number."""
        count = len(self.pending)
        for weight, product in self.pending:
            accumulate(weight, product)
        self.pending.clear()
        return count


class EagerSink:
    """Runs products at once, so that no rows stay in memory, and queues each weight's sum."""

    def __init__(self, queue: DeferredSink) -> None:
        self._queue = queue
        self._sums = dict[Tensor, Tensor]()

    def deliver(self, weight: Tensor, product: Product) -> None:
        """Run the product and add it to the weight's sum, which the first product queues."""
        with torch.no_grad():
            if weight in self._sums:
                product(self._sums[weight])
                return
            self._sums[weight] = product(None).to(weight.dtype)
        self._queue.deliver(weight, precomputed(self._sums[weight]))


def precomputed(gradient: Tensor) -> Product:
    """Return a product whose result is the given, already computed gradient."""
    return lambda into: gradient if into is None else into.add_(gradient)


def accumulate(weight: Tensor, product: Product) -> None:
    """Add the result of ``product`` to ``weight.grad``, in place from the second call on."""
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = product(None).to(weight.dtype)
        else:
            product(weight.grad)


AUTOGRAD_SINK = AutogradSink()


def read_parameter(weight: Operand, sink: GradientSink) -> Tensor:
    """Return a copy of a parameter's values for ordinary torch code; its gradient goes to the sink.

    For small parameters that no product of the kernels reads, such as a logit per head.
    """
    return _ReadParameter.apply(weight.master, weight.value, sink)


class _ReadParameter(Function):
    @staticmethod
    def forward(ctx: Any, master: Tensor, value: Tensor, sink: GradientSink) -> Tensor:
        ctx.master = master
        ctx.sink = sink
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.sink.deliver(ctx.master, precomputed(grad)), None, None
