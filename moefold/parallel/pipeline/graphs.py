"""Replays a step's forward and backward as one CUDA graph, where one device makes the whole step.

The host issues hundreds of kernels a layer; with narrow experts or few rows they end sooner than it
issues the next. A graph holds all launches of a step, of every micro-batch, and costs the host one.
What is read while it runs are the tensors of the step that was captured: each later step of the
same shape copies its rows and factors into them. Gradients, losses and router terms are where the
captured step left them.

The first steps of a shape run as they are: kernels are compiled and libraries choose theirs.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.data.batch import ROWS
from moefold.layers.flow import Flow
from moefold.parallel.apply import ModelParts
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import Executor, Factors, ScaledLoss, StepResult

WARM = 2
"""Steps of a shape that run as they are before one is captured."""
SHAPES = 8
"""Shapes that are captured at most, each with memory of its own for what it leaves; steps of
others run as they are."""


def executor_of(data: ShardedState) -> Callable[..., Any]:
    """Return what makes an executor of each step, by ``layout.graphs``."""
    placed = data.placed
    if placed.layout.graphs == "none" or placed.world.device.type != "cuda":
        return Executor
    placed.model.recipe.copies_stay = True
    return StepGraphs([*placed.model.parameters(), *data.params.values()])


@dataclass(frozen=True)
class CapturedStep:
    """A graph, what it reads, and what it leaves.

    Attributes:
        graph: all launches of the step.
        flows: the micro-batches whose rows it reads.
        factors: those it reads.
        gradients: of each parameter, None for one that got none.
        left: losses and router terms.
    """

    graph: torch.cuda.CUDAGraph
    flows: Sequence[Flow]
    factors: Factors
    gradients: list[tuple[Tensor, Tensor | None]]
    left: StepResult

    def replay(self, flows: Sequence[Flow], factors: Factors) -> StepResult:
        """Run the graph on other micro-batches of the same shape."""
        for old, new in zip(self.flows, flows, strict=True):
            for later, name in product(range(len(old.ahead) + 1), ROWS):
                getattr(old.at(later).rows, name).copy_(getattr(new.at(later).rows, name))
            new.overflow[:] = old.overflow
        for old, new in zip(self.factors, factors, strict=True):
            old.copy_(new)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.left


class GraphedStep(NamedTuple):
    """One step that is about to run, in the place of an executor."""

    run: Callable[[], StepResult]


class StepGraphs:
    """Makes what runs a step: a graph of its shape where there is one, or the executor.

    Args:
        parameters: every tensor that a step may give a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, CapturedStep] = {}
        self._held: tuple[int, ...] = ()
        """Where the weights lie that the graphs read."""

    def __call__(
        self, placed: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> GraphedStep:
        """Return what runs a step; arguments as :class:`Executor` takes them."""
        return GraphedStep(partial(self.run, placed, flows, factors, loss))

    def run(
        self, placed: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> StepResult:
        """Run a step's forward and backward.

        Raises:
            RuntimeError: where the host reads what the device computes, which no graph can.
        """
        # Narrow copies are renewed here: a graph would cast as often as the step it was made of.
        placed.model.recipe.renew()
        model = placed.model
        held = (*model.parameters(), *model.buffers(), *model.recipe.copies)
        places = tuple(tensor.data_ptr() for tensor in held)
        if places != self._held:
            self._held = places
            self._seen.clear()
            self._captured.clear()
        key = tuple((f.rows.rows, f.rows.n_valid, f.rows.lengths, f.exact) for f in flows)
        if key in self._captured:
            return self._captured[key].replay(flows, factors)
        if len(self._captured) == SHAPES:
            return Executor(placed, flows, factors, loss).run()
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen <= WARM:
            return Executor(placed, flows, factors, loss).run()
        self._captured[key] = captured = self._capture(placed, flows, factors, loss)
        return captured.replay(flows, factors)

    def _capture(
        self, placed: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> CapturedStep:
        # Copies: the step's own tensors are let go with it.
        factors = Factors(*(factor.clone() for factor in factors))
        for flow in flows:
            for later in range(len(flow.ahead) + 1):
                _ = flow.at(later).rows.cu_seqlens  # copied from the host, which no graph does
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                left = Executor(placed, flows, factors, loss).run()
        except RuntimeError as error:
            raise RuntimeError(
                f"layout.graphs: this step cannot be one CUDA graph: {error}. Use graphs: none"
            ) from error
        gradients = [(one, one.grad) for one in self._parameters]
        return CapturedStep(graph, flows, factors, gradients, left)
