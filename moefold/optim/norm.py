"""The global gradient norm, its clipping factor, and detection of non-finite values.

Everything stays on the device until ``read_scalars`` fetches a step's scalars in one transfer.
Squared norms are returned, since ranks can add them.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

BLOCK = 512
"""Elements summed in float32; sums of blocks are added in float64."""


def squared_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over all elements of all tensors, 0-dim, on ``device``.

    float64 (float32 on devices without it), because a float32 sum over ten million elements has an
    error of 4e-4 on a CPU. Exactly zero for no tensors. Not finite if and only if an element is not
    finite, or so large (about 1e17) that the sum of squares overflows float32.
    """
    wide = widest_dtype(device)
    parts = list[Tensor]()
    for tensor in tensors:
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        flat = tensor.detach().reshape(-1)
        # Short sums: norms of blocks keep the relative error below 5e-7.
        blocked = flat.numel() // BLOCK * BLOCK
        if blocked:
            blocks = flat[:blocked].view(-1, BLOCK)
            parts.append(torch.linalg.vector_norm(blocks, dim=1, dtype=dtype))
        if blocked < flat.numel():
            parts.append(torch.linalg.vector_norm(flat[blocked:], dtype=dtype).view(1))
    if not parts:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch.cat([part.to(wide) for part in parts])
    return torch.dot(norms, norms)


def clip_scale(norm: float, limit: float | None) -> float:
    """Return the factor that scales a gradient of ``norm`` down to ``limit``; 1 if it is below.

    ``Optimizer.step`` applies it, without another pass over the gradients. Raises ``ValueError``
    for a norm that is not finite: such a step must not be taken.
    """
    if not math.isfinite(norm):
        raise ValueError(f"gradient norm {norm} is not finite")
    return 1.0 if limit is None or norm <= limit else limit / norm


def read_scalars(values: Tensor) -> list[float]:
    """Return a tensor's values as Python floats; the host waits for the device, once."""
    return values.detach().reshape(-1).to(widest_dtype(values.device)).tolist()


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with a NaN or infinity; for reports, as it synchronises."""
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64 if the device supports it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64
