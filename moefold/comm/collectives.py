"""Collectives over explicit groups: in place, into a buffer, or differentiable.

The only file that calls torch's collectives. Over a group of one rank each is the identity and is
not recorded. Recorded bytes are what this rank sends in the cheapest form of the operation: a ring
for sums and gathers, rows for other ranks in an exchange. ``label`` is for operations of a backward
pass, which are recorded under the module of the forward call.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moefold.comm.group import Group
from moefold.comm.recorder import BACKWARD, CallRecord, CallSite

# torch 2.13 renamed two functions; the old names warn there.
_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def _begin(
    group: Group, op: str, tensor: Tensor, bytes_sent: int, blocking: bool, label: str | None = None
) -> CallRecord:
    site = CallSite(group.recorder.label, op, group.name)
    if label is not None:
        site = CallSite(label, op, group.name, BACKWARD)
    return group.recorder.begin(site, group.channel, group.ranks, tensor, bytes_sent, blocking)


def _end(record: CallRecord, group: Group, out: Tensor, local: Tensor | None) -> None:
    """Close a record; if a proof injects a fault, alter ``out``.

    ``local`` is the result without contributions of other ranks, None for zeros.
    """
    group.recorder.end(record)
    if group.recorder.inject_fault is not None:
        local = torch.zeros_like(out) if local is None else local.reshape(out.shape)
        out.copy_(group.recorder.inject_fault(record, out, local))


class Pending:
    """An operation in flight. Its output must not be accessed before ``wait`` has returned."""

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        call: tuple[CallRecord, Group, Tensor, Tensor | None] | None = None,
        keep_alive: Tensor | None = None,
    ) -> None:
        """Store the backend's works, the arguments of ``_end``, and a tensor that is being read."""
        self._works = works
        self._call = call
        self._keep_alive = keep_alive
        if call is not None:
            record, group, *_ = call
            group.recorder.keep(record, works)

    def wait(self) -> None:
        """Wait until the result may be read; a second call does nothing.

        Raises:
            RuntimeError: after the group's time-out, or if another rank has exited.
        """
        works = self._works
        call = self._call
        self._works = ()
        self._call = None
        if call is not None:
            record, group, *_ = call
            group.recorder.wait(record)
            for work in works:
                work.wait()  # on CUDA only this thread's current stream waits
            _end(*call)
        self._keep_alive = None


def _in_place(run: Callable[[Tensor], Any], x: Tensor, group: Group, record: CallRecord) -> Tensor:
    """Run an in-place operation that needs a contiguous tensor on a tensor of any strides."""
    before = x.clone() if group.recorder.inject_fault is not None else x
    if x.numel():
        contiguous = x.contiguous()
        run(contiguous)
        if contiguous is not x:
            x.copy_(contiguous)
    _end(record, group, x, before)
    return x


