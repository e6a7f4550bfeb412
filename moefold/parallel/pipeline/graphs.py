"""Replays a step as CUDA graphs: its passes as one, or the parts of blocks whose shapes stay.

The host issues hundreds of kernels a layer; with narrow experts or few rows they end sooner than it
issues the next.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from moefold.layers.flow import Flow
from moefold.parallel.apply import ModelParts
from moefold.parallel.data.bucket import Bucket
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import Factors, ScaledLoss, StepResult, run_step
from moefold.parallel.pipeline.partial import PartGraphs
from moefold.parallel.pipeline.recording import (
    CudaGraphs,
    Graph,
    GraphRecorder,
    Shapes,
    refill,
    static_copy,
)


def executor_of(
    data: ShardedState, record: Callable[[], GraphRecorder] | None = None
) -> Callable[..., Any]:
    """Return what runs each step, by ``layout.graphs``.

    Args:
        data: the model's parts.
        record: makes recorders, where it is not CUDA that records.
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


@dataclass(frozen=True)
class RecordedStep:
    """A graph, what it reads, and what it leaves.

    Attributes:
        graph: all launches of the step.
        flows: the micro-batches whose rows it reads.
        factors: those it reads.
        gradients: of each parameter, None for one that got none.
        sums: of each bucket, its whole gradients and this rank's sums, where there are any.
        left: losses and router terms.
    """

    graph: Graph
    flows: Sequence[Flow]
    factors: Factors
    gradients: list[tuple[Tensor, Tensor | None]]
    sums: list[tuple[Bucket, Tensor | None, Tensor | None]]
    left: StepResult

    def replay(self, flows: Sequence[Flow], factors: Factors) -> StepResult:
        """Run the graph on other micro-batches of the same shape."""
        for old, new in zip(self.flows, flows, strict=True):
            refill(old, new)
            new.overflow[:] = old.overflow
        for old, new in zip(self.factors, factors, strict=True):
            old.copy_(new)
        self.graph()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for bucket, whole, summed_L in self.sums:
            bucket.gradients, bucket.summed_L = whole, summed_L
        return self.left


class StepGraphs:
    """Runs steps: by a graph of their shape where there is one, or as they are.

    Args:
        data: the model's parts.
        record: makes recorders.
    """

    def __init__(self, data: ShardedState, record: Callable[[], GraphRecorder]) -> None:
        self._data, self._record, self._shapes = data, record, Shapes()
        self.recorded: dict[Hashable, RecordedStep] = {}

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
        return self.recorded[key].replay(flows, factors)

    def _recorded(
        self, placed: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> RecordedStep:
        # Copies: the step's own tensors are let go with it.
        factors = Factors(*(factor.clone() for factor in factors))
        flows = [static_copy(flow) for flow in flows]
        buckets = list(self._data.buckets)

        def passes() -> StepResult:
            left = run_step(placed, flows, factors, loss)
            for bucket in buckets:
                bucket.wait_reduce()
            return left

        graph, left = self._record()(passes)
        given = [*placed.model.parameters(), *self._data.params.values()]
        gradients = [(one, one.grad) for one in given]
        sums = [(one, one.gradients, one.summed_L) for one in buckets]
        return RecordedStep(graph, flows, factors, gradients, sums, left)
