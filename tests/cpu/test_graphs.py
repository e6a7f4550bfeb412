"""Steps by graphs, for which a tape of operators stands in: the bits of steps without."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moefold.comm.lone import lone_world
from moefold.data.batch import MicroBatch, from_ids
from moefold.layers.config import Full
from moefold.layers.kinds.dense import Dense
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.moe.config import Shared
from moefold.moe.layer import MoeFfn
from moefold.optim.config import AdamW
from moefold.parallel.apply import partition_model, single_rank_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline import recording
from moefold.parallel.pipeline.graphs import build_executor
from moefold.parallel.pipeline.partial import PartGraphs
from moefold.training.figures import StepFigures
from moefold.training.step import gradients
from tests.cpu.small import GQA, decoder, ids_of, model_of, moe
from tests.cpu.tape import Tapes

SHARED = moe(shared=Shared(width=16, gate=True))
BOTH = ["partial", pytest.param("step", marks=pytest.mark.matrix)]
PARTS = {"kind": "selective", "modules": ["norms", "attention", "experts"]}


class Run:
    """A small model and its steps, by graphs of some kind or without."""

    def __init__(self, graphs: str, precision: str = "fp32", **layout: Any) -> None:
        given = {"graphs": graphs, "experts": "grouped", **layout}
        self.layout = Layout.model_validate(given)
        model = model_of(decoder(GQA, Dense(width=24), SHARED), precision, experts="grouped")
        self.state = ShardedState(single_rank_parts(model, self.layout))
        self.optimizer = self.state.optimizer(AdamW(lr=0.01))
        self.executor = build_executor(self.state, Tapes)
        self.steps = 0

    def step(self, rows: int = 12, seed: int | None = None) -> StepFigures:
        """Make a step of two micro-batches of other tokens than the last."""
        self.steps += 1
        seed = self.steps if seed is None else seed
        given: list[MicroBatch] = [from_ids(ids_of(2, rows, seed=2 * seed + i)) for i in range(2)]
        figures = gradients(self.state, given, 16, executor=self.executor)
        self.optimizer.step(scale=0.5)
        self.state.refresh_weights()
        return figures

    @property
    def weights(self) -> dict[str, Tensor]:
        """All that is trained, as it is."""
        return {name: p.detach().clone() for name, p in self.state.params.items()}


def check(one: Run, other: Run, steps: int, rows: int = 12) -> None:
    """Hold steps of two runs to each other's bits."""
    for _ in range(steps):
        assert one.step(rows) == other.step(rows)
    wrong = [n for n, p in one.weights.items() if not torch.equal(p, other.weights[n])]
    assert not wrong


@pytest.mark.parametrize(
    ("graphs", "precision", "again"),
    [
        ("partial", "fp32", {"kind": "full"}),
        pytest.param("step", "bf16", None, marks=pytest.mark.matrix),
        pytest.param("partial", "fp32", PARTS, marks=pytest.mark.matrix),
        pytest.param("partial", "bf16", {"kind": "full"}, marks=pytest.mark.matrix),
        pytest.param("step", "fp32", {"kind": "full"}, marks=pytest.mark.matrix),
        pytest.param("step", "fp32", PARTS, marks=pytest.mark.matrix),
        pytest.param("partial", "bf16", None, marks=pytest.mark.matrix),
        pytest.param("partial", "bf16", PARTS, marks=pytest.mark.matrix),
    ],
)
def test_ten_steps_by_graphs_are_ten_steps(graphs: str, precision: str, again: Any) -> None:
    """Loss, norm, router terms and weights, to the bit, with other tokens in each."""
    found = Run(graphs, precision, recompute=again)
    Tapes.made = 0
    check(Run("none", precision, recompute=again), found, 10)
    # Of two blocks forward and backward, and what is made again once more.
    ways = 3 if found.layout.recompute == Full() else 2
    assert Tapes.made == (1 if graphs == "step" else 2 * ways)


def test_passes_in_flight_have_graphs_of_their_own() -> None:
    """Both micro-batches are forward before either goes back."""
    found = Run("partial", schedule="gpipe")
    check(Run("none", schedule="gpipe"), found, 5)
    assert len(found.executor.graphs.passes) == 2


