"""Buffers whose number format is part of their meaning."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn


class ExactBuffers(nn.Module):
    """A module whose own buffers keep their dtype when the model is cast.

    Counts that became bfloat16 no longer tell 40,841 from 40,840, and a selection bias no longer
    moves by 1e-3. Devices change as usual; the buffers of submodules are theirs to keep.
    """

    def _apply(self, fn: Callable[[Tensor], Any], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                # From the old values: the cast has already lost digits.
                self._buffers[name] = old.to(new.device)
        return self
