"""Recording of CUDA graphs: the recorder, the shapes that are recorded, and static inputs.

A graph replays the kernel launches of the recorded run with one launch by the host. It reads the
tensors of that run, so rows, factors and outputs of other parts are copied into them, and it writes
its outputs where that run did. The first steps of a shape run eagerly, since kernels are compiled
and libraries select theirs.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from moefold.comm.collectives import gather
from moefold.data.batch import ROW_TENSORS, MicroBatch
from moefold.layers.flow import Flow
from moefold.parallel.apply import ModelParts

WARMUP_STEPS = 3
"""Steps of a shape that run eagerly before a step is recorded."""
MAX_SHAPES = 8
"""Most shapes that are recorded, each with memory for outputs; others run eagerly."""
Graph = Callable[[], None]
"""Replays the recorded launches on the tensors of the recorded run."""
GraphRecorder = Callable[[Callable[[], Any]], tuple[Graph, Any]]
"""Records a function's launches; returns the graph, and the function's result, which replays fill.
Graphs of one recorder share memory, in the order recorded."""


class CudaGraphs:
    """Records CUDA graphs. Recording runs no kernel; a replay fills the results."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        """Record a function's launches.

        Raises:
            RuntimeError: if capture fails, for example where the host reads a device value.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph would synchronise, and so wait for receives from other stages, which
            # may in turn wait for this stage's next send.
            with torch.cuda.stream(_recording_stream()):
                # Only this thread: others query whether messages of other ranks have arrived.
                graph.capture_begin(self._pool, "thread_local")
                try:
                    result = function()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise RuntimeError(
                f"layout.graphs: a CUDA graph could not be captured: {error}. Use graphs: none"
            ) from error
        self._pool = graph.pool()
        return graph.replay, result


class ShapeTracker:
    """Counts steps of each shape, and tracks whether weights moved since graphs were recorded."""

    def __init__(self) -> None:
        self._seen = Counter[Hashable]()
        self._recorded = set[Hashable]()
        self._addresses: tuple[tuple[int, int], ...] = ()

    def begin_step(
        self, parts: ModelParts, flows: Sequence[Flow]
    ) -> tuple[bool, list[Hashable | None]]:
        """Return whether any rank's weights moved, and each micro-batch's shape on all ranks.

        None for a micro-batch that must run eagerly. A collective call: NCCL requires that all
        ranks record and replay their communication alike.
        """
        keys: list[Hashable | None] = [
            None if flow.exact else (flow.rows.rows, flow.rows.n_valid, flow.rows.lengths)
            for flow in flows
        ]
        world = parts.world
        hashes = [[self.weights_moved(parts), *(hash(key or ()) for key in keys)]]
        if world.size > 1:
            with world.recorder.module("graphs"):
                local = torch.tensor(hashes[0], device=world.device)
                hashes = gather(local, world.group("world")).tolist()
        moved_R, *shapes_MR = zip(*hashes, strict=True)
        if moved := any(moved_R):
            self._seen.clear()
            self._recorded.clear()
        return moved, [key and (key, hash(row)) for key, row in zip(keys, shapes_MR, strict=True)]

    def weights_moved(self, parts: ModelParts) -> bool:
        """Refresh low-precision weights, so that no replay casts; return whether any moved."""
        model = parts.model
        stash = parts.offload and parts.offload.stash
        model.precision_policy.refresh_copies()
        tensors = [*model.parameters(), *model.buffers(), *model.precision_policy.copies]
        tensors += stash.tensors if stash is not None else []
        addresses = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
        before = self._addresses
        self._addresses = addresses
        return before != addresses

    def ready(self, key: Hashable) -> bool:
        """Count a step of a shape; return whether it is recorded or may be now."""
        if key in self._recorded:
            return True
        self._seen[key] += 1
        ready = self._seen[key] > WARMUP_STEPS and len(self._recorded) < MAX_SHAPES
        if ready:
            self._recorded.add(key)
            # Graphs have separate memory. No work of the step is in flight yet, so cached memory is
            # freed without a wait.
            torch.cuda.empty_cache()
        return ready


@lru_cache
def _recording_stream() -> torch.cuda.Stream:
    """Return the single stream for recording graphs, so that backward uses forward's stream."""
    return torch.cuda.Stream()


def refill(old: Flow, new: Flow) -> None:
    """Copy another micro-batch's rows into the tensors that a graph reads."""
    for later, name in product(range(len(old.shifted_rows) + 1), ROW_TENSORS):
        pair = old.shifted(later), new.shifted(later)
        for target, source in zip(*((flow.rows, flow.piece) for flow in pair), strict=True):
            if target is not None:
                getattr(target, name).copy_(getattr(source, name))


def static_copy(flow: Flow) -> Flow:
    """Return a flow with copies of its rows, and with segment bounds on the device."""

    def own(rows: MicroBatch) -> MicroBatch:
        copy = replace(rows, **{name: getattr(rows, name).clone() for name in ROW_TENSORS})
        _ = copy.cu_seqlens
        return copy

    return flow.with_rows(own)
