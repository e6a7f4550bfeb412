"""Base of dispatchers of other packages, which are imported only if chosen."""

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
"""Device type on which the back ends run."""
Backend = TypeVar("Backend", bound=Foreign)


class ThirdPartyDispatch(Dispatcher[Backend]):
    """A dispatcher over ``ep`` by another package, which sends bf16 rows on GPUs."""

    def __init__(self, record: Backend, experts: int) -> None:
        super().__init__(record, experts)
        self._module = load(record)


NativeArrival = tuple[tuple[Tensor, ...], Handle, Handle]
"""Received rows and weights, other results, and the native handle of the back end."""


class NativeExchange(Function):
    """Autograd function of a back end's exchange, whose backward reuses the native handle.

    Takes the call that sends, the call that returns gradients by a handle, and the tensors to send.
    Returns the results, then the handle: its settings, with None for each tensor, and its tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, there: Callable[..., NativeArrival], back: Callable[..., Handle], *sent: Tensor
    ) -> tuple[Any, ...]:
        """Run the exchange."""
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
        """Return gradients by the reverse exchange."""
        return None, None, *ctx.back(native_handle(ctx.settings, *ctx.saved_tensors), *gradients)


def native_handle(settings: Handle, *tensors: Tensor) -> Handle:
    """Reassemble the native handle from its settings and tensors."""
    left = iter(tensors)
    return tuple(next(left) if part is None else part[0] for part in settings)


def load(record: Foreign) -> Any:
    """Import the package of a back end, and check the signatures of the functions called.

    Raises:
        ValueError: if it cannot be imported or its version does not fit; states how to install it.
    """
    try:
        module = import_module(record.module)
        why = "; ".join(filter(None, (_mismatch(module, *call) for call in record.calls)))
    except Exception as error:  # packages look for their libraries here, each in its own way
        why = str(error).partition("\n")[0] or f"its import fails with {type(error).__name__}"
    if why:
        raise ValueError(
            f"layout.dispatch: {record.kind} needs {record.module}: {why}. {record.remedy}, "
            "or choose dispatch: alltoall_once, which sends the same rows"
        )
    return module


def _mismatch(module: Any, name: str, arguments: str) -> str:
    """Return why a function of a module does not accept these arguments; empty if it does."""
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
        return f"its {name} takes other arguments: {error}"
    return ""


def row_ends(counts_E: Tensor, device: torch.device) -> Tensor:
    """Return int32 end rows of experts on ``device`` from counts, which may be on the host."""
    return counts_E.to(device).cumsum(0, dtype=torch.int64).to(torch.int32)


def check_rows(record: Foreign, x_TD: Tensor) -> None:
    """Refuse rows that the back ends cannot send.

    Raises:
        ValueError: if rows are not bf16 on a GPU.
    """
    if x_TD.dtype != torch.bfloat16 or x_TD.device.type != DEVICE:
        raise ValueError(
            f"layout.dispatch: {record.kind} sends only bf16 rows on GPUs, not {x_TD.dtype} on "
            f"{x_TD.device.type}. Set train.precision: bf16, or choose dispatch: alltoall_once"
        )