@pytest.mark.parametrize("graphs", BOTH)
def test_shapes_have_graphs_of_their_own_and_few_have_any(graphs: str) -> None:
    """Three steps run as they are; shapes beyond the most, and back, run as they do."""
    plain, found = Run("none"), Run(graphs)
    made = []
    with mock.patch.object(recording, "MAX_SHAPES", 2):
        for rows in (4, 5, 6, 4):
            Tapes.made = 0
            check(plain, found, 3, rows)
            first = Tapes.made
            check(plain, found, 2, rows)
            made.append((first > 0, Tapes.made > first))
    assert made == [(False, True), (False, True), (False, False), (False, False)]


@pytest.mark.parametrize("graphs", ["step", pytest.param("partial", marks=pytest.mark.matrix)])
def test_weights_that_moved_are_read_where_they_are(graphs: str) -> None:
    plain, found = Run("none"), Run(graphs)
    check(plain, found, 5)
    for run in (plain, found):
        name = "layers.1.attention.q.weight"
        held = run.state.parts.model.get_parameter(name)
        held.data = held.data.clone() * 2
    Tapes.made = 0
    check(plain, found, 5)
    assert Tapes.made, "what was recorded before reads where the weight was"


def test_memory_that_is_larger_is_not_where_it_was() -> None:
    """Pages of another shape may begin where those of the last one did."""
    model, room_N, shapes = Run("none").state.parts.model, torch.zeros(8), recording.ShapeTracker()
    stash = SimpleNamespace(tensors=[room_N[:4]])
    parts: Any = SimpleNamespace(model=model, offload=SimpleNamespace(stash=stash))
    assert shapes.weights_moved(parts) and not shapes.weights_moved(parts)
    stash.tensors = [room_N]
    assert shapes.weights_moved(parts)


@pytest.mark.parametrize("graphs", BOTH)
def test_a_read_is_refused_with_its_line(graphs: str) -> None:
    run, real = Run(graphs), MoeFfn.route

    def route(layer: MoeFfn, rows: Any, flow: Any) -> Any:
        assert float(rows.x_TD.detach().sum()) < 1e9
        return real(layer, rows, flow)

    with mock.patch.object(MoeFfn, "route", route):
        for _ in range(recording.WARMUP_STEPS):
            run.step()
        with pytest.raises(RuntimeError, match=r"capturing.*__float__.*test_graphs.py"):
            run.step()


@pytest.mark.parametrize(("zero", "summed"), [(0, True), (1, False)])
def test_gradients_that_data_ranks_share_lie_in_buckets_alone(zero: int, summed: bool) -> None:
    layout = Layout(zero=zero, graphs="partial")
    with lone_world(Folding(Sizes(), 2), 0) as world:
        data = ShardedState(partition_model(model_of(decoder(GQA, SHARED)), layout, world))
        assert bool(PartGraphs(data, Tapes)._sums) == summed


def test_recording_waits_for_no_message_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stage may send it once it has what this one sends next, and records a graph too."""
    said: list[Any] = []

    class Recorded:
        def capture_begin(self, pool: Any = None, mode: str = "global") -> None:
            said.extend(["begin", pool, mode])

        def capture_end(self) -> None:
            said.append("end")

        def pool(self) -> str:
            return "memory"

        def replay(self) -> None: ...

    def waits() -> None:
        raise AssertionError("the host waits for the device")

    def run() -> None:
        said.append("run")
        if said.count("run") == 3:
            raise RuntimeError("a value is read")

    for name, stand_in in (
        ("CUDAGraph", Recorded),
        ("Stream", SimpleNamespace),
        ("stream", lambda stream: nullcontext()),
        ("synchronize", waits),
        ("empty_cache", waits),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(recording, "_recording_stream", SimpleNamespace, raising=False)
    record = recording.CudaGraphs()
    for _ in range(2):
        record(run)
    with pytest.raises(RuntimeError, match=r"a value is read\. Use graphs: none"):
        record(run)
    one = ["begin", "memory", "thread_local", "run", "end"]
    assert said == ["begin", None, *one[2:], *one, *one]
