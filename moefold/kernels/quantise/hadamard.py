"""The 16 x 16 Hadamard transform with fixed signs, which spreads an outlier over its block."""

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TransformerEngine's signs, of the rows."""


def matrix(device: torch.device | str = "cpu", size: int = SIZE) -> Tensor:
    """Return the transform in fp32: ``diag(signs) H / 4``, exactly orthogonal.

    ``size`` is a smaller power of two for small models.
    """
    square = torch.ones(1, 1, device=device)
    while len(square) < size:
        square = torch.cat([torch.cat([square, square], 1), torch.cat([square, -square], 1)])
    return square.mul_(torch.tensor(SIGNS[:size], device=device)[:, None]).div_(size**0.5)


def transform(x: Tensor, size: int = SIZE) -> Tensor:
    """Return each run of 16 along the last dim times the matrix, in fp32.

    Zeros fill the last run. Terms are added in order, one by one: no bit depends on the shape.
    ``size`` as for :func:`matrix`.
    """
    runs = F.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    turned = torch.zeros_like(runs)
    for index, row in enumerate(matrix(x.device, size)):
        turned.add_(runs[..., index : index + 1] * row)
    return turned.flatten(-2)
