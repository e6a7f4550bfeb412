"""Dispatchers from other packages: imported when chosen, and what all of them ask for."""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moefold.moe.dispatch.base import Dispatcher, Handle
from moefold.moe.dispatch.config import Foreign

DEVICE = "cuda"
"""Where the back ends run."""
Backend = TypeVar("Backend", bound=Foreign)


class ThirdPartyDispatch(Dispatcher[Backend]):
    """A dispatcher over ``ep`` by another package, which sends bf16 rows of GPUs."""

    def __init__(self, record: Backend, experts: int) -> None:
        super().__init__(record, experts)
        self._module = load(record)


NativeArrival = tuple[tuple[Tensor, ...], Handle, Handle]
"""Rows and weights that came, what else came, and the back end's own handle."""


class NativeExchange(Function):
    """An exchange of a back end, whose gradients go the other way by the same handle.

    Takes the call that sends, the call that brings gradients back by a handle, and what is sent.
    Gives what came, then the handle in parts: its settings, with None for each tensor, and these.
    """

    @staticmethod
    def forward(
        ctx: Any, there: Callable[..., NativeArrival], back: Callable[..., Handle], *sent: Tensor
    ) -> tuple[Any, ...]:
        """Send."""
        came, beside, native = there(*sent)
        settings = tuple(None if isinstance(part, Tensor) else (part,) for part in native)
        tensors = [part for part in native if isinstance(part, Tensor)]
        ctx.back, ctx.settings = back, settings
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*tensors, *(x for x in beside if isinstance(x, Tensor)))
        return *came, *beside, settings, *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Bring gradients back."""
        return None, None, *ctx.back(native_handle(ctx.settings, *ctx.saved_tensors), *gradients)


def native_handle(settings: Handle, *tensors: Tensor) -> Handle:
    """Return the back end's handle from its parts."""
    left = iter(tensors)
    return tuple(next(left) if part is None else part[0] for part in settings)


def load(record: Foreign) -> Any:
    """Import the package of a back end, and look whether it takes the calls that are made.

    Raises:
        ValueError: where it cannot be imported or is another version; says how to get it.
    """
    try:
        module = import_module(record.module)
        why = "; ".join(filter(None, (_mismatch(module, *call) for call in record.calls)))
    except Exception as error:  # packages look for their libraries here, each in its own way
        why = str(error).partition("\n")[0] or f"its import ends in a {type(error).__name__}"
    if why:
        raise ValueError(
            f"layout.dispatch: {record.kind} needs {record.module}, and {why}. {record.remedy}, "
            "or choose dispatch: alltoall_once, which sends the same rows"
        )
    return module


def _mismatch(module: Any, name: str, arguments: str) -> str:
    """Say why a function of a module does not take arguments of some names; empty if it does."""
    try:
        takes = signature(attrgetter(name)(module))
    except AttributeError:
        return f"it has no {name}"
    given = ["self"] if "self" in takes.parameters else []
    for argument in arguments.split():
        wanted = argument.removesuffix("?")
        given += [wanted] if wanted == argument or wanted in takes.parameters else []
    try:
        takes.bind(**dict.fromkeys(given))
    except TypeError as error:
        return f"its {name} is another: {error}"
    return ""


def row_ends(counts_E: Tensor, device: torch.device) -> Tensor:
    """Return int32 end rows of experts on a device from counts, which may be on the host."""
    return counts_E.to(device).cumsum(0, dtype=torch.int64).to(torch.int32)


def check_rows(record: Foreign, x_TD: Tensor) -> None:
    """Refuse rows that the back ends do not send.

    Raises:
        ValueError: where rows are not bf16 on a GPU.
    """
    if x_TD.dtype != torch.bfloat16 or x_TD.device.type != DEVICE:
        raise ValueError(
            f"layout.dispatch: {record.kind} sends bf16 rows of GPUs, and these are {x_TD.dtype} "
            f"on {x_TD.device.type}. Set train.precision: bf16, or choose dispatch: alltoall_once"
        )
