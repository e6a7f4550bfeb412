"""A weight as the kernels see it: the trained parameter beside the values products use."""

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
