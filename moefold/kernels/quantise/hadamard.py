"""The 16 x 16 Hadamard transform with fixed signs, which spreads an outlier over its block."""

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of the rows, those of TransformerEngine."""


def matrix(device: torch.device | str = "cpu", size: int = SIZE) -> Tensor:
    """Return the transform in fp32: ``diag(signs) H / 4``, exactly orthogonal.

    ``size`` may be a smaller power of two, for small models.
    """
    square = torch.ones(1, 1, device=device)
    while len(square) < size:
        upper = torch.cat([square, square], 1)
        lower = torch.cat([square, -square], 1)
        square = torch.cat([upper, lower])
    signs = torch.tensor(SIGNS[:size], device=device)
    return square.mul_(signs[:, None]).div_(size**0.5)


def transform(x: Tensor, size: int = SIZE) -> Tensor:
    """Multiply each run of ``size`` elements along the last dim by the matrix, in fp32.

    The last run is padded with zeros. Terms are added one by one in order, so that results do not
    depend on the shape.
    """
    runs = F.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    transformed = torch.zeros_like(runs)
    for index, row in enumerate(matrix(x.device, size)):
        transformed.add_(runs[..., index : index + 1] * row)
    return transformed.flatten(-2)
