"""Base class of autograd functions that bypasses autograd where gradients are disabled."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _NothingKept:
    """Replaces autograd's context in a forward without a backward; saves nothing."""

    needs_input_grad = (False,) * 32

    def save_for_backward(self, *tensors: Any) -> None:
        """Discard the tensors."""


class Function(torch.autograd.Function):
    """``torch.autograd.Function`` whose forward is called directly where gradients are disabled.

    Generation with one row per token is many small operations, for which the overhead of autograd
    is as large as the work. ``backward`` of subclasses is not differentiable.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        # Torch types backward as taking any arguments; that of a subclass takes certain ones.
        cls.backward = staticmethod(once_differentiable(cls.backward))  # type: ignore[assignment]

    @classmethod
    def apply(cls, *given: Any) -> Any:
        """Run the forward; save tensors for backward only where gradients are enabled."""
        if torch.is_grad_enabled():
            return super().apply(*given)
        return cls.forward(_NothingKept(), *given)
