"""A weight as kernels take it: the trained parameter and the values that products read."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Operand:
    """A weight in both of its forms.

    ``master`` is the parameter that receives the gradient; ``value`` is the tensor that products
    read, in the compute dtype (in fp32 the same tensor as ``master``).
    """

    master: Tensor
    value: Tensor
    low_rank: "AdapterOperand | None" = None
    """Low-rank adapter whose product is added to each product of the weight."""
    first_row: int = 0
    """Index of its first row in the whole weight, of which it may be a rank's shard."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """``master`` and ``value``, followed by those of an adapter's A and B."""
        adapter = self.low_rank
        adapters = () if adapter is None else (*adapter.a.tensors, *adapter.b.tensors)
        return (self.master, self.value, *adapters)


@dataclass(frozen=True)
class AdapterOperand:
    """A low-rank adapter of a weight: adds ``scale * B (A x)`` to each product."""

    a: Operand
    """[..., rank, in]"""
    b: Operand
    """[..., out, rank]"""
    scale: float
    dropout: Callable[[Tensor], Tensor] | None = None
    """Dropout of ``x`` in training: a linear function that is its own transpose."""

    def apply_dropout(self, x: Tensor) -> Tensor:
        """Apply dropout, if any, to the rows that A reads, or to their gradient."""
        return x if self.dropout is None else self.dropout(x)
