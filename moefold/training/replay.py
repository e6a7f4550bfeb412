"""A bad step computed once more: whether its data or a machine is to blame.

The same weights, the same rows and the same order of sums give the same bits. Where they do, the
data or the model made the fault; where a rank's gradients differ, that rank's machine did, as long
as its kernels are deterministic (``deterministic: true`` makes them so on CUDA).
"""

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import gather_objects
from moefold.parallel.data.sharding import Data

MACHINE = "Replay: a machine fault"
DATA = "Replay: a fault of the data or the model"


def replay(data: Data, again: Callable[[], Any]) -> str:
    """Compute a step's gradients again and say what that tells; every rank calls it.

    Args:
        data: this rank's share of the model, with the gradients as they were.
        again: computes them anew.
    """
    before = digest(held.tensor for held in data.gradients())
    again()
    after = digest(held.tensor for held in data.gradients())
    said = gather_objects(before != after, data.placed.world.on_host)
    ranks = ", ".join(str(rank) for rank, differs in enumerate(said) if differs)
    if not ranks:
        return f"{DATA}: all ranks computed the same bits again"
    return (
        f"{MACHINE}: rank {ranks} got other bits from the same weights and data. What one "
        "computes reaches others: test the hardware of all that are named, then go on from the "
        "newest checkpoint"
    )


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a SHA-256 of the tensors' bytes."""
    found = sha256()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).contiguous().cpu()
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()
