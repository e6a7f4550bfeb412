"""Collectives, each over an explicit group: in place, into a buffer, or with a gradient.

The only file that calls them. Over a group of one rank each is the identity and nothing is
recorded. Bytes are what this rank sends in the cheapest form of the operation: a ring for sums and
gathers, rows for other ranks in an exchange.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moefold.comm.group import Group
from moefold.comm.recorder import BACKWARD, Record, Site

# torch 2.13 renames two functions; the old names warn there and are the only ones before.
_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class Pending:
    """An operation under way. What it fills must not be touched before ``wait`` has returned."""

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        begin_to_wait: Callable[[], None] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Hold the backend's works, and what is to be done before and after waiting for them."""
        self._works, self._begin, self._finish = works, begin_to_wait, finish

    def wait(self) -> None:
        """Return when the result may be read; a second call does nothing.

        Raises:
            RuntimeError: where the group's time-out passed or another rank is gone.
        """
        works, begin, finish = self._works, self._begin, self._finish
        self._works, self._begin, self._finish = (), None, None
        if begin is not None:
            begin()
        for work in works:
            work.wait()  # on a device only its stream does, and it has to be this thread's
        if finish is not None:
            finish()


def site_of(group: Group, op: str, backward_of: str | None = None) -> Site:
    """Return the call-site of an operation: under the label now, or of the forward call."""
    if backward_of is None:
        return Site(group.recorder.label, op, group.name)
    return Site(backward_of, op, group.name, BACKWARD)


def size_of(x: Tensor) -> int:
    """Return the bytes of a tensor's values."""
    return x.numel() * x.element_size()


def _begin(site: Site, group: Group, given: Tensor, bytes_sent: int, waits: bool) -> Record:
    return group.recorder.begin(site, group.channel, group.ranks, given, bytes_sent, waits)


def _pending(
    work: dist.Work | None,
    record: Record,
    group: Group,
    out: Tensor,
    alone: Callable[[], Tensor] | None = None,
) -> Pending:
    return Pending(
        () if work is None else (work,),
        lambda: group.recorder.wait(record),
        lambda: _settle(record, group, out, alone),
    )


def _settle(
    record: Record, group: Group, out: Tensor, alone: Callable[[], Tensor] | None = None
) -> None:
    """Close a record; where a proof asks for it, replace what is in ``out``."""
    group.recorder.end(record)
    if alone is not None and group.recorder.alter is not None:
        out.copy_(group.recorder.alter(record, out, alone()))


