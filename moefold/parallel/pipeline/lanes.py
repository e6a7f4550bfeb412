"""Two concurrent lanes of one rank: compute, and exchanges with other ranks.

The main thread computes. A second thread runs exchanges one after another; it mostly waits, with
the GIL released, and on CUDA has its own stream. The tasks of each lane and their order are fixed
before anything runs, and exchanges use separate groups (``World.secondary``), so that all ranks
issue the operations of each group in the same order, however fast either lane is.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from itertools import zip_longest
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

LANE_WAIT = "wait for an exchange"
"""Name in traces of a wait of the compute lane for the exchange lane."""
State = tuple[Any, ...]
"""What one task of a chain passes to the next: tensors, None and Python values."""


class LaneTask(NamedTuple):
    """A task whose arguments are the previous task's results."""

    run: Callable[..., State]
    is_exchange: bool = False


class FillTask(NamedTuple):
    """A task without arguments or results that fills waits: deferred weight gradients."""

    run: Callable[[], Any]


class Chain(NamedTuple):
    """Consecutive tasks, and the arguments of the first one."""

    state: State
    tasks: Sequence[LaneTask | FillTask]


class ExchangeFuture(NamedTuple):
    """The future result of an exchange."""

    future: Future[State]
    done: torch.cuda.Event | None = None
    """On CUDA, recorded after its work."""


def interleave(chains: Sequence[Chain]) -> Iterator[tuple[int, LaneTask | FillTask]]:
    """Yield (chain index, task) in the order of issue.

    Chains alternate: after an exchange and the fills that follow it, the next chain continues, so
    that exchanges of one chain overlap with compute of another.
    """
    segments: list[list[list[LaneTask | FillTask]]] = []
    for chain in chains:
        runs: list[list[LaneTask | FillTask]] = [[]]
        for task in chain.tasks:
            has_exchange = any(isinstance(t, LaneTask) and t.is_exchange for t in runs[-1])
            if has_exchange and isinstance(task, LaneTask):
                runs.append([])
            runs[-1].append(task)
        segments.append(runs)
    for concurrent in zip_longest(*segments, fillvalue=()):
        for index, tasks in enumerate(concurrent):
            yield from ((index, task) for task in tasks)


class Lanes:
    """Runs chains of tasks on two lanes; a context manager that ends the second thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def __enter__(self) -> "Lanes":
        """Return itself; the first exchange starts the thread."""
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
        """Run chains concurrently; return the result of the last task of each."""
        states: list[State | ExchangeFuture] = [chain.state for chain in chains]
        for index, task in interleave(chains):
            if isinstance(task, FillTask):
                task.run()
            elif task.is_exchange:
                states[index] = self._submit(task, states[index])
            else:
                states[index] = task.run(*self._resolve(states[index]))
        return [self._resolve(state) for state in states]

    def wait_idle(self) -> None:
        """Wait until the second thread has released its last exchange's references."""
        self._thread.submit(int).result()

    def _submit(self, task: LaneTask, state: State | ExchangeFuture) -> ExchangeFuture:
        """Queue an exchange after the earlier ones."""
        stream = self._stream
        if stream is None:
            return ExchangeFuture(self._thread.submit(lambda: task.run(*_wait(state))))
        # Recorded here, not by the thread, which would then wait for later work of this lane.
        ready = torch.cuda.Event()
        done = torch.cuda.Event()
        ready.record()

        def on_stream() -> State:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                args = _wait(state)
                _record_stream(stream, args)
                result = task.run(*args)
                done.record(stream)
            return result

        return ExchangeFuture(self._thread.submit(on_stream), done)

    def _resolve(self, state: State | ExchangeFuture) -> State:
        """Return a task's result for use on the main lane, waiting for an exchange."""
        # Named in traces, so that a wait for an exchange is told from a slow host.
        is_late = isinstance(state, ExchangeFuture) and not state.future.done()
        with record_function(LANE_WAIT) if is_late else nullcontext():
            result = _wait(state)
        if isinstance(state, ExchangeFuture) and state.done is not None:
            torch.cuda.current_stream().wait_event(state.done)
            _record_stream(torch.cuda.current_stream(), result)
        return result


def _wait(state: State | ExchangeFuture) -> State:
    return state.future.result() if isinstance(state, ExchangeFuture) else state


def _record_stream(stream: torch.cuda.Stream, state: State) -> None:
    """Record with the allocator that tensors are used on another stream.

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
