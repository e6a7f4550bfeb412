"""Two concurrent lanes of one rank: compute, and exchanges with other ranks.

The main thread computes. A second thread runs exchanges one after another; it mostly waits, with
the GIL released, and on CUDA has its own stream. The tasks of each lane and their order are fixed
before anything runs, and exchanges use separate groups (``World.secondary``), so that all ranks
issue the operations of each group in the same order, however fast either lane is.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import zip_longest
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = tuple[Any, ...]
"""What one task of a chain passes to the next: tensors, None, and Python values."""


class LaneTask(NamedTuple):
    """A task that takes the previous task's results as arguments."""

    run: Callable[..., State]
    exchanges: bool = False


class Fill(NamedTuple):
    """A task without arguments or results, such as deferred weight gradients, to fill waits."""

    run: Callable[[], Any]


class Chain(NamedTuple):
    """Consecutive tasks, and the arguments of the first one."""

    state: State
    tasks: Sequence[LaneTask | Fill]


class Promised(NamedTuple):
    """The future result of an exchange."""

    future: Future[State]
    done: torch.cuda.Event | None = None
    """On CUDA, recorded after its work."""


def in_turns(chains: Sequence[Chain]) -> Iterator[tuple[int, LaneTask | Fill]]:
    """Yield (chain index, task) in the order of issue.

    A turn ends with an exchange and the fills after it; then the next chain has its turn, so that
    exchanges of one chain overlap with compute of another.
    """
    turns: list[list[list[LaneTask | Fill]]] = []
    for chain in chains:
        mine: list[list[LaneTask | Fill]] = [[]]
        for task in chain.tasks:
            exchanged = any(isinstance(t, LaneTask) and t.exchanges for t in mine[-1])
            if exchanged and isinstance(task, LaneTask):
                mine.append([])
            mine[-1].append(task)
        turns.append(mine)
    for together in zip_longest(*turns, fillvalue=()):
        for index, tasks in enumerate(together):
            yield from ((index, task) for task in tasks)


class Lanes:
    """Runs chains of tasks on two lanes; a context manager that ends the second thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def __enter__(self) -> "Lanes":
        """Return itself; the thread starts with the first exchange."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the thread; after an error, drop queued tasks and do not wait."""
        self._thread.shutdown(wait=error is None, cancel_futures=True)

    def run(self, *chains: Chain) -> list[State]:
        """Run chains concurrently to their ends; return the result of each one's last task."""
        states: list[State | Promised] = [chain.state for chain in chains]
        for index, task in in_turns(chains):
            if isinstance(task, Fill):
                task.run()
            elif task.exchanges:
                states[index] = self._begin(task, states[index])
            else:
                states[index] = task.run(*self._state(states[index]))
        return [self._state(state) for state in states]

    def settle(self) -> None:
        """Wait until the second thread has released its last exchange's references."""
        self._thread.submit(int).result()

    def _begin(self, task: LaneTask, state: State | Promised) -> Promised:
        """Queue an exchange after the earlier ones."""
        stream = self._stream
        if stream is None:
            return Promised(self._thread.submit(lambda: task.run(*_now(state))))
        # Recorded here, not by the thread, so that later work of this lane is not waited for.
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record()

        def on_stream() -> State:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                given = _now(state)
                _used_on(stream, given)
                left = task.run(*given)
                done.record(stream)
            return left

        return Promised(self._thread.submit(on_stream), done)

    def _state(self, state: State | Promised) -> State:
        """Return a task's result for use on the main lane, waiting for an exchange."""
        left = _now(state)
        if isinstance(state, Promised) and state.done is not None:
            torch.cuda.current_stream().wait_event(state.done)
            _used_on(torch.cuda.current_stream(), left)
        return left


def _now(state: State | Promised) -> State:
    return state.future.result() if isinstance(state, Promised) else state


def _used_on(stream: torch.cuda.Stream, state: State) -> None:
    """Record with the allocator that tensors are used on a stream other than their own.

    Holding references until an event would not suffice: autograd saves the tensors for backward,
    and can release them on either lane.
    """
    for value in state:
        if isinstance(value, Tensor) and value.is_cuda:
            value.record_stream(stream)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's only side stream: the allocator reuses memory only on the same stream."""
    return torch.cuda.Stream(device)
