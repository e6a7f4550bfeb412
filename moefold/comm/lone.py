"""One rank of a layout without the others: process groups in which all others do what it does.

A backend of ``torch.distributed``, so that everything above the process groups is what runs among
real ranks, the recorder included. Each collective copies as many bytes as arrive among real ranks,
and its result is what it would be if every rank of the group had this rank's tensors: sums are
multiples, gathered rows are copies, counts of rows agree. Messages of other stages have random
values. Nothing is communicated, so that no time of links is in a measurement.

On ``meta`` collectives do nothing, and results have shapes alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.group import Group
from moefold.comm.world import World
from moefold.mesh.folding import Folding, Ranks

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
HashStore = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]
BACKEND = "lone"
TIME_OUT_S = 30.0
SPREAD = 3**0.5
"""Largest value of messages, whose variance is 1."""


class _Done(dist.Work):
    """An operation that ended when it began."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True


def _timed(run: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Add the time of an operation to that of its group."""

    @wraps(run)
    def timed(group: "LoneGroup", *given: Any) -> dist.Work:
        started = time.thread_time()
        work = run(group, *given)
        group.seconds += time.thread_time() - started
        return work

    return timed


class LoneGroup(dist.ProcessGroup):
    """A process group whose other ranks have the same tensors as this one.

    Attributes:
        seconds: seconds that this process has spent on copies on a CPU.
    """

    def __init__(self, index: int, size: int) -> None:
        super().__init__(index, size)  # pyright: ignore[reportCallIssue]
        self.seconds = 0.0
        self._index = index
        self._size = size
        self._generators: dict[torch.device, torch.Generator] = {}

    @_timed
    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:
        """Multiply sums by the number of ranks; of equal values, the maximum is any of them."""
        for x in tensors:
            sums = options is None or options.reduceOp == dist.ReduceOp.SUM
            if sums and not x.is_meta and x.dtype != torch.bool:
                x.mul_(self._size)
        return _Done()

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:
        """Leave the tensors as they are."""
        return _Done()

    @_timed
    def all_gather_single(self, out: Tensor, x: Tensor, options: Any = None) -> dist.Work:
        """Fill ``out``, of which ``x`` may be this rank's part, with copies of ``x``."""
        if not out.is_meta:
            out.view(self._size, -1).copy_(x.reshape(1, -1).expand(self._size, -1))
        return _Done()

    @_timed
    def reduce_scatter_single(self, out: Tensor, x: Tensor, options: Any = None) -> dist.Work:
        """Fill ``out``, which may be this rank's part of ``x``, with a sum of copies of the part.

        Like the sum of a ring, it reads as many elements as ``x`` has.
        """
        if not out.is_meta:
            part_L = x.reshape(self._size, -1)[self._index]
            out.view(-1).copy_(part_L.expand(self._size, -1).sum(0))
        return _Done()

    @_timed
    def all_to_all_single(
        self, out: Tensor, x: Tensor, receive: Sequence[int], send: Sequence[int], *_: Any
    ) -> dist.Work:
        """Fill ``out`` with the rows that this rank sends to itself, once from each rank."""
        if not out.is_meta and out.numel():
            own = x.split(list(send))[self._index] if send else x.chunk(self._size)[self._index]
            _repeat_rows(out, own if len(own) else x)
        return _Done()

    @_timed
    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> dist.Work:
        """Copy the tensors, as a link would read them; the copy is freed."""
        for x in tensors:
            if not x.is_meta:
                x.clone()
        return _Done()

    @_timed
    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> dist.Work:
        """Fill the tensors with random values; integers with zeros."""
        for x in tensors:
            if x.is_meta:
                continue
            if x.is_floating_point():
                x.uniform_(-SPREAD, SPREAD, generator=self._draw(x.device))
            else:
                x.zero_()
        return _Done()

    def _draw(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]

    # The names of three operations before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


class LoneWorld(World):
    """A rank's world without the other ranks."""

    @property
    def copy_seconds(self) -> float:
        """Seconds that this process has spent on copies instead of exchanges, on a CPU."""
        groups = {*self._by_ranks.values(), *self._by_stages.values()}
        handles = [group.handle for group in groups]
        second = self._secondary
        beside = second.copy_seconds if isinstance(second, LoneWorld) else 0.0
        return beside + sum(each.seconds for each in handles if isinstance(each, LoneGroup))

    @property
    def ranks_of(self) -> dict[str, Ranks]:
        """Ranks of each group by its name."""
        groups = [*self._by_ranks.values(), *self._by_stages.values()]
        named = {group.name: group.ranks for group in groups}
        second = self._secondary
        return named | (second.ranks_of if isinstance(second, LoneWorld) else {})

    def _warm_up(self, group: Group) -> None:
        """Do nothing: there are no connections."""


def _repeat_rows(out: Tensor, rows: Tensor) -> None:
    """Fill ``out`` with rows, from the first again after the last; with zeros if there are none."""
    if not len(rows):
        out.zero_()
        return
    times, rest = divmod(len(out), len(rows))
    whole = out[: times * len(rows)].view(times, *rows.shape)
    whole.copy_(rows.expand(times, *rows.shape))
    out[times * len(rows) :].copy_(rows[:rest])


def join_alone(
    folding: Folding, rank: int, device: torch.device | str = "cpu"
) -> World | LoneWorld:
    """Create a rank's groups without the other ranks, in this process; ``leave`` ends them.

    Raises:
        ValueError: the process has joined other ranks.
    """
    if folding.world == 1:
        return World.single(device)
    if dist.is_initialized() and dist.get_backend() != BACKEND:
        raise ValueError("this process has joined other ranks, and cannot run one without them")
    if dist.is_initialized() and (dist.get_world_size(), dist.get_rank()) != (folding.world, rank):
        leave()
    if not dist.is_initialized():
        _register()
        dist.init_process_group(BACKEND, rank=rank, world_size=folding.world, store=HashStore())
    world = LoneWorld(folding, rank, torch.device(device), TIME_OUT_S)
    world._create_groups()
    return world


def leave() -> None:
    """End the groups of all worlds of :func:`join_alone`."""
    if dist.is_initialized() and dist.get_backend() == BACKEND:
        dist.destroy_process_group()


@contextmanager
def lone_world(folding: Folding, rank: int, device: torch.device | str = "cpu") -> Iterator[World]:
    """Yield a rank's world without the other ranks, as :func:`join_alone` returns it."""
    world = join_alone(folding, rank, device)
    try:
        yield world
        world.forget_groups()
    finally:
        leave()


@cache
def _register() -> None:
    """Make the backend known to torch, once in a process."""
    dist.Backend.register_backend(BACKEND, _create_group, devices=["cpu", "cuda", "meta"])


def _create_group(store: Store, index: int, size: int, time_out: Any) -> dist.ProcessGroup:
    return LoneGroup(index, size)
