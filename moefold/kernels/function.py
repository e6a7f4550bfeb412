"""Base classes of autograd functions and of dispatch modes, with less overhead than PyTorch's."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode


class _NoSaveContext:
    """Stands in for autograd's context in a forward without backward; saves nothing."""

    needs_input_grad = (False,) * 32

    def save_for_backward(self, *tensors: Any) -> None:
        """Discard the tensors."""


class Function(torch.autograd.Function):
    """``torch.autograd.Function`` whose forward is called directly when gradients are disabled.

    Generation runs many small operations on single rows, for which autograd's overhead is as large
    as the work. ``backward`` of subclasses is not differentiable.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Torch declares that backward takes any arguments; a subclass takes specific ones.
        cls.backward = staticmethod(once_differentiable(cls.backward))  # type: ignore[assignment]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run the forward; save tensors for backward only if gradients are enabled."""
        if torch.is_grad_enabled():
            return super().apply(*args)
        return cls.forward(_NoSaveContext(), *args)


class EagerMode(TorchDispatchMode):
    """A dispatch mode without PyTorch's guard against compiling it, which slows each operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
