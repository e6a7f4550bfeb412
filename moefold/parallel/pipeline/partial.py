"""Partial CUDA graphs: replays parts of blocks as separate graphs; everything between runs eagerly.

Each pass in flight has separate graphs of its parts' forward and backward, since they hold the
activations for backward; a later micro-batch reuses them when the pass is over. The graphs of one
pass share a memory pool, in the order of its parts, which never changes.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.kernels.gradients import DeferredSink, GradientSink
from moefold.layers.flow import Flow
from moefold.moe.dispatch.config import FixedShape
from moefold.parallel.apply import ModelParts
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.recording import (
    Graph,
    GraphRecorder,
    ShapeTracker,
    refill,
    static_copy,
)
from moefold.parallel.pipeline.subgraph import Gradients, Subgraph, detached


class RecordedPart(NamedTuple):
    """A graph of a part's forward or backward."""

    graph: Graph
    static_inputs: tuple[Any, ...]
    """Tensors that the graph reads, and Python values that it was recorded with."""
    static_outputs: tuple[Any, ...]
    output_spec: Any
    """Pytree structure of the outputs."""
    deferred: Sequence[Any]
    """Deferred weight-gradient products that it adds to the pass's queue."""

    def copy_inputs(self, values: Sequence[Any]) -> None:
        """Copy values into the static inputs, except tensors that already use that memory."""
        for old, new in zip(self.static_inputs, values, strict=True):
            if not isinstance(old, Tensor):
                assert old == new, f"a graph was recorded with {old}, and gets {new}"
            elif old.data_ptr() != new.data_ptr():
                with torch.no_grad():
                    old.copy_(new)


@dataclass
class GraphedPass:
    """Graphs of one pass through a chunk, used by one micro-batch at a time."""

    key: Hashable
    """(chunk, shape)."""
    flow: Flow
    """The flow whose static rows the graphs read."""
    is_graphed: Callable[[int, Sequence[bool]], bool]
    """``is_graphed(index, exchanges)``: whether a block's segment ``index`` is in a graph, given
    which segments are exchanges."""
    record: GraphRecorder
    _parts: dict[Hashable, RecordedPart] = field(default_factory=dict)
    _static: set[int] = field(default_factory=set)
    """Addresses of the graphs' static inputs and outputs."""

    def run(
        self,
        part: "GraphedPart",
        direction: str,
        function: Callable[..., Any],
        values: Sequence[Any],
    ) -> tuple[Any, ...]:
        """Run one of a part's functions, named by ``direction``; the first time, record it."""
        key = (part.name, direction)
        tree_specs = part.tree_specs
        end = part.name[1]
        recorded = self._parts.get(key)
        pending = part.pending
        if recorded is None:
            inputs = tuple(map(self._static_input, values))
            before = len(pending)
            graph, outputs = self.record(lambda: function(*inputs))
            self._static |= {x.data_ptr() for x in outputs if isinstance(x, Tensor)}
            recorded = RecordedPart(graph, inputs, outputs, tree_specs[end], pending[before:])
            self._parts[key] = recorded
        else:
            recorded.copy_inputs(values)
            pending += recorded.deferred
            tree_specs[end] = recorded.output_spec
        recorded.graph()
        outputs = recorded.static_outputs
        return tuple(detached(y, isinstance(y, Tensor) and y.requires_grad) for y in outputs)

    def _static_input(self, value: Any) -> Any:
        """Return a value with the same memory in every step: a graph's output, or a copy."""
        if not isinstance(value, Tensor) or value.data_ptr() in self._static:
            return value
        copy = value.detach().clone().requires_grad_(value.requires_grad)
        self._static.add(copy.data_ptr())
        return copy


