"""Two lanes of one rank: computing, and exchanging with other ranks beside it.

The main thread computes. A second thread runs exchanges one after another; it mostly waits, without
Python's lock, and on CUDA it has a stream of its own. What each lane runs, and in which order, is
fixed before anything runs, and exchanges use groups of their own (``World.beside``): so all ranks
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
"""What one task of a chain leaves for the next: tensors, None, and values that the host knows."""


class LaneTask(NamedTuple):
    """A piece of work that takes what the task before it left."""

    run: Callable[..., State]
    exchanges: bool = False


class Fill(NamedTuple):
    """Work that nothing in its chain waits for, and that waits for no exchange."""

    run: Callable[[], Any]


class Chain(NamedTuple):
    """Tasks one after another, and what the first one takes."""

    state: State
    tasks: Sequence[LaneTask | Fill]


class Promised(NamedTuple):
    """What an exchange will leave."""

    future: Future[State]
    done: torch.cuda.Event | None = None
    """Recorded behind its work on CUDA."""


def in_turns(chains: Sequence[Chain]) -> Iterator[tuple[int, LaneTask | Fill]]:
    """Yield (chain, task) in the order in which they are issued.

    A turn ends with an exchange and the fills after it; then the next chain has its turn, so that
    the exchange of one chain runs beside the computing of another.
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
    """Runs chains of tasks; a context that ends its second thread."""

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
        """End the thread; after an error, what was queued is dropped."""
        self._thread.shutdown(wait=error is None, cancel_futures=True)

    def run(self, *chains: Chain) -> list[State]:
        """Run chains side by side to their ends; returns what the last task of each left."""
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
        """Return once the second thread holds nothing of its last exchange any more."""
        self._thread.submit(int).result()

    def _begin(self, task: LaneTask, state: State | Promised) -> Promised:
        """Queue an exchange behind those before it."""
        if self._stream is None:
            return Promised(self._thread.submit(lambda: task.run(*_now(state))))
        # Recorded here and not by the thread: what this lane issues meanwhile is not waited for.
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record()
        return Promised(self._thread.submit(self._on_stream, task, state, ready, done), done)

    def _on_stream(
        self,
        task: LaneTask,
        state: State | Promised,
        ready: torch.cuda.Event,
        done: torch.cuda.Event,
    ) -> State:
        assert self._stream is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            given = _now(state)
            _used_on(self._stream, given)
            left = task.run(*given)
            done.record(self._stream)
        return left

    def _state(self, state: State | Promised) -> State:
        """Return what a task left, for use by the main lane."""
        left = _now(state)
        if isinstance(state, Promised) and state.done is not None:
            torch.cuda.current_stream().wait_event(state.done)
            _used_on(torch.cuda.current_stream(), left)
        return left


def _now(state: State | Promised) -> State:
    return state.future.result() if isinstance(state, Promised) else state


def _used_on(stream: torch.cuda.Stream, state: State) -> None:
    """Tell the allocator that a stream other than the one they were made on uses tensors.

    To hold them until an event would not do: autograd keeps them for backward, and lets them go
    on either lane.
    """
    for value in state:
        if isinstance(value, Tensor) and value.is_cuda:
            value.record_stream(stream)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of a device: freed memory goes back to the stream it came from."""
    return torch.cuda.Stream(device)