def reduce_(x: Tensor, group: Group, site: Site, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce over the ranks, in place; every rank gets the same bits."""
    if group.size == 1:
        return x
    record = _begin(site, group, x, 2 * (group.size - 1) * size_of(x) // group.size, True)
    before = x.clone() if group.recorder.alter is not None else None
    if x.numel():
        whole = x if x.is_contiguous() else x.contiguous()
        dist.all_reduce(whole, op, group=group.handle)
        if whole is not x:
            x.copy_(whole)
    _settle(record, group, x, None if before is None else lambda: before)
    return x


def gather_into(
    out: Tensor, x: Tensor, group: Group, site: Site, asynchronous: bool = False
) -> Pending:
    """Put every rank's ``x`` into ``out``, one after the other; ``out`` is contiguous."""
    if group.size == 1:
        out.copy_(x.reshape(out.shape))
        return Pending()
    record = _begin(site, group, x, (group.size - 1) * size_of(x), not asynchronous)
    x = x.contiguous()
    work = None
    if x.numel():
        work = _gather_single(out, x, group=group.handle, async_op=True)

    def alone() -> Tensor:
        return x.reshape(1, -1).expand(group.size, -1).reshape(out.shape)

    pending = _pending(work, record, group, out, alone)
    return pending if asynchronous else _waited(pending)


def scatter_into(
    out: Tensor, x: Tensor, group: Group, site: Site, asynchronous: bool = False
) -> Pending:
    """Sum ``x`` over the ranks and leave each its own part along dim 0 in ``out``."""
    if group.size == 1:
        out.copy_(x.reshape(out.shape))
        return Pending()
    record = _begin(site, group, x, (group.size - 1) * size_of(out), not asynchronous)
    x = x.contiguous()
    work = None
    if x.numel():
        work = _scatter_single(out, x, group=group.handle, async_op=True)

    def alone() -> Tensor:
        return x.reshape(group.size, -1)[group.index].reshape(out.shape)

    pending = _pending(work, record, group, out, alone)
    return pending if asynchronous else _waited(pending)


def exchange(
    x_R: Tensor, group: Group, send: Sequence[int], receive: Sequence[int], site: Site
) -> Tensor:
    """Send ``send[i]`` rows to each rank in turn; return the rows received, by sending rank."""
    assert len(send) == len(receive) == group.size, "one count for each rank of the group"
    assert sum(send) == x_R.shape[0], f"{sum(send)} rows are sent of {x_R.shape[0]}"
    if group.size == 1:
        return x_R
    row = size_of(x_R) // max(1, x_R.shape[0])
    record = _begin(site, group, x_R, (sum(send) - send[group.index]) * row, True)
    out = x_R.new_empty((sum(receive), *x_R.shape[1:]))
    dist.all_to_all_single(out, x_R.contiguous(), list(receive), list(send), group=group.handle)
    _settle(record, group, out, lambda: _kept_rows(x_R, group, send, receive))
    return out


def _kept_rows(x_R: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """What an exchange gives where only a rank's own rows arrive: zeros in all other places."""
    alone = x_R.new_zeros((sum(receive), *x_R.shape[1:]))
    own = x_R.split(list(send))[group.index]
    alone.split(list(receive))[group.index].copy_(own)
    return alone


def gather_uneven(x: Tensor, group: Group, counts: Sequence[int], site: Site) -> Tensor:
    """Return every rank's rows, one rank after the other; rank i has ``counts[i]``."""
    assert counts[group.index] == x.shape[0], f"{x.shape[0]} rows, {counts[group.index]} stated"
    if group.size == 1:
        return x
    out = x.new_empty((sum(counts), *x.shape[1:]))
    if len(set(counts)) == 1:
        gather_into(out, x, group, site)
        return out
    record = _begin(site, group, x, (group.size - 1) * size_of(x), True)
    copies = x.repeat(group.size, *[1] * (x.ndim - 1))
    sent = [x.shape[0]] * group.size
    dist.all_to_all_single(out, copies, list(counts), sent, group=group.handle)
    _settle(record, group, out, lambda: _kept_rows(copies, group, sent, counts))
    return out


def scatter_uneven(x: Tensor, group: Group, counts: Sequence[int], site: Site) -> Tensor:
    """Sum ``x`` over the ranks and return rank i's ``counts[i]`` rows, added in rank order."""
    if group.size == 1:
        return x
    own = counts[group.index]
    received = exchange(x, group, counts, [own] * group.size, site)
    return received.view(group.size, own, *x.shape[1:]).sum(0, dtype=x.dtype)


def _waited(pending: Pending) -> Pending:
    pending.wait()
    return pending


def sum_(tensor: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, in place; every rank gets the same bits. Of booleans: any."""
    return reduce_(tensor, group, site_of(group, "all_reduce"))


def max_(tensor: Tensor, group: Group) -> Tensor:
    """Take the largest over the ranks, in place."""
    return reduce_(tensor, group, site_of(group, "all_reduce_max"), dist.ReduceOp.MAX)


def gather(tensor: Tensor, group: Group) -> Tensor:
    """Return every rank's tensor, ``[size, *shape]``; all have the same shape."""
    out = tensor.new_empty((group.size, *tensor.shape))
    gather_into(out.view(-1), tensor.reshape(-1), group, site_of(group, "all_gather"))
    return out


def all_gather_into(out: Tensor, x: Tensor, group: Group, asynchronous: bool = False) -> Pending:
    """Fill contiguous ``out`` with every rank's ``x``, one after the other along dim 0."""
    return gather_into(out, x, group, site_of(group, "all_gather"), asynchronous)


def reduce_scatter_into(
    out: Tensor, x: Tensor, group: Group, asynchronous: bool = False
) -> Pending:
    """Fill contiguous ``out`` with this rank's part, along dim 0, of the sum of ``x``."""
    return scatter_into(out, x, group, site_of(group, "reduce_scatter"), asynchronous)


def broadcast_(tensor: Tensor, group: Group, index: int) -> Tensor:
    """Give every rank what the one at place ``index`` of the group holds, in place."""
    if group.size == 1:
        return tensor
    sent = (group.size - 1) * size_of(tensor) if group.index == index else 0
    record = _begin(site_of(group, "broadcast"), group, tensor, sent, True)
    before = tensor.clone() if group.recorder.alter is not None else None
    if tensor.numel():
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        dist.broadcast(whole, group.ranks[index], group=group.handle)
        if whole is not tensor:
            tensor.copy_(whole)
    _settle(record, group, tensor, None if before is None else lambda: before)
    return tensor


def all_to_all_plain(
    x_R: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]
) -> Tensor:
    """Exchange rows without a gradient; as ``all_to_all`` otherwise."""
    return exchange(x_R, group, send, receive, site_of(group, "all_to_all"))


def _way(group: Group, source: int, to: int) -> dist.ProcessGroup | None:
    return group.back if to < source and group.back is not None else group.handle


def send(tensor: Tensor, peer_rank: int, group: Group) -> Pending:
    """Start to send a tensor to a rank of the group, named by its place in the world."""
    peer = group.ranks.index(peer_rank)
    assert peer != group.index, "a rank does not send to itself"
    me = group.ranks[group.index]
    site, channel = site_of(group, "send"), f"{group.kind}:{me}>{peer_rank}"
    ranks, sent = (me, peer_rank), size_of(tensor)
    record = group.recorder.begin(site, channel, ranks, tensor, sent, False)
    tensor = tensor.contiguous()
    way = _way(group, group.index, peer)
    work = dist.isend(tensor, dst=peer_rank, group=way) if tensor.numel() else None
    # Held until waited for: the backend reads the tensor meanwhile.
    return _pending(work, record, group, tensor)


def receive(buffer: Tensor, peer_rank: int, group: Group) -> Pending:
    """Start to receive into a contiguous buffer from a rank, named by its place in the world."""
    peer = group.ranks.index(peer_rank)
    assert peer != group.index, "a rank does not receive from itself"
    me = group.ranks[group.index]
    site, channel = site_of(group, "receive"), f"{group.kind}:{peer_rank}>{me}"
    record = group.recorder.begin(site, channel, (peer_rank, me), buffer, 0, False)
    assert buffer.is_contiguous(), "received rows need a contiguous buffer"
    way = _way(group, peer, group.index)
    work = dist.irecv(buffer, src=peer_rank, group=way) if buffer.numel() else None
    return _pending(work, record, group, buffer, lambda: torch.zeros_like(buffer))


def shift(
    given: Tensor, into: Tensor, by: int, group: Group, backward_of: str | None = None
) -> Pending:
    """Start to send ``given`` to the rank ``by`` places on, and to fill ``into`` from ``by`` back.

    All ranks of the group call it together; places are counted round the group, and ``by`` may be
    negative. A pair with no values to pass on passes nothing: both ends know how many there are.
    """
    site = site_of(group, "shift", backward_of)
    assert by % group.size, "a rank does not send to itself"
    assert given.is_contiguous() and into.is_contiguous(), "shifted rows lie side by side"
    record = _begin(site, group, given, size_of(given), False)
    there = group.ranks[(group.index + by) % group.size]
    back = group.ranks[(group.index - by) % group.size]
    sides = [(dist.isend, given, there), (dist.irecv, into, back)]
    # As one batch: NCCL would let each send wait for a receive that is queued behind a send.
    ops = [dist.P2POp(op, x, peer, group.handle) for op, x, peer in sides if x.numel()]
    works = dist.batch_isend_irecv(ops) if ops else []

    def finish(held: Tensor = given) -> None:
        """Close the record; until then what is sent is held, since the backend reads it."""
        _settle(record, group, into, lambda: torch.zeros_like(into))

    return Pending(works, lambda: group.recorder.wait(record), finish)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Return every rank's value, small data that JSON can hold, over a group in host memory."""
    if group.size == 1:
        return [value]
    text = json.dumps(value).encode()
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    lengths = gather(torch.tensor([len(text)]), group).flatten().tolist()
    joined = gather_uneven(mine, group, lengths, site_of(group, "all_gather")).numpy()
    ends = list(accumulate(lengths))
    return [
        json.loads(joined[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
    ]


# Operations with gradients. In a backward pass they are recorded under the forward call's label.

Operation = Callable[[Tensor, Group, str | None], Tensor]
"""Of a tensor over a group; the label is the forward call's, None in the forward call itself."""


class _Differentiable(Function):
    """An operation, and the one that its gradient needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Operation, back: Operation) -> Tensor:
        ctx.group, ctx.back, ctx.label = group, back, group.recorder.label
        return there(x, group, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group, ctx.label), None, None, None


def _differentiable(x: Tensor, group: Group, there: Operation, back: Operation) -> Tensor:
    if group.size == 1:
        return x
    return _Differentiable.apply(x, group, there, back)  # type: ignore[return-value]


def _gathered(x: Tensor, group: Group, label: str | None, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((group.size * front.shape[0], *front.shape[1:]))
    gather_into(out, front, group, site_of(group, "all_gather", label))
    return out.movedim(0, dim).contiguous()


def _scattered(x: Tensor, group: Group, label: str | None, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    rows, rest = divmod(front.shape[0], group.size)
    assert not rest, f"dim {dim} has {front.shape[0]} rows, which {group.size} ranks cannot share"
    out = front.new_empty((rows, *front.shape[1:]))
    scatter_into(out, front, group, site_of(group, "reduce_scatter", label))
    return out.movedim(0, dim).contiguous()


def _summed(x: Tensor, group: Group, label: str | None) -> Tensor:
    return reduce_(x.clone(), group, site_of(group, "all_reduce", label))


def _exchanged(
    x_R: Tensor, group: Group, label: str | None, send: Sequence[int], receive: Sequence[int]
) -> Tensor:
    return exchange(x_R, group, send, receive, site_of(group, "all_to_all", label))


def _rows_gathered(x: Tensor, group: Group, label: str | None, counts: Sequence[int]) -> Tensor:
    return gather_uneven(x, group, counts, site_of(group, "gather_rows", label))


def _rows_scattered(x: Tensor, group: Group, label: str | None, counts: Sequence[int]) -> Tensor:
    return scatter_uneven(x, group, counts, site_of(group, "scatter_rows", label))


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Join every rank's ``x``, of one shape, along ``dim``. Backward sums and scatters."""
    return _differentiable(x, group, partial(_gathered, dim=dim), partial(_scattered, dim=dim))


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Sum ``x`` over the ranks and return this rank's part along ``dim``. Backward gathers."""
    return _differentiable(x, group, partial(_scattered, dim=dim), partial(_gathered, dim=dim))


def sum_over(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, and gradients too: each rank's part of the loss depends on the sum."""
    return _differentiable(x, group, _summed, _summed)


def all_to_all(x_R: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send ``send[i]`` rows to each rank i of the group, in order along dim 0.

    Returns:
        The rows received, ``receive[i]`` from each rank i in order. Backward sends them back.
    """
    there = partial(_exchanged, send=send, receive=receive)
    return _differentiable(x_R, group, there, partial(_exchanged, send=receive, receive=send))


def gather_rows(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """Join the ranks' rows along dim 0, ``counts[i]`` from rank i. Backward: ``scatter_rows``."""
    there, back = partial(_rows_gathered, counts=counts), partial(_rows_scattered, counts=counts)
    return _differentiable(x, group, there, back)


def scatter_rows(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """Sum ``x`` over the ranks and return ``counts[i]`` rows of it to each rank i in order.

    Sums run in rank order with one rounding. Backward: ``gather_rows``.
    """
    there, back = partial(_rows_scattered, counts=counts), partial(_rows_gathered, counts=counts)
    return _differentiable(x, group, there, back)
