"""Where the gradient of a weight goes: to autograd, straight into ``.grad``, or onto a queue.

Every weight product hands its gradient to one of these sinks. Accumulating in place saves a
temporary the size of the weight per micro-batch; a queue lets a pipeline schedule run the product
later, as its action W. Whatever the sink, each product runs exactly once.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from moefold.kernels.function import Function
from moefold.kernels.operand import Operand

Product = Callable[[Tensor | None], Tensor]
"""``product(into)``: the weight's gradient, added to ``into`` in place where that is given."""


class GradientSink(Protocol):
    """Takes a weight's gradient product; what it returns goes back to autograd."""

    def deliver(self, weight: Tensor, product: Product) -> Tensor | None:
        """Run ``product`` now or later for ``weight``; None where autograd has nothing to add."""
        ...


class Returned:
    """Autograd's own way: the product is returned and autograd accumulates it."""

    def deliver(self, weight: Tensor, product: Product) -> Tensor:
        """Return the gradient in the weight's dtype."""
        return product(None).to(weight.dtype)


class Accumulated:
    """Adds to ``weight.grad`` in place, in the weight's dtype (fp32 for master weights)."""

    def deliver(self, weight: Tensor, product: Product) -> None:
        """Run the product and add it; the first one becomes ``.grad``."""
        accumulate(weight, product)


class Deferred:
    """Queues the products of a micro-batch until :meth:`drain` runs them.

    Sums over rows, which vectors have for a gradient, are made at once and wait as such: they cost
    little, and would hold their rows.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Product]] = []
        """Weights, and products that hold what they read."""

    def deliver(self, weight: Tensor, product: Product) -> None:
        """Keep the product, and what it holds on to, for later."""
        self.waiting.append((weight, product if weight.ndim > 1 else _summed(product)))

    def drain(self) -> int:
        """Run all queued products in order; returns how many there were."""
        count = len(self.waiting)
        for weight, product in self.waiting:
            accumulate(weight, product)
        self.waiting.clear()
        return count


class AtOnce:
    """Runs the products of a queue at once, so that no rows wait there, and queues each sum."""

    def __init__(self, queue: Deferred) -> None:
        self._queue, self._sums = queue, dict[Tensor, Tensor]()

    def deliver(self, weight: Tensor, product: Product) -> None:
        """Run the product and add it to the sum, which waits from the first one on."""
        with torch.no_grad():
            if weight in self._sums:
                product(self._sums[weight])
                return
            self._sums[weight] = product(None).to(weight.dtype)
        self._queue.deliver(weight, made(self._sums[weight]))


def _summed(product: Product) -> Product:
    with torch.no_grad():
        return made(product(None))


def made(gradient: Tensor) -> Product:
    """Return the product that gives a gradient which is there already."""
    return lambda into: gradient if into is None else into.add_(gradient)


def accumulate(weight: Tensor, product: Product) -> None:
    """Add ``product`` to ``weight.grad``, in place from the second time on."""
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = product(None).to(weight.dtype)
        else:
            product(weight.grad)


RETURNED = Returned()


def read_parameter(weight: Operand, sink: GradientSink) -> Tensor:
    """Return a parameter's values to compute with freely; the gradient goes to the sink.

    For small parameters that no product of the kernels reads, such as a logit of each head.
    """
    return _Read.apply(weight.master, weight.value, sink)  # type: ignore[return-value]


class _Read(Function):
    @staticmethod
    def forward(ctx: Any, master: Tensor, value: Tensor, sink: GradientSink) -> Tensor:
        ctx.master, ctx.sink = master, sink
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.sink.deliver(ctx.master, made(grad)), None, None