class GraphedPart:
    """A part of a pass that runs as graphs, with the interface of :class:`Subgraph`.

    ``name`` is (the block's position, the index of the segment after the part); ``tree_specs`` are
    the pytree structures of the records between the block's segments.
    """

    is_exchange = False

    def __init__(
        self,
        graphs: "GraphedPass",
        part: Subgraph,
        name: tuple[Hashable, int],
        sink: GradientSink,
        tree_specs: list[Any],
    ) -> None:
        self._graphs = graphs
        self._part = part
        self.name = name
        self.tree_specs = tree_specs
        self.pending: list[Any] = sink.pending if isinstance(sink, DeferredSink) else []
        """The pass's queue of deferred weight-gradient products."""
        self.seeds: Gradients = ()
        """Gradients of outputs that no later part takes, as in :class:`Subgraph`."""

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the part."""
        return self._graphs.run(self, "forward", self._part.forward, inputs)

    def forward_no_grad(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the part without saving anything for backward."""
        return self._graphs.run(self, "forward_no_grad", self._part.forward_no_grad, inputs)

    def backward(self, *gradients: Tensor | None) -> Gradients:
        """Return the inputs' gradients, given those of the outputs."""
        all_gradients = (*gradients, *self.seeds)
        return self._graphs.run(self, "backward", self._part.backward, all_gradients)


class PartGraphs:
    """Pool of graphed passes through the model parts of this rank, by chunk and shape."""

    def __init__(self, state: ShardedState, record: Callable[[], GraphRecorder]) -> None:
        self._record = record
        self._shapes = ShapeTracker()
        self._keys: list[Hashable | None] = []
        """Shape of each micro-batch of the step; those in ``_ready`` run as graphs."""
        self._ready: set[Hashable] = set()
        self._free: dict[Hashable, list[GraphedPass]] = defaultdict(list)
        self.passes: list[GraphedPass] = []
        """All passes with graphs: as many as were ever in flight at once."""
        layout = state.parts.layout
        handles = set[Tensor]()
        self._no_exchange = layout.split.ep * layout.split.etp == 1
        fixed = isinstance(layout.dispatch, FixedShape) and layout.graph_experts
        self._captures_experts = self._no_exchange or fixed
        for bucket in state.buckets:
            bucket.keeps_gradients = True
            handles.update(bucket.handles.values())
        trained = [p for p in state.parts.model.parameters() if p.requires_grad]
        self._outside_buckets = [p for p in trained if p not in handles]

    @cached_property
    def _sums(self) -> dict[Tensor, Tensor]:
        """Gradients in fixed memory, as buckets have: graphs add to them from the first pass on."""
        return {p: torch.zeros_like(p) for p in self._outside_buckets}

    def begin_step(self, parts: ModelParts, flows: Sequence[Flow]) -> None:
        """Determine which of the step's shapes have graphs; put gradients in their fixed memory."""
        moved, self._keys = self._shapes.begin_step(parts, flows)
        if moved:
            self._free.clear()
            self.passes.clear()
        # In micro-batch order, so that all ranks record in the same order.
        keys = [key for key in dict.fromkeys(self._keys) if key is not None]
        self._ready = {key for key in keys if self._shapes.ready(key)}
        for parameter, sums in self._sums.items() if self._ready else ():
            parameter.grad = sums.zero_()

    def acquire(self, chunk: int, micro: int, flow: Flow) -> GraphedPass | None:
        """Return graphs for a pass through a chunk, filled with its rows; None to run eagerly."""
        shape = self._keys[micro]
        if shape not in self._ready:
            return None
        free = self._free[chunk, shape]
        if free:
            graphs = free.pop()
            refill(graphs.flow, flow)
            return graphs
        graphs = GraphedPass((chunk, shape), static_copy(flow), self._is_graphed, self._record())
        self.passes.append(graphs)
        return graphs

    def _is_graphed(self, index: int, exchanges: Sequence[bool]) -> bool:
        between = any(exchanges[:index]) and any(exchanges[index:])
        return self._no_exchange or not (
            exchanges[index] or (between and not self._captures_experts)
        )

    def release(self, graphs: GraphedPass) -> None:
        """Return graphs to the pool, once their outputs are no longer needed."""
        self._free[graphs.key].append(graphs)