def all_reduce_(
    x: Tensor, group: Group, label: str | None = None, op: Any = dist.ReduceOp.SUM
) -> Tensor:
    """All-reduce in place; every rank gets the same bits."""
    if group.size == 1:
        return x
    name = "all_reduce" if op == dist.ReduceOp.SUM else "all_reduce_max"
    record = _begin(group, name, x, 2 * (group.size - 1) * x.nbytes // group.size, True, label)
    return _in_place(lambda y: dist.all_reduce(y, op, group=group.handle), x, group, record)


def sum_(tensor: Tensor, group: Group) -> Tensor:
    """Sum over the ranks in place; every rank gets the same bits. For booleans: any."""
    return all_reduce_(tensor, group)


def max_(tensor: Tensor, group: Group, label: str | None = None) -> Tensor:
    """Take the maximum over the ranks in place."""
    return all_reduce_(tensor, group, label, dist.ReduceOp.MAX)


def broadcast_(tensor: Tensor, group: Group, index: int) -> Tensor:
    """Broadcast in place from the rank at ``index`` of the group."""
    if group.size == 1:
        return tensor
    sent = (group.size - 1) * tensor.nbytes if group.index == index else 0
    record = _begin(group, "broadcast", tensor, sent, True)
    source = group.ranks[index]
    return _in_place(lambda y: dist.broadcast(y, source, group=group.handle), tensor, group, record)


def _fill(
    op: str, out: Tensor, x: Tensor, group: Group, asynchronous: bool, label: str | None
) -> Pending:
    """Fill ``out`` by an all-gather, or by a reduce-scatter if ``op`` says so."""
    if group.size == 1:
        out.copy_(x.reshape(out.shape))
        return Pending()
    gathers = op != "reduce_scatter"
    sent = (group.size - 1) * (x if gathers else out).nbytes
    record = _begin(group, op, x, sent, not asynchronous, label)
    x = x.contiguous()
    rows = x.reshape(1 if gathers else group.size, -1)
    local = rows.expand(group.size, -1) if gathers else rows[group.index]
    if group.recorder.inject_fault is not None:
        local = local.clone()  # ``out`` may be part of ``x``
    run = _gather_single if gathers else _scatter_single
    works = [run(out, x, group=group.handle, async_op=True)] if x.numel() else []
    pending = Pending(works, (record, group, out, local))
    if not asynchronous:
        pending.wait()
    return pending


def all_gather_into(
    out: Tensor, x: Tensor, group: Group, asynchronous: bool = False, label: str | None = None
) -> Pending:
    """Fill contiguous ``out`` with all ranks' ``x``, concatenated along dim 0."""
    return _fill("all_gather", out, x, group, asynchronous, label)


def reduce_scatter_into(
    out: Tensor, x: Tensor, group: Group, asynchronous: bool = False, label: str | None = None
) -> Pending:
    """Fill contiguous ``out`` with this rank's part, along dim 0, of the sum of ``x``.

    ``out`` may be that part of ``x``.
    """
    return _fill("reduce_scatter", out, x, group, asynchronous, label)


def gather(tensor: Tensor, group: Group) -> Tensor:
    """Return every rank's tensor, ``[size, *shape]``; all have the same shape."""
    out = tensor.new_empty((group.size, *tensor.shape))
    all_gather_into(out.view(-1), tensor.reshape(-1), group)
    return out


def _all_to_all(
    x_R: Tensor, group: Group, send: Sequence[int], receive: Sequence[int], record: CallRecord
) -> Tensor:
    out = x_R.new_empty((sum(receive), *x_R.shape[1:]))
    local = None
    dist.all_to_all_single(out, x_R.contiguous(), list(receive), list(send), group=group.handle)
    if group.recorder.inject_fault is not None:
        local = torch.zeros_like(out)  # except for this rank's rows to itself
        local.split(list(receive))[group.index].copy_(x_R.split(list(send))[group.index])
    _end(record, group, out, local)
    return out


def exchange(
    x_R: Tensor,
    group: Group,
    send: Sequence[int],
    receive: Sequence[int],
    label: str | None = None,
    op: str = "all_to_all",
) -> Tensor:
    """Send ``send[i]`` rows to rank i of the group; return the rows received, in rank order."""
    assert len(send) == len(receive) == group.size, "one count for each rank of the group"
    assert sum(send) == x_R.shape[0], f"{sum(send)} of {x_R.shape[0]} rows are sent"
    if group.size == 1:
        return x_R
    row = x_R.nbytes // max(1, x_R.shape[0])
    record = _begin(group, op, x_R, (sum(send) - send[group.index]) * row, True, label)
    return _all_to_all(x_R, group, send, receive, record)


def gather_uneven(
    x: Tensor, group: Group, counts: Sequence[int], label: str | None = None
) -> Tensor:
    """Return all ranks' rows, in rank order; rank i has ``counts[i]``."""
    assert counts[group.index] == x.shape[0], f"{x.shape[0]} rows, {counts[group.index]} stated"
    if group.size == 1:
        return x
    if len(set(counts)) == 1:
        out = x.new_empty((sum(counts), *x.shape[1:]))
        _fill("gather_rows", out, x, group, False, label)
        return out
    record = _begin(group, "gather_rows", x, (group.size - 1) * x.nbytes, True, label)
    copies = x.repeat(group.size, *[1] * (x.ndim - 1))
    return _all_to_all(copies, group, [x.shape[0]] * group.size, counts, record)


def scatter_uneven(
    x: Tensor, group: Group, counts: Sequence[int], label: str | None = None
) -> Tensor:
    """Sum ``x`` over ranks in rank order; return this rank's rows, ``counts[i]`` on rank i."""
    if group.size == 1:
        return x
    own = counts[group.index]
    received = exchange(x, group, counts, [own] * group.size, label, "scatter_rows")
    return received.view(group.size, own, *x.shape[1:]).sum(0, dtype=x.dtype)


def _point_to_point(op: str, x: Tensor, source: int, destination: int, group: Group) -> Pending:
    """Start to send or receive a contiguous tensor between two global ranks."""
    assert source != destination, "a rank does not send to itself"
    site = CallSite(group.recorder.label, op, group.name)
    sent = x.nbytes if op == "send" else 0
    channel = f"{group.kind}:{source}>{destination}"
    record = group.recorder.begin(site, channel, (source, destination), x, sent, False)
    is_reverse = group.ranks.index(destination) < group.ranks.index(source)
    handle = (group.reverse_handle if is_reverse else None) or group.handle
    works = []
    if x.numel() and op == "send":
        works = [dist.isend(x, dst=destination, group=handle)]
    elif x.numel():
        works = [dist.irecv(x, src=source, group=handle)]
    call = record, group, x, None
    return Pending([work for work in works if work is not None], call)


def send(tensor: Tensor, peer_rank: int, group: Group) -> Pending:
    """Start to send a tensor to a rank of the group, given by its global rank."""
    return _point_to_point("send", tensor.contiguous(), group.ranks[group.index], peer_rank, group)


def receive(buffer: Tensor, peer_rank: int, group: Group) -> Pending:
    """Start to receive into a contiguous buffer from a rank, given by its global rank."""
    assert buffer.is_contiguous(), "received rows need a contiguous buffer"
    return _point_to_point("receive", buffer, peer_rank, group.ranks[group.index], group)


def shift(x: Tensor, out: Tensor, by: int, group: Group, label: str | None = None) -> Pending:
    """Start a ring shift: send ``x`` to the rank ``by`` places on, fill ``out`` from ``by`` back.

    A collective call. Indices wrap around, and ``by`` may be negative. Empty tensors are not sent:
    both ranks know the size.
    """
    assert by % group.size, "a rank does not send to itself"
    assert x.is_contiguous() and out.is_contiguous(), "shifted rows must be contiguous"
    record = _begin(group, "shift", x, x.nbytes, False, label)
    destination = group.ranks[(group.index + by) % group.size]
    source = group.ranks[(group.index - by) % group.size]
    sides = [(dist.isend, x, destination), (dist.irecv, out, source)]
    # As one batch, else NCCL deadlocks: each send would wait for a receive queued behind a send.
    ops = [dist.P2POp(op, x, peer, group.handle) for op, x, peer in sides if x.numel()]
    works = dist.batch_isend_irecv(ops) if ops else []
    return Pending(works, (record, group, out, None), x)


def to_bytes(value: Any) -> Tensor:
    """Return small data, encoded as JSON, as a tensor of bytes; numbers stay exact."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    """Decode the data of :func:`to_bytes`."""
    return json.loads(data.numpy().tobytes())


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Return every rank's value, small data for JSON, over a group in host memory."""
    if group.size == 1:
        return [value]
    mine = to_bytes(value)
    lengths = gather(torch.tensor([len(mine)]), group).flatten().tolist()
    return [from_bytes(data) for data in gather_uneven(mine, group, lengths).split(lengths)]


# Operations with gradients. In a backward pass they are recorded under the forward call's label.

Operation = Callable[..., Tensor]
"""``operation(x, group, label=…)``; ``label`` is passed in backward: that of the forward call."""


class _Differentiable(Function):
    """Runs one operation in forward and its adjoint in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, op: Operation, adjoint: Operation) -> Tensor:
        ctx.group = group
        ctx.adjoint = adjoint
        ctx.label = group.recorder.label
        return op(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.adjoint(grad, ctx.group, label=ctx.label), None, None, None


def _differentiable(x: Tensor, group: Group, op: Operation, adjoint: Operation) -> Tensor:
    if group.size == 1:
        return x
    return _Differentiable.apply(x, group, op, adjoint)


def _all_gather_along(x: Tensor, group: Group, dim: int, label: str | None = None) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((group.size * front.shape[0], *front.shape[1:]))
    all_gather_into(out, front, group, label=label)
    return out.movedim(0, dim).contiguous()


def _reduce_scatter_along(x: Tensor, group: Group, dim: int, label: str | None = None) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    rows, rest = divmod(front.shape[0], group.size)
    assert not rest, f"{group.size} ranks do not divide the {front.shape[0]} rows of dim {dim}"
    out = front.new_empty((rows, *front.shape[1:]))
    reduce_scatter_into(out, front, group, label=label)
    return out.movedim(0, dim).contiguous()


def _all_reduce_copy(x: Tensor, group: Group, label: str | None = None) -> Tensor:
    return all_reduce_(x.clone(), group, label)


class RowCodec(Protocol):
    """A low-precision format in which rows are sent."""

    def pack(self, rows: Tensor, /) -> Tensor:
        """Encode each row as one row of the result."""
        ...

    def unpack(self, encoded: Tensor, like: Tensor, /) -> Tensor:
        """Decode received rows to the dtype and width of ``like``."""
        ...


def _with_codec(run: Operation, codec: RowCodec | None) -> Operation:
    """Return an operation whose rows are sent as ``codec`` encodes them, if that is given."""
    if codec is None:
        return run

    def run_encoded(x: Tensor, group: Group, label: str | None = None) -> Tensor:
        return codec.unpack(run(codec.pack(x), group, label=label), x)

    return run_encoded


def all_gather(x: Tensor, group: Group, dim: int = 0, codec: RowCodec | None = None) -> Tensor:
    """Concatenate all ranks' ``x``, of one shape, along ``dim``. Backward: reduce-scatter.

    ``codec``: format in which rows ``x`` are sent. Here and below, sums are never encoded.
    """
    op = partial(_all_gather_along, dim=dim)
    adjoint = partial(_reduce_scatter_along, dim=dim)
    return _differentiable(x, group, _with_codec(op, codec), adjoint)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, codec: RowCodec | None = None) -> Tensor:
    """Sum ``x`` over the ranks; return this rank's part along ``dim``. Backward: all-gather."""
    op = partial(_reduce_scatter_along, dim=dim)
    adjoint = partial(_all_gather_along, dim=dim)
    return _differentiable(x, group, op, _with_codec(adjoint, codec))


def sum_over(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks. Backward sums too: each rank's part of the loss depends on the sum."""
    return _differentiable(x, group, _all_reduce_copy, _all_reduce_copy)


def all_to_all(
    x_R: Tensor,
    group: Group,
    send: Sequence[int],
    receive: Sequence[int],
    codec: RowCodec | None = None,
    combine: bool = False,
) -> Tensor:
    """Send ``send[i]`` rows to each rank i of the group, in order along dim 0.

    Args:
        x_R: rows.
        group: the ranks.
        send: number of rows for each rank.
        receive: number of rows from each rank.
        codec: format in which rows are sent in forward; with ``combine``, in backward.
        combine: whether rows return from experts.

    Returns:
        The rows received, ``receive[i]`` from each rank i in order. Backward sends gradients back.
    """
    op = _with_codec(partial(exchange, send=send, receive=receive), None if combine else codec)
    adjoint = _with_codec(partial(exchange, send=receive, receive=send), codec if combine else None)
    return _differentiable(x_R, group, op, adjoint)


def gather_rows(
    x: Tensor, group: Group, counts: Sequence[int], codec: RowCodec | None = None
) -> Tensor:
    """Concatenate ranks' rows, ``counts[i]`` from rank i. Backward: ``scatter_rows``."""
    op = partial(gather_uneven, counts=counts)
    adjoint = partial(scatter_uneven, counts=counts)
    return _differentiable(x, group, _with_codec(op, codec), adjoint)


def scatter_rows(
    x: Tensor, group: Group, counts: Sequence[int], codec: RowCodec | None = None
) -> Tensor:
    """Sum ``x`` over the ranks; rank i gets ``counts[i]`` rows of the sum, in order.

    Summed in rank order with one rounding. Backward: ``gather_rows``.
    """
    op = partial(scatter_uneven, counts=counts)
    adjoint = partial(gather_uneven, counts=counts)
    return _differentiable(x, group, op, _with_codec(adjoint, codec))
