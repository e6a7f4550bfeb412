"""Where the gradient of a weight goes: to autograd, straight into ``.grad``, or onto a queue.

Every weight product hands its gradient to one of these sinks. Accumulating in place saves a
temporary the size of the weight per micro-batch; a queue lets a pipeline schedule run the product
later, as its action W. Whatever the sink, each product runs exactly once.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

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
    """Queues the products of a micro-batch until :meth:`drain` runs them."""

    def __init__(self) -> None:
        self._queue: list[tuple[Tensor, Product]] = []

    def deliver(self, weight: Tensor, product: Product) -> None:
        """Keep the product, and what it holds on to, for later."""
        self._queue.append((weight, product))

    def drain(self) -> int:
        """Run all queued products in order; returns how many there were."""
        count = len(self._queue)
        for weight, product in self._queue:
            accumulate(weight, product)
        self._queue.clear()
        return count


def accumulate(weight: Tensor, product: Product) -> None:
    """Add ``product`` to ``weight.grad``, in place from the second time on."""
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = product(None).to(weight.dtype)
        else:
            product(weight.grad)


RETURNED = Returned()
