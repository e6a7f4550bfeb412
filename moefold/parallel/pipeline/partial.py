"""Replays parts of blocks as graphs, each by itself; what lies between runs as it does.

A pass in flight has graphs of its own for its parts' forward and backward, which the next
micro-batch in its place runs again: theirs is the memory that backward needs, of as many passes as
are in flight at once. Graphs of a pass share memory in the order of its parts, which never changes.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.kernels.gradients import Deferred, GradientSink
from moefold.layers.flow import Flow
from moefold.moe.dispatch.config import FixedRoom
from moefold.parallel.apply import ModelParts
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.recording import (
    Graph,
    GraphRecorder,
    Shapes,
    refill,
    static_copy,
)
from moefold.parallel.pipeline.subgraph import Gradients, Subgraph, detached


class RecordedPart(NamedTuple):
    """A graph of one way through a part."""

    graph: Graph
    static_inputs: tuple[Any, ...]
    """What it reads of other parts, and values of the host."""
    static_outputs: tuple[Any, ...]
    form: Any
    """Of the record that it leaves."""
    waiting: Sequence[Any]
    """Products of weights that it puts on the pass's queue."""

    def take(self, values: Sequence[Any]) -> None:
        """Copy values to where the graph reads them, but those that lie there."""
        for old, new in zip(self.static_inputs, values, strict=True):
            if not isinstance(old, Tensor):
                assert old == new, f"a graph holds {old}, and is given {new}"
            elif old.data_ptr() != new.data_ptr():
                with torch.no_grad():
                    old.copy_(new)


@dataclass
class GraphedPass:
    """Graphs of one pass through a chunk, for one micro-batch at a time."""

    key: Hashable
    """Chunk and shape."""
    flow: Flow
    """Whose rows they read."""
    holds: Callable[[int, Sequence[bool]], bool]
    """Whether a segment of a block is one of its graphs, given which of them exchange."""
    record: GraphRecorder
    _parts: dict[Hashable, RecordedPart] = field(default_factory=dict)
    _static: set[int] = field(default_factory=set)
    """Where tensors lie that graphs of this pass leave or read."""

    def run(
        self, part: "GraphedPart", way: str, function: Callable[..., Any], values: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Run a part one way, recording it the first time."""
        key, forms, at = (part.name, way), part.forms, part.name[1]
        held, waiting = self._parts.get(key), part.waiting
        if held is None:
            given, before = tuple(map(self._static_input, values)), len(waiting)
            graph, left = self.record(lambda: function(*given))
            self._static |= {x.data_ptr() for x in left if isinstance(x, Tensor)}
            held = RecordedPart(graph, given, left, forms[at], waiting[before:])
            self._parts[key] = held
        else:
            held.take(values)
            waiting += held.waiting
            forms[at] = held.form
        held.graph()
        left = held.static_outputs
        return tuple(detached(y, isinstance(y, Tensor) and y.requires_grad) for y in left)

    def _static_input(self, value: Any) -> Any:
        """Return a value that lies where it does in every step: what a graph left, or a copy."""
        if not isinstance(value, Tensor) or value.data_ptr() in self._static:
            return value
        copy = value.detach().clone().requires_grad_(value.requires_grad)
        self._static.add(copy.data_ptr())
        return copy


class GraphedPart:
    """A part of a pass, in the place of a :class:`Subgraph`, which graphs of the pass hold.

    Its name is its block's, and the segment there that it ends before; ``forms`` are those of the
    records before and after each part of the block.
    """

    exchanges = False

    def __init__(
        self,
        graphs: "GraphedPass",
        part: Subgraph,
        name: tuple[Hashable, int],
        sink: GradientSink,
        forms: list[Any],
    ) -> None:
        self._graphs, self._part, self.name, self.forms = graphs, part, name, forms
        self.waiting: list[Any] = sink.waiting if isinstance(sink, Deferred) else []
        """Products of weights that wait."""
        self.seeds: Gradients = ()
        """As of a :class:`Subgraph`."""

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the part."""
        return self._graphs.run(self, "forward", self._part.forward, inputs)

    def bare(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the part and keep nothing."""
        return self._graphs.run(self, "bare", self._part.bare, inputs)

    def backward(self, *gradients: Tensor | None) -> Gradients:
        """Run backward from the outputs' gradients; returns those of the inputs."""
        given = (*gradients, *self.seeds)
        return self._graphs.run(self, "backward", self._part.backward, given)


class PartGraphs:
    """Graphs of passes through some parts, for those whose shape is known."""

    def __init__(self, data: ShardedState, record: Callable[[], GraphRecorder]) -> None:
        self._record, self._shapes = record, Shapes()
        self._keys: list[Hashable | None] = []
        """Of the step's micro-batches, and which of them have graphs."""
        self._ready: set[Hashable] = set()
        self._free: dict[Hashable, list[GraphedPass]] = defaultdict(list)
        self.passes: list[GraphedPass] = []
        """All that were ever in flight at once."""
        layout, handles = data.placed.layout, set[Tensor]()
        self._alone = layout.split.ep * layout.split.etp == 1
        self._fixed = self._alone or isinstance(layout.dispatch, FixedRoom)
        for bucket in data.buckets:
            bucket.gradients_stay = True
            handles.update(bucket.handles.values())
        # Graphs add to sums that lie where they lay, from the first micro-batch on: a bucket's are
        # its own.
        trained = [one for one in data.placed.model.parameters() if one.requires_grad]
        self._sums = {one: torch.zeros_like(one) for one in trained if one not in handles}

    def begin_step(self, placed: ModelParts, flows: Sequence[Flow]) -> None:
        """Look at the step's shapes, and let gradients lie where they lay."""
        moved, self._keys = self._shapes.begin_step(placed, flows)
        if moved:
            self._free.clear()
            self.passes.clear()
        # In the order of micro-batches, the same on all ranks.
        keys = [key for key in dict.fromkeys(self._keys) if key is not None]
        self._ready = {key for key in keys if self._shapes.ready(key)}
        for parameter, sums in self._sums.items() if self._ready else ():
            parameter.grad = sums.zero_()

    def take(self, chunk: int, micro: int, flow: Flow) -> GraphedPass | None:
        """Return graphs for a pass through a chunk, with its rows; None where it runs as it is."""
        shape = self._keys[micro]
        if shape not in self._ready:
            return None
        free = self._free[chunk, shape]
        if free:
            found = free.pop()
            refill(found.flow, flow)
            return found
        found = GraphedPass((chunk, shape), static_copy(flow), self._holds, self._record())
        self.passes.append(found)
        return found

    def _holds(self, at: int, exchanges: Sequence[bool]) -> bool:
        between = any(exchanges[:at]) and any(exchanges[at:])
        return self._alone or not (exchanges[at] or (between and not self._fixed))

    def give(self, graphs: GraphedPass) -> None:
        """Take graphs back once nothing needs what they left."""
        self._free[graphs.key].append(graphs)
