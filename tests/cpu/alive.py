"""Which memory a pass leaves alive: every storage that it makes, and those known before."""

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefold.layers.flow import Flow


class Made(TorchDispatchMode):
    """Sees every storage that is made while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                known = self.storages.get(storage._cdata)
                if known is None or known[0].expired():
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self, known: set[int]) -> int:
        """Return the bytes of those that are still there and not known."""
        found = self.storages.items()
        return sum(size for key, (s, size) in found if key not in known and not s.expired())


def there(layer: nn.Module, flow: Flow) -> set[int]:
    """Return the storages of weights, their copies, counters, rows and angles."""
    angles = [t for a in flow._angles.values() for t in (a.cos_Tp, a.sin_Tp)]
    copies = [copy for _, _, copy in flow.recipe._copies.values()]
    rows = [value for value in vars(flow.rows).values() if isinstance(value, torch.Tensor)]
    known = [*layer.parameters(), *layer.buffers(), *copies, *angles, *rows]
    return {one.untyped_storage()._cdata for one in known}
