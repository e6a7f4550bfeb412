"""Runs steps by CUDA graphs: one for the whole step, or one for each part of static shape.

The host launches hundreds of kernels per layer; with narrow experts or few rows they finish faster
than it can launch them.
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
    """Return the function that runs steps, with the signature of :func:`run_step`.

    It follows ``layout.graphs``. ``record`` builds recorders; by default those of CUDA, on CUDA.
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
"""Replays a step's graph on micro-batches of the recorded shape."""


class StepGraphs:
    """Runs steps by one graph per shape once it is recorded, and eagerly before."""

    def __init__(self, data: ShardedState, record: Callable[[], GraphRecorder]) -> None:
        self._data, self._record, self._shapes = data, record, Shapes()
        self.recorded: dict[Hashable, Replay] = {}

    def __call__(
        self, placed: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> StepResult:
        """Run a step's forward and backward; the arguments are those of :func:`run_step`."""
        moved, keys = self._shapes.begin_step(placed, flows)
        if moved:
            self.recorded.clear()
        key = tuple(keys)
        if None in key or not self._shapes.ready(key):
            return run_step(placed, flows, factors, loss)
        for bucket in self._data.buckets:
            bucket.wait_unshard()  # started by the update, which is not part of the graph
        if key not in self.recorded:
            self.recorded[key] = self._recorded(placed, flows, factors, loss)
        return self.recorded[key](flows, factors)

    def _recorded(
        self, placed: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> Replay:
        # Copies, since the step's own tensors are freed after it.
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
