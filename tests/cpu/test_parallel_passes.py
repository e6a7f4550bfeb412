"""Passes in parts: which tasks exchange, what stays alive, where gradients go."""

import weakref
from typing import Any

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.kernels.gradients import Deferred
from moefold.layers.config import Full
from moefold.layers.flow import Flow
from moefold.layers.keeper import Keeper
from moefold.parallel.apply import Chunk
from moefold.parallel.pipeline.lanes import Fill, LaneTask
from moefold.parallel.pipeline.passes import ChunkPass
from moefold.parallel.pipeline.subgraph import Subgraph
from tests.cpu import small

ROWS = small.padded_rows((5, 7), 0)


def loss(x_TD: Tensor, flow: Flow) -> tuple[Tensor, Tensor]:
    """Return the sum of squares, and its gradient."""
    return x_TD.square().sum(), 2 * x_TD


def ways(recompute: Full | None = None, apart: bool = True) -> tuple[ChunkPass, Deferred]:
    """Return a pass over a dense layer and a mixture, embedding and loss included."""
    model, sink = small.model_of(small.decoder()), Deferred()
    flow = Flow(ROWS, model.recipe, sink, Keeper(recompute))
    chunk = Chunk(("0", "1"), embeds=True, scores=True)
    return ChunkPass(model, chunk, flow, 1.0, loss, World.single() if apart else None), sink


def kinds(tasks: list[LaneTask] | list[LaneTask | Fill]) -> str:
    """Return a letter for each task: computes, exchanges, fills."""
    return "".join(
        "w" if isinstance(task, Fill) else "X" if task.exchanges else "c" for task in tasks
    )


def run(
    tasks: list[LaneTask] | list[LaneTask | Fill], *state: Tensor | None
) -> tuple[Tensor | None, ...]:
    for task in tasks:
        if isinstance(task, Fill):
            task.run()
        else:
            state = task.run(*state)
    return state


def test_segments_say_which_of_them_exchange() -> None:
    way, sink = ways()
    # Between words of begin and end to a layer's weights: a dense layer; route, dispatch, experts,
    # combine. Embedding comes before, norm and loss after.
    assert kinds(way.forward()) == "c" + "ccc" + "c" + "cXcX" + "c" + "cc"
    assert kinds(way.backward(sink.drain)) == "c" + "c" + "XwcXwc" + "c" + "ccc" + "c" + "w"


def test_without_pairs_a_chunk_is_one_part() -> None:
    way, _ = ways(apart=False)
    tasks = way.forward()
    assert kinds(tasks) == "cc"
    run(tasks)
    assert kinds(way.backward()) == "c"


def test_a_block_that_runs_again_has_its_last_exchange_once() -> None:
    way, sink = ways(Full())
    run(way.forward())
    # Norm; combine's backward; route, dispatch and experts again, then their backward; dense.
    again = "c" + "Xw" + "c" + "cXwc" + "c" + "cXwc" + "c"
    assert kinds(way.backward(sink.drain)) == "c" + again + "cccccc" + "c" + "w"


def test_all_forms_give_the_same_gradients() -> None:
    found: list[dict[str, Tensor]] = []
    for recompute, apart in ((None, False), (None, True), (Full(), False), (Full(), True)):
        way, sink = ways(recompute, apart)
        state = run(way.forward())
        run(way.backward(sink.drain), *state)
        model = way._model
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        untouched = {n for n, _ in model.named_parameters()} - set(found[0])
        assert untouched == {"head.weight"}, "the head's gradient comes with the loss"
    for other in found[1:]:
        small.same(other, found[0], 1e-14)


class Payload:
    """What a node of the graph holds."""


class Holds(torch.autograd.Function):
    """Doubles; its node holds one payload, and its weight's product another."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sink: Deferred, graph: Any, late: Any
    ) -> Tensor:
        ctx.weight, ctx.sink, ctx.graph, ctx.late = weight, sink, graph, late
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        late = ctx.late

        def product(into: Tensor | None) -> Tensor:
            assert late is not None
            return torch.ones(1, 1)

        ctx.sink.deliver(ctx.weight, product)
        return 2 * grad, None, None, None, None


def held(part_of: list[Subgraph], sink: Deferred, weight: Tensor) -> tuple[Any, Any]:
    """Make a part and run it; returns what its graph and its product hold, weakly."""
    graph, late = Payload(), Payload()
    part = Subgraph(lambda x: (Holds.apply(x, weight, sink, graph, late),))  # type: ignore[arg-type, return-value]
    part.forward(torch.ones(3, requires_grad=True))
    part._function = tuple  # type: ignore[assignment]
    part_of.append(part)
    return weakref.ref(graph), weakref.ref(late)


def test_inputs_gradient_frees_the_graph_and_the_queue_keeps_what_weights_need() -> None:
    sink, weight, parts = Deferred(), torch.zeros(1, 1, requires_grad=True), list[Subgraph]()
    graph, late = held(parts, sink, weight)
    assert graph() is not None
    (gradient,) = parts[0].backward(torch.ones(3))
    assert gradient is not None and gradient.tolist() == [2.0, 2.0, 2.0]
    assert graph() is None, "the graph is still there after the inputs' gradient"
    assert late() is not None and weight.grad is None
    assert sink.drain() == 1
    assert late() is None and weight.grad is not None


def test_a_part_keeps_neither_inputs_nor_outputs() -> None:
    kept = [torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)]
    part = Subgraph(lambda a, b: (a + b,))
    (y,) = part.forward(*kept)
    storages = [weakref.ref(t.untyped_storage()) for t in (*kept, y)]
    del y
    kept.clear()
    assert all(storage() is None for storage in storages)
    one, other = part.backward(torch.full((4,), 3.0))
    assert one is not None and other is not None
    assert one.tolist() == other.tolist() == [3.0] * 4
