"""Replays a step as CUDA graphs: its passes as one, or the parts of blocks whose shapes stay.

The host issues hundreds of kernels a layer; with narrow experts or few rows they end sooner than it
issues the next.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from moefold.layers.flow import Flow
from moefold.parallel.apply import ModelParts
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import Factors, ScaledLoss, StepResult, run_step
from moefold.parallel.pipeline.partial import PartGraphs
from moefold.parallel.pipeline.recording import (
    CudaGraphs,
    GraphRecorder,
    Shapes,
    refill,
    static_copy,
)


def executor_of(
    data: ShardedState, record: Callable[[], GraphRecorder] | None = None
) -> Callable[..., Any]:
    """Return what runs each step of some parts, by ``layout.graphs``.

    ``record`` makes recorders, where it is not CUDA that records.
    """
    placed = data.placed
    if record is None and placed.world.device.type == "cuda":
        record = CudaGraphs
    if placed.layout.graphs == "none" or record is None:
        return run_step
    placed.model.recipe.copies_stay = True
    if placed.layout.graphs == "partial":
        return partial(run_step, graphs=PartGraphs(data, record))
    return StepGraphs(data, record)


Replay = Callable[[Sequence[Flow], Factors], StepResult]
"""Runs a step's graph on micro-batches of the shape that it was recorded of."""


class StepGraphs:
    """Runs steps of some parts: by a graph of their shape where there is one, or as they are."""

    def __init__(self, data: ShardedState, record: Callable[[], GraphRecorder]) -> None:
        self._data, self._record, self._shapes = data, record, Shapes()
        self.recorded: dict[Hashable, Replay] = {}

    def __call__(
        self, placed: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> StepResult:
        """Run a step's forward and backward; arguments as :func:`run_step` takes them."""
        moved, keys = self._shapes.begin_step(placed, flows)
        if moved:
            self.recorded.clear()
        key = tuple(keys)
        if None in key or not self._shapes.ready(key):
            return run_step(placed, flows, factors, loss)
        for bucket in self._data.buckets:
            bucket.wait_unshard()  # begun by the update, which is no part of the graph
        if key not in self.recorded:
            self.recorded[key] = self._recorded(placed, flows, factors, loss)
        return self.recorded[key](flows, factors)

    def _recorded(
        self, placed: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> Replay:
        # Copies: the step's own tensors are let go with it.
        own_factors = Factors(*(factor.clone() for factor in factors))
        own_flows = [static_copy(flow) for flow in flows]
        buckets = list(self._data.buckets)

        def passes() -> StepResult:
            left = run_step(placed, own_flows, own_factors, loss)
            for bucket in buckets:
                bucket.wait_reduce()
            return left

        graph, left = self._record()(passes)
        given = [*placed.model.parameters(), *self._data.params.values()]
        gradients = [(one, one.grad) for one in given]
        sums = [(one, one.gradients, one.summed_L) for one in buckets]

        def replay(flows: Sequence[Flow], factors: Factors) -> StepResult:
            for old, new in zip(own_flows, flows, strict=True):
                refill(old, new)
                new.overflow[:] = old.overflow
            for old, new in zip(own_factors, factors, strict=True):
                old.copy_(new)
            graph()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for bucket, whole, summed_L in sums:
                bucket.gradients, bucket.summed_L = whole, summed_L
            return left

        return replay
