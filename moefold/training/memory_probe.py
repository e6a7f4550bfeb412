"""Measured bytes that a rank holds after each action of a step, by part.

A storage counts for its owner: parameters and their copies, gradients, messages between stages. Of
the other live storages created in the step, those on queues of deferred weight gradients are
operands, and the rest are activations.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import CellType, FunctionType
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from moefold.data.batch import MicroBatch
from moefold.kernels.function import EagerMode
from moefold.kernels.gradients import DeferredSink
from moefold.kernels.swiglu.ffn import Products
from moefold.optim.base import Optimizer
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import Executor, StepResult, run_step
from moefold.parallel.pipeline.lanes import Chain, Lanes, LaneTask, State
from moefold.schedule.table import Action, Step
from moefold.training.step import gradients

Bytes = dict[str, int]
"""Bytes by part: weights, master, moments, gradients, activations, operands and messages; pages and
``host pages``, if used; and activations on ``host`` and ``disk``."""
TRANSIENT_PARTS = ("activations", "operands", "messages")
"""Parts that are allocated and freed within a step."""
MAX_WAIT_S = 2.0
"""Maximum wait for threads of the communication back end to free rows that they have sent."""


class StorageRecorder(EagerMode):
    """Records every storage created while the mode is active, on the thread that entered it."""

    def __init__(self, storages: dict[int, tuple[StorageWeakRef, int]] | None = None) -> None:
        super().__init__()
        self.storages = {} if storages is None else storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                entry = self.storages.get(storage._cdata)
                if entry is None or entry[0].expired():
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self, excluded: Iterable[int]) -> int:
        """Return the bytes of the recorded storages that are alive and not among ``excluded``."""
        excluded = set(excluded)
        counted = [entry for key, entry in self.storages.items() if key not in excluded]
        return sum(size for storage, size in counted if not storage.expired())


class MemoryProbe(Executor):
    """An executor that measures the live bytes after each step of its line, including prefetched
    data for the next one, and appends them to ``measured``.

    Threads of the communication back end hold the rows of an exchange until they run again. If
    more is live than ``planned``, the measurement is repeated for a while.
    """

    def __init__(
        self,
        state: ShardedState,
        measured: list[Bytes],
        planned: Sequence[Mapping[str, float]],
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._state = state
        self._measurements = measured
        self._planned = planned
        self._max_wait_s = MAX_WAIT_S

    def run(self) -> Any:
        """Run every step of this rank's line, and measure after each."""
        with StorageRecorder() as self._storages:
            return super().run()

    def _start_action(self, action: Action) -> Chain:
        """Return the action's chain, with storages recorded on its exchanges' thread too."""

        def record_storages(run: Callable[..., State], *state: Any) -> State:
            with StorageRecorder(self._storages.storages):
                return run(*state)

        state, tasks = super()._start_action(action)
        recorded = []
        for task in tasks:
            if isinstance(task, LaneTask) and task.is_exchange:
                task = task._replace(run=partial(record_storages, task.run))
            recorded.append(task)
        return Chain(state, recorded)

    def _step(self, step: Step, lanes: Lanes) -> None:
        super()._step(step, lanes)
        lanes.wait_idle()

    def _prefetch(self, at: int) -> None:
        super()._prefetch(at)
        if at != len(self.executed):
            return
        for pass_ in self._in_flight.values():
            pass_.flow.saved_tensors.offloaded.wait_all()
        measured = self._measure()
        deadline = time.monotonic() + self._max_wait_s
        planned = self._planned[len(self._measurements)] if self._planned else {}
        transient = [(part, planned[part]) for part in TRANSIENT_PARTS if part in planned]
        while self._max_wait_s and any(measured[part] > size + 0.5 for part, size in transient):
            if time.monotonic() > deadline:
                self._max_wait_s = 0.0  # the excess is permanent: wait only once
            time.sleep(0.001)
            measured = self._measure()
        self._measurements.append(measured)

    def _measure(self) -> Bytes:
        passes = self._in_flight.values()
        messages = {_key(tensor) for tensor in self._messages.tensors}
        persistent = {_key(tensor) for _, tensor in persistent_tensors(self._state)}
        # Tensors that all layers of a pass share; losses, router terms and overflow counts.
        shared = [*self._result.losses, *(terms for *_, terms in self._result.terms)]
        shared += chain.from_iterable(flow.overflow for flow in self._flows)
        pairs = [pair for f in self._flows for pair in ((f.rows, f.piece), *f.shifted_rows)]
        batches = [batch for batch in chain.from_iterable(pairs) if batch is not None]
        shared += chain.from_iterable(vars(batch).values() for batch in batches)
        shared += chain.from_iterable(pass_.flow.shared_tensors for pass_ in passes)
        shared += chain.from_iterable(pass_.chunk_pass.seeds for pass_ in passes)
        offload = self._parts.offload
        stash = None if offload is None else offload.stash
        host = [] if stash is None else [ring.rows_SD for ring in stash.host.values()]
        shared += [] if stash is None else [*stash.tensors, *host]
        excluded = messages | persistent | {_key(t) for t in shared if isinstance(t, Tensor)}
        sinks = [pass_.sink for pass_ in passes if isinstance(pass_.sink, DeferredSink)]
        operands = {_key(t): t.untyped_storage().nbytes() for t in _operands(sinks)}
        measured = state_bytes(self._state)
        measured["operands"] = sum(size for key, size in operands.items() if key not in excluded)
        measured["activations"] = self._storages.live_bytes(excluded) - measured["operands"]
        measured["messages"] = self._storages.live_bytes(self._storages.storages.keys() - messages)
        stores = {} if offload is None else offload.stores
        if stash is not None:
            measured["pages"] = sum(t.untyped_storage().nbytes() for t in stash.tensors)
            measured["host pages"] = sum(tensor.nbytes for tensor in host)
        return measured | {name: store.stats.held for name, store in stores.items()}


