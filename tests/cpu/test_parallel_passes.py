"""Passes in parts: which tasks exchange, what stays alive, where gradients go."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from moefold.comm.world import World
from moefold.config.base import Record
from moefold.data.batch import MicroBatch
from moefold.kernels.gradients import DeferredSink
from moefold.layers.config import Full, RecomputeKind, Selective
from moefold.layers.flow import Flow
from moefold.layers.saved_tensors import SavedTensors
from moefold.parallel.apply import Chunk
from moefold.parallel.pipeline.lanes import FillTask, LaneTask
from moefold.parallel.pipeline.passes import ChunkPass
from moefold.parallel.pipeline.subgraph import Subgraph
from tests.cpu import small

ROWS, PADDED = small.padded_rows((5, 7), 0), small.padded_rows((5, 7), 4)
EVERYTHING = Selective(modules=get_args(RecomputeKind))


def loss(x_TD: Tensor, flow: Flow, later: int) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of rows that count, and its gradient."""
    x_TD = x_TD * 1
    x_TD[flow.rows.n_valid :] = 0
    return x_TD.square().sum(), 2 * x_TD


def ways(
    recompute: Record | None = None, apart: bool = True, rows: MicroBatch = ROWS
) -> tuple[ChunkPass, DeferredSink]:
    """Return a pass over a dense layer and a mixture, embedding and loss included."""
    model, sink = small.model_of(small.decoder()), DeferredSink()
    flow = Flow(rows, model.precision_policy, sink, SavedTensors(recompute))
    chunk = Chunk(("0", "1"), has_embedding=True, has_head=True, has_norm=True)
    return ChunkPass(model, chunk, flow, 1.0, loss, World.single() if apart else None), sink


def kinds(tasks: list[LaneTask] | list[LaneTask | FillTask]) -> str:
    """Return a letter for each task: computes, exchanges, fills."""
    return "".join(
        "w" if isinstance(task, FillTask) else "X" if task.is_exchange else "c" for task in tasks
    )


def run(
    tasks: list[LaneTask] | list[LaneTask | FillTask], *state: Tensor | None
) -> tuple[Tensor | None, ...]:
    for task in tasks:
        if isinstance(task, FillTask):
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


def gradients(way: ChunkPass, sink: DeferredSink) -> dict[str, Tensor]:
    state = run(way.forward())
    run(way.backward(sink.drain), *state)
    return named(way)


def named(way: ChunkPass) -> dict[str, Tensor]:
    return {n: p.grad for n, p in way._model.named_parameters() if p.grad is not None}


def test_all_forms_give_the_same_gradients() -> None:
    found: list[dict[str, Tensor]] = []
    for recompute, apart in ((None, False), (None, True), (Full(), False), (Full(), True)):
        way, sink = ways(recompute, apart)
        found.append(gradients(way, sink))
        untouched = {n for n, _ in way._model.named_parameters()} - set(found[0])
        assert untouched == {"head.weight"}, "the head's gradient comes with the loss"
    for other in found[1:]:
        small.same(other, found[0], 1e-14)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("policy", [Full(), EVERYTHING], ids=["full", "selective"])
def test_padding_rows_of_what_runs_again_reach_no_gradient(
    policy: Record, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN stands in those of all that is made, each time, and in those of its gradient."""
    want, (way, sink) = gradients(*ways(rows=PADDED)), ways(policy, apart, PADDED)
    pad_T, runs, plain = ~PADDED.valid_T, Counter[str](), SavedTensors.run

    def poisoned(name: str, out: Any) -> Any:
        if type(out) is tuple:
            return tuple(poisoned(name, one) for one in out)
        if not isinstance(out, Tensor) or len(out) != len(pad_T):
            return out
        runs[name] += 1
        pad = pad_T.view(-1, *[1] * (out.dim() - 1))
        if out.requires_grad:
            out.register_hook(lambda grad: torch.where(pad, torch.nan, grad))
        return torch.where(pad, torch.nan, out)

    def keep(self: SavedTensors, kind: str, function: Callable[..., Any], *given: Tensor) -> Any:
        return plain(self, kind, lambda *given: poisoned(kind, function(*given)), *given)

    def hook(module: nn.Module, given: Any, out: Any) -> Any:
        return poisoned(type(module).__name__, out)

    monkeypatch.setattr(SavedTensors, "run", keep)
    # What a hook returns in place of an output is no output that could be discarded.
    for module in way._model.modules() if isinstance(policy, Full) else ():
        module.register_forward_hook(hook)
    state = run(way.forward())
    before = runs.copy()
    run(way.backward(sink.drain), *state)
    again = {*(runs - before)}
    assert again >= ({"Linear", "SwiGlu"} if isinstance(policy, Full) else {"norms", "attention"})
    small.same(named(way), want, 1e-13)


class Payload:
    """What a node of the graph holds."""


class Holds(torch.autograd.Function):
    """Doubles; its node holds one payload, and its weight's product another."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sink: DeferredSink, graph: Any, late: Any
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


def held(part_of: list[Subgraph], sink: DeferredSink, weight: Tensor) -> tuple[Any, Any]:
    """Make a part and run it; returns what its graph and its product hold, weakly."""
    graph, late = Payload(), Payload()
    part = Subgraph(lambda x: (Holds.apply(x, weight, sink, graph, late),))  # type: ignore[arg-type, return-value]
    part.forward(torch.ones(3, requires_grad=True))
    part._function = tuple  # type: ignore[assignment]
    part_of.append(part)
    return weakref.ref(graph), weakref.ref(late)


def test_inputs_gradient_frees_the_graph_and_the_queue_keeps_what_weights_need() -> None:
    sink, weight, parts = DeferredSink(), torch.zeros(1, 1, requires_grad=True), list[Subgraph]()
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
