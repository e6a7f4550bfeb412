"""Base of dispatchers by other packages, which are imported only if chosen."""

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
from moefold.moe.dispatch.config import ThirdParty

DEVICE = "cuda"
"""Device type on which the back ends run."""
Backend = TypeVar("Backend", bound=ThirdParty)


class ThirdPartyDispatch(Dispatcher[Backend]):
    """Dispatcher over ``ep`` by another package, which sends bf16 rows on GPUs."""

    def __init__(self, record: Backend, experts: int) -> None:
        super().__init__(record, experts)
        self._module = load(record)


NativeArrival = tuple[tuple[Tensor, ...], Handle, Handle]
"""Received rows and weights, other results, and the back end's native handle."""


class NativeExchange(Function):
    """Autograd function of a back end's exchange, whose backward reuses the native handle.

    Takes the call that sends, the call that returns gradients by a handle, and the tensors to send.
    Returns the results, then the handle as settings (None for each tensor) and tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, send: Callable[..., NativeArrival], reverse: Callable[..., Handle], *sent: Tensor
    ) -> tuple[Any, ...]:
        """Run the exchange."""
        received, extra, native = send(*sent)
        settings = tuple(None if isinstance(part, Tensor) else (part,) for part in native)
        tensors = [part for part in native if isinstance(part, Tensor)]
        ctx.reverse = reverse
        ctx.settings = settings
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*tensors, *(x for x in extra if isinstance(x, Tensor)))
        return *received, *extra, settings, *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return gradients by the reverse exchange."""
        return None, None, *ctx.reverse(native_handle(ctx.settings, *ctx.saved_tensors), *gradients)


def native_handle(settings: Handle, *tensors: Tensor) -> Handle:
    """Reassemble the native handle from its settings and tensors."""
    remaining = iter(tensors)
    return tuple(next(remaining) if part is None else part[0] for part in settings)


def load(record: ThirdParty) -> Any:
    """Import a back end's package, and check the signatures of the functions called.

    Raises:
        ValueError: if the import fails or the version does not fit; states how to install it.
    """
    try:
        module = import_module(record.module)
        why = "; ".join(filter(None, (_mismatch(module, *call) for call in record.required_calls)))
    except Exception as error:  # packages fail in different ways when they load libraries
        why = str(error).partition("\n")[0] or f"its import fails with {type(error).__name__}"
    if why:
        raise ValueError(
            f"layout.dispatch: {record.kind} needs {record.module}: {why}. {record.install}, "
            "or choose dispatch: alltoall_once, which sends the same rows"
        )
    return module


def _mismatch(module: Any, function: str, arguments: str) -> str:
    """Return why a module's function does not accept these arguments; empty if it does."""
    try:
        takes = signature(attrgetter(function)(module))
    except AttributeError:
        return f"it has no {function}"
    passed = ["self"] if "self" in takes.parameters else []
    for argument in arguments.split():
        name = argument.removesuffix("?")
        passed += [name] if name == argument or name in takes.parameters else []
    try:
        takes.bind(**dict.fromkeys(passed))
    except TypeError as error:
        return f"its {function} takes other arguments: {error}"
    return ""


def row_ends(counts_E: Tensor, device: torch.device) -> Tensor:
    """Return int32 end rows of experts on ``device`` from counts, which may be on the host."""
    return counts_E.to(device).cumsum(0, dtype=torch.int64).to(torch.int32)


def check_rows(record: ThirdParty, x_TD: Tensor) -> None:
    """Refuse rows that the back ends cannot send.

    Raises:
        ValueError: if rows are not bf16 on a GPU.
    """
    if x_TD.dtype != torch.bfloat16 or x_TD.device.type != DEVICE:
        raise ValueError(
            f"layout.dispatch: {record.kind} sends only bf16 rows on GPUs, not {x_TD.dtype} on "
            f"{x_TD.device.type}. Set train.precision: bf16, or choose dispatch: alltoall_once"
        )
