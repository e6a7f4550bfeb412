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

WARM = 3
"""Steps of a shape that run eagerly before one is recorded."""
SHAPES = 8
"""Most shapes that are recorded, each with memory for its outputs; others run eagerly."""
Graph = Callable[[], None]
"""Replays the recorded launches on the tensors of the recorded run."""
GraphRecorder = Callable[[Callable[[], Any]], tuple[Graph, Any]]
"""Records a function's launches; returns the graph, and the function's result, which replays fill.
Graphs of one recorder share memory, in the order recorded."""


class CudaGraphs:
    """Records CUDA graphs. Recording runs no kernel: only a replay fills the results."""

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
            # may in turn wait for what this stage sends next.
            with torch.cuda.stream(_recording_stream()):
                # Of this thread alone: others query whether messages of other ranks have arrived.
                graph.capture_begin(self._pool, "thread_local")
                try:
                    left = function()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise RuntimeError(
                f"layout.graphs: a CUDA graph could not be captured: {error}. Use graphs: none"
            ) from error
        self._pool = graph.pool()
        return graph.replay, left


class Shapes:
    """Counts steps of each shape, and tracks whether weights moved since graphs were recorded."""

    def __init__(self) -> None:
        self._seen, self._known = Counter[Hashable](), set[Hashable]()
        self._held: tuple[tuple[int, int], ...] = ()

    def begin_step(
        self, placed: ModelParts, flows: Sequence[Flow]
    ) -> tuple[bool, list[Hashable | None]]:
        """Return whether any rank's weights moved, and each micro-batch's shape on all ranks.

        None for a micro-batch that must run eagerly. A collective call: NCCL requires that all
        ranks record and replay their communication alike.
        """
        keys: list[Hashable | None] = [
            None if flow.exact else (flow.rows.rows, flow.rows.n_valid, flow.rows.lengths)
            for flow in flows
        ]
        world = placed.world
        said = [[self.moved(placed), *(hash(key or ()) for key in keys)]]
        if world.size > 1:
            with world.recorder.module("graphs"):
                mine = torch.tensor(said[0], device=world.device)
                said = gather(mine, world.group("world")).tolist()
        moved_R, *shapes_MR = zip(*said, strict=True)
        if moved := any(moved_R):
            self._seen.clear()
            self._known.clear()
        return moved, [key and (key, hash(all_)) for key, all_ in zip(keys, shapes_MR, strict=True)]

    def moved(self, placed: ModelParts) -> bool:
        """Renew low-precision weights, so that no replay casts; return whether any moved."""
        model, stash = placed.model, placed.offload and placed.offload.stash
        model.recipe.renew()
        held = [*model.parameters(), *model.buffers(), *model.recipe.copies]
        held += stash.tensors if stash is not None else []
        places = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in held)
        before, self._held = self._held, places
        return before != places

    def ready(self, key: Hashable) -> bool:
        """Count a step of a shape; return whether it was or may now be recorded."""
        if key in self._known:
            return True
        self._seen[key] += 1
        ready = self._seen[key] > WARM and len(self._known) < SHAPES
        if ready:
            self._known.add(key)
            # Graphs have separate memory. No work of the step is in flight yet, for which freeing
            # cached memory would have to wait.
            torch.cuda.empty_cache()
        return ready


@lru_cache
def _recording_stream() -> torch.cuda.Stream:
    """Return the one stream on which graphs are recorded, so that backward is on forward's."""
    return torch.cuda.Stream()


def refill(old: Flow, new: Flow) -> None:
    """Copy another micro-batch's rows into the tensors that a graph reads."""
    for later, name in product(range(len(old.ahead) + 1), ROW_TENSORS):
        pair = old.at(later), new.at(later)
        for one, other in zip(*((flow.rows, flow.piece) for flow in pair), strict=True):
            if one is not None:
                getattr(one, name).copy_(getattr(other, name))


def static_copy(flow: Flow) -> Flow:
    """Return a flow with its own copies of rows, and segment bounds already on the device."""

    def own(rows: MicroBatch) -> MicroBatch:
        found = replace(rows, **{name: getattr(rows, name).clone() for name in ROW_TENSORS})
        _ = found.cu_seqlens
        return found

    return flow.with_rows(own)