def _key(tensor: Tensor) -> int:
    """Return a key of the tensor's storage, equal for all views of it."""
    return tensor.untyped_storage()._cdata


def _operands(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that queued products will read, from closures and partials."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, DeferredSink):
        yield from _operands([product for _, product in value.pending])
    elif isinstance(value, partial):
        yield from _operands([value.func, *value.args, *value.keywords.values()])
    elif isinstance(value, FunctionType):
        yield from _operands(list(value.__closure__ or ()))
    elif isinstance(value, Products):
        yield from _operands(list(vars(value).values()))
    elif isinstance(value, CellType):
        yield from _operands(value.cell_contents)
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_operands, value))


def persistent_tensors(state: ShardedState) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's tensors for parameters and their gradients, each with its part's name."""
    model = state.parts.model
    yield from (("shared", buffer) for buffer in model.buffers())
    # After the model's buffers, which include histories: the last part that names a storage counts.
    histories = (history.buffers() for history in state.histories.values())
    weights = chain(model.precision_policy.copies, model.precision_policy.codes, *histories)
    yield from (("weights", tensor) for tensor in weights)
    for bucket in state.buckets:
        yield from (("weights", tensor) for tensor in bucket.unsharded_tensors)
        yield "master", bucket.master_L
        yield from (("gradients", tensor) for tensor in bucket.gradient_tensors)
    for parameter in (*model.parameters(), *state.params.values()):
        yield "master", parameter
        if parameter.grad is not None:
            yield "gradients", parameter.grad


def state_bytes(state: ShardedState, optimizer: Optimizer | None = None) -> Bytes:
    """Return the bytes of parameters, gradients and the optimizer's state, each storage once."""
    tensors = list(persistent_tensors(state))
    if optimizer is not None:
        tensors += [("moments", moment) for moment in optimizer.state().values() if moment.dim()]
    storages = {_key(tensor): (part, tensor.untyped_storage()) for part, tensor in tensors}
    bytes_by_part: Bytes = dict.fromkeys(("weights", "master", "moments", "gradients"), 0)
    for part, storage in storages.values():
        if part in bytes_by_part:
            bytes_by_part[part] += storage.nbytes()
    return bytes_by_part


def measure_step(
    state: ShardedState,
    batches: Sequence[MicroBatch],
    loss_chunk: int,
    planned: Sequence[Mapping[str, float]] = (),
) -> list[Bytes]:
    """Compute a step's gradients; return the live bytes after each step of this rank's line.

    ``planned``: the planned bytes. If the step is repeated because rows overflowed, its first
    attempt is measured.
    """
    measured: list[Bytes] = []

    def run(*args: Any) -> StepResult:
        return run_step(*args) if measured else MemoryProbe(state, measured, planned, *args).run()

    gradients(state, batches, loss_chunk, executor=run)
    return measured
