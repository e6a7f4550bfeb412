"""Collectives with gradients, each over an explicit group; the plain ones are handed on.

Which form of a sum is right depends on what follows. ``sum_over``: every rank's part of the loss
depends on the sum, so gradients are summed too. ``sum_replicated``: all ranks do the same with the
sum, and each already has the whole gradient. ``replicate`` is the other end of that: a value that
all ranks have and use in different ways.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moefold.comm import plain
from moefold.comm.group import Group
from moefold.comm.plain import (
    Pending,
    all_gather_into,
    all_to_all_plain,
    broadcast_,
    gather,
    gather_objects,
    max_,
    receive,
    reduce_scatter_into,
    send,
    site_of,
    sum_,
)

__all__ = [
    "Pending",
    "all_gather",
    "all_gather_into",
    "all_to_all",
    "all_to_all_plain",
    "broadcast_",
    "gather",
    "gather_objects",
    "gather_rows",
    "max_",
    "receive",
    "reduce_scatter",
    "reduce_scatter_into",
    "replicate",
    "scatter_rows",
    "send",
    "sum_",
    "sum_over",
    "sum_replicated",
]


def _gathered(x: Tensor, group: Group, dim: int, label: str | None) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((group.size * front.shape[0], *front.shape[1:]))
    plain.gather_into(out, front, group, site_of(group, "all_gather", label))
    return out.movedim(0, dim).contiguous()


def _scattered(x: Tensor, group: Group, dim: int, label: str | None) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    rows, rest = divmod(front.shape[0], group.size)
    assert not rest, f"dim {dim} has {front.shape[0]} rows, which {group.size} ranks cannot share"
    out = front.new_empty((rows, *front.shape[1:]))
    plain.scatter_into(out, front, group, site_of(group, "reduce_scatter", label))
    return out.movedim(0, dim).contiguous()


def _summed(x: Tensor, group: Group, label: str | None) -> Tensor:
    return plain.reduce_(x.clone(), group, site_of(group, "all_reduce", label))


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.label = group, dim, group.recorder.label
        return _gathered(x, group, dim, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grad, ctx.group, ctx.dim, ctx.label), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.label = group, dim, group.recorder.label
        return _scattered(x, group, dim, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.group, ctx.dim, ctx.label), None, None


class _Sum(Function):
    """A sum in forward, in backward, or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forth: bool, back: bool) -> Tensor:
        ctx.group, ctx.back, ctx.label = group, back, group.recorder.label
        return _summed(x, group, None) if forth else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(grad, ctx.group, ctx.label) if ctx.back else grad, None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, x_R: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        ctx.label = group.recorder.label
        return plain.exchange(x_R, group, send, receive, site_of(group, "all_to_all"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        site = site_of(ctx.group, "all_to_all", ctx.label)
        return plain.exchange(grad, ctx.group, ctx.receive, ctx.send, site), None, None, None


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
        ctx.group, ctx.counts, ctx.label = group, counts, group.recorder.label
        return plain.gather_uneven(x, group, counts, site_of(group, "gather_rows"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        site = site_of(ctx.group, "scatter_rows", ctx.label)
        return plain.scatter_uneven(grad, ctx.group, ctx.counts, site), None, None


class _ScatterRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
        ctx.group, ctx.counts, ctx.label = group, counts, group.recorder.label
        return plain.scatter_uneven(x, group, counts, site_of(group, "scatter_rows"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        site = site_of(ctx.group, "gather_rows", ctx.label)
        return plain.gather_uneven(grad, ctx.group, ctx.counts, site), None, None


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Join every rank's ``x``, of one shape, along ``dim``. Backward sums and scatters."""
    return x if group.size == 1 else _Gather.apply(x, group, dim)  # type: ignore[return-value]


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Sum ``x`` over the ranks and return this rank's part along ``dim``. Backward gathers."""
    return x if group.size == 1 else _Scatter.apply(x, group, dim)  # type: ignore[return-value]


def sum_over(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, and gradients too: each rank's part of the loss depends on the sum."""
    return x if group.size == 1 else _Sum.apply(x, group, True, True)  # type: ignore[return-value]


def sum_replicated(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, for what all of them compute alike: gradients pass as they are."""
    return x if group.size == 1 else _Sum.apply(x, group, True, False)  # type: ignore[return-value]


def replicate(x: Tensor, group: Group) -> Tensor:
    """Return ``x``, which all ranks hold alike and use each in its way: gradients are summed."""
    return x if group.size == 1 else _Sum.apply(x, group, False, True)  # type: ignore[return-value]


def all_to_all(x_R: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send ``send[i]`` rows to each rank i of the group, in order along dim 0.

    Returns:
        The rows received, ``receive[i]`` from each rank i in order. Backward sends them back.
    """
    if group.size == 1:
        return x_R
    return _Exchange.apply(x_R, group, send, receive)  # type: ignore[return-value]


def gather_rows(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """Join the ranks' rows along dim 0, ``counts[i]`` from rank i. Backward: ``scatter_rows``."""
    return x if group.size == 1 else _GatherRows.apply(x, group, counts)  # type: ignore[return-value]


def scatter_rows(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """Sum ``x`` over the ranks and return ``counts[i]`` rows of it to each rank i in order.

    Sums run in rank order with one rounding. Backward: ``gather_rows``.
    """
    return x if group.size == 1 else _ScatterRows.apply(x, group, counts)  # type: ignore[return-value]
