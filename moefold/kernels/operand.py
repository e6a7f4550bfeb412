"""A weight as the kernels see it: the trained parameter beside the values products use."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Operand:
    """A weight's two faces.

    ``master`` is the parameter that receives the gradient; ``value`` is what enters products, in
    the compute dtype (the same tensor in fp32). Later formats (codes and scales) add fields here
    and touch only ``kernels/``.
    """

    master: Tensor
    value: Tensor
    low_rank: "AdapterOperand | None" = None
    """What is added to each of its products."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameter and what products read, its adapter's too."""
        low = self.low_rank
        inner = () if low is None else (*low.a.tensors, *low.b.tensors)
        return (self.master, self.value, *inner)


@dataclass(frozen=True)
class AdapterOperand:
    """A low-rank adapter of a weight: a product adds ``scale * B (A x)``."""

    a: Operand
    """[..., rank, in]"""
    b: Operand
    """[..., out, rank]"""
    scale: float
    drop: Callable[[Tensor], Tensor] | None = None
    """What ``x`` is handed through in training; linear, and its own gradient."""

    def dropped(self, x: Tensor) -> Tensor:
        """Return the rows that A reads, or of their gradient what comes back."""
        return x if self.drop is None else self.drop(x)
