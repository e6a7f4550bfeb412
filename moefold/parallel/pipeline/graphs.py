"""Runs steps by CUDA graphs: one for the whole step, or one for each part of static shape.

The host launches hundreds of kernels per layer; with narrow experts or few rows they finish faster
than it can launch them.
"""

from collections.abc import Callable, Hashable, Sequence

from moefold.layers.flow import Flow
from moefold.parallel.apply import ModelParts
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import (
    Factors,
    ScaledLoss,
    StepExecutor,
    StepResult,
    run_step,
)
from moefold.parallel.pipeline.partial import PartGraphs
from moefold.parallel.pipeline.recording import (
    CudaGraphs,
    GraphRecorder,
    ShapeTracker,
    refill,
    static_copy,
)


def build_executor(
    state: ShardedState, record: Callable[[], GraphRecorder] | None = None
) -> StepExecutor:
    """Return what runs steps, as :func:`run_step` does.

    ``layout.graphs`` selects it. ``record`` builds recorders; by default CUDA's, on CUDA devices.
    """
    parts = state.parts
    if record is None and parts.world.device.type == "cuda":
        record = CudaGraphs
    if parts.layout.graphs == "none" or record is None:
        return run_step
    parts.model.precision_policy.in_place_copies = True
    if parts.layout.graphs == "partial":
        return PartialSteps(PartGraphs(state, record))
    return StepGraphs(state, record)


class PartialSteps:
    """Runs steps of which each part of static shape is a graph."""

    def __init__(self, graphs: PartGraphs) -> None:
        self.graphs = graphs

    def __call__(
        self, parts: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> StepResult:
        """Run a step's forward and backward; the arguments are those of :func:`run_step`."""
        return run_step(parts, flows, factors, loss, self.graphs)


Replay = Callable[[Sequence[Flow], Factors], StepResult]
"""Replays a step's graph on micro-batches of the recorded shape."""


class StepGraphs:
    """Runs steps by one graph per shape, and eagerly until it is recorded."""

    def __init__(self, state: ShardedState, record: Callable[[], GraphRecorder]) -> None:
        self._state = state
        self._record = record
        self._shapes = ShapeTracker()
        self.recorded: dict[Hashable, Replay] = {}

    def __call__(
        self, parts: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> StepResult:
        """Run a step's forward and backward; the arguments are those of :func:`run_step`."""
        moved, keys = self._shapes.begin_step(parts, flows)
        if moved:
            self.recorded.clear()
        key = tuple(keys)
        if None in key or not self._shapes.ready(key):
            return run_step(parts, flows, factors, loss)
        for bucket in self._state.buckets:
            bucket.wait_unshard()  # started by the optimizer step, which is not in the graph
        if key not in self.recorded:
            self.recorded[key] = self.record_step(parts, flows, factors, loss)
        return self.recorded[key](flows, factors)

    def record_step(
        self, parts: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> Replay:
        """Record a step; return what replays it on other micro-batches of its shape.

        Raises:
            RuntimeError: if the step cannot be captured, as where the host reads a device's value.
        """
        # Copies, since the step's tensors are freed after it.
        own_factors = Factors(*(factor.clone() for factor in factors))
        own_flows = [static_copy(flow) for flow in flows]
        buckets = list(self._state.buckets)

        def passes() -> StepResult:
            result = run_step(parts, own_flows, own_factors, loss)
            for bucket in buckets:
                bucket.wait_reduce()
            return result

        graph, result = self._record()(passes)
        parameters = [*parts.model.parameters(), *self._state.params.values()]
        gradients = [(p, p.grad) for p in parameters]
        sums = [(b, b.gradients, b.summed_L) for b in buckets]

        def replay(flows: Sequence[Flow], factors: Factors) -> StepResult:
            for old, new in zip(own_flows, flows, strict=True):
                refill(old, new)
                new.overflow[:] = old.overflow
            for old, new in zip(own_factors, factors, strict=True):
                old.copy_(new)
            graph()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for bucket, full, summed_L in sums:
                bucket.gradients = full
                bucket.summed_L = summed_L
            return result

        return replay
