"""An autograd function that costs its forward alone where no gradient is asked for."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _NothingKept:
    """Stands for autograd's context in a forward without a backward: it goes with the call."""

    needs_input_grad = (False,) * 32

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep nothing."""


class Function(torch.autograd.Function):
    """``torch.autograd.Function``, whose forward is called as it is where gradients are off.

    A row a token is many small operations, for which autograd's way through takes as long. A
    subclass's ``backward`` is plain numbers: its results have no gradient of their own.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        # Torch states its own backward's type, which takes any arguments; a subclass's takes a few.
        cls.backward = staticmethod(once_differentiable(cls.backward))  # type: ignore[assignment]

    @classmethod
    def apply(cls, *given: Any) -> Any:
        """Run the forward, and keep what the backward needs where there may be one."""
        if torch.is_grad_enabled():
            return super().apply(*given)
        return cls.forward(_NothingKept(), *given)
