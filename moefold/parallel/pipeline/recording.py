"""What records graphs, of which shapes, and from which memory they read.

A graph holds the launches of whatever ran while it was recorded, and costs the host one. What it
reads are the very tensors of that run: rows, factors and what other parts leave are copied into
them. What it leaves is where that run left it. The first steps of a shape run as they are: kernels
are compiled and libraries choose theirs.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from moefold.comm.collectives import gather
from moefold.data.batch import ROWS, MicroBatch
from moefold.layers.flow import Flow
from moefold.parallel.apply import ModelParts

WARM = 3
"""Steps of a shape that run as they are before one is recorded."""
SHAPES = 8
"""Shapes that are recorded at most, each with memory of its own for what it leaves; others run as
they are."""
Graph = Callable[[], None]
"""Runs what was recorded, on the tensors of the run that was recorded."""
GraphRecorder = Callable[[Callable[[], Any]], tuple[Graph, Any]]
"""Records a function's launches: the graph, and what its replay will have left where the function
left it. Graphs of one recorder share memory, in the order recorded."""


class CudaGraphs:
    """Records CUDA graphs. What is recorded does not run: a replay fills what it left."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        """Record one.

        Raises:
            RuntimeError: where the host reads what the device computes, which no graph can.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph would wait for all that the device was told before, and so for what
            # other stages have yet to send: they may wait for what this one sends next.
            with torch.cuda.stream(_recording_stream()):
                # Of this thread alone: others ask whether what other ranks sent is here.
                graph.capture_begin(self._pool, "thread_local")
                try:
                    left = function()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise RuntimeError(
                f"layout.graphs: this cannot be a CUDA graph: {error}. Use graphs: none"
            ) from error
        self._pool = graph.pool()
        return graph.replay, left


class Shapes:
    """Which shapes have been seen how often, and whether weights lie where graphs read them."""

    def __init__(self) -> None:
        self._seen, self._known = Counter[Hashable](), set[Hashable]()
        self._held: tuple[tuple[int, int], ...] = ()

    def begin_step(
        self, placed: ModelParts, flows: Sequence[Flow]
    ) -> tuple[bool, list[Hashable | None]]:
        """Return whether any weight of any rank moved, and the shape of each micro-batch on all
        ranks together; None where no graph can hold its pass. All ranks call it.

        NCCL asks that ranks record what they say to each other alike, and replay it alike.
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
        """Renew narrow copies, as a graph would cast in each replay; whether any weight moved."""
        model, stash = placed.model, placed.offload and placed.offload.stash
        model.recipe.renew()
        held = [*model.parameters(), *model.buffers(), *model.recipe.copies]
        held += stash.tensors if stash is not None else []
        places = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in held)
        before, self._held = self._held, places
        return before != places

    def ready(self, key: Hashable) -> bool:
        """Note a step of a shape; whether it may be recorded, or was."""
        if key in self._known:
            return True
        self._seen[key] += 1
        ready = self._seen[key] > WARM and len(self._known) < SHAPES
        if ready:
            self._known.add(key)
            # Graphs have memory of their own. Now nothing of the step is under way, for which
            # giving some back would wait.
            torch.cuda.empty_cache()
        return ready


@lru_cache
def _recording_stream() -> torch.cuda.Stream:
    """Return the one stream that graphs are recorded on, so that a backward is on its forward's."""
    return torch.cuda.Stream()


def refill(old: Flow, new: Flow) -> None:
    """Put another micro-batch's rows where a graph reads them."""
    for later, name in product(range(len(old.ahead) + 1), ROWS):
        pair = old.at(later), new.at(later)
        for one, other in zip(*((flow.rows, flow.piece) for flow in pair), strict=True):
            if one is not None:
                getattr(one, name).copy_(getattr(other, name))


def static_copy(flow: Flow) -> Flow:
    """Return a pass whose rows lie in memory of their own, and what it would copy from the host."""

    def own(rows: MicroBatch) -> MicroBatch:
        found = replace(rows, **{name: getattr(rows, name).clone() for name in ROWS})
        _ = found.cu_seqlens
        return found

    return flow.with_rows(own)
