"""What graphs of blocks' parts read and leave, planned and counted where tensors have no values."""

from dataclasses import replace
from itertools import chain
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from moefold.data.batch import ROW_TENSORS, MicroBatch
from moefold.layers.config import Full, Offload, OffloadToPages
from moefold.moe.dispatch.config import Clones, Padded, Spread
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline import recording
from moefold.parallel.pipeline.graphs import build_executor
from moefold.parallel.pipeline.recording import Graph
from moefold.planner.case import Case
from moefold.planner.hardware import parse_cluster
from moefold.planner.memory import stage_bytes
from moefold.planner.task import TrainingTask
from moefold.proof import capture
from moefold.proof.case import ProofCase, Subject, micro_batch_count
from moefold.proof.rank_run import micro_batches
from moefold.proof.subjects import SUBJECTS

PADDED, SPREAD = Padded(max_rows=64), Spread(max_rows=150)
PAGES = Offload(pages=OffloadToPages(page=8, load=4))
FEW: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("gqa", 4, {"sizes": "tp2 ep4", "dispatch": PADDED}),
    ("mla", 2, {"sizes": "ep2", "dispatch": PADDED, "graph_experts": False}),
)
MORE: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("gqa", 1, {}),
    ("gqa", 2, {"sizes": "tp2", "recompute": Full()}),
    ("mla", 4, {"sizes": "ep4", "dispatch": SPREAD, "recompute": Full()}),
    ("mla", 8, {"sizes": "cp2 ep2 etp2", "dispatch": PADDED}),
    ("gqa", 4, {"sizes": "ep4", "dispatch": SPREAD, "clones": Clones(slots=1)}),
    ("deep", 4, {"sizes": "pp2 ep2", "dispatch": PADDED, "schedule": "zb_h1"}),
    ("deep", 4, {"sizes": "pp2 ep2", "dispatch": SPREAD, "schedule": "merged"}),
    ("deep", 2, {"sizes": "pp2 vpp2", "schedule": "interleaved", "recompute": Full()}),
    ("deep", 4, {"sizes": "pp2 vpp2", "schedule": "zb_v"}),
    ("gqa", 4, {"sizes": "ep4", "dispatch": PADDED, "offload": PAGES}),
    (
        "mla",
        4,
        {"sizes": "ep4", "dispatch": PADDED, "clones": Clones(slots=1), "recompute": Full()},
    ),
)


class Recorder:
    """Records nothing, and lets go of what is made, as a pool does."""

    def __call__(self, function: Any) -> tuple[Graph, Any]:
        """Run a function; what a graph would hold has run."""
        return lambda: None, function()


def alike(subject: Subject) -> list[MicroBatch]:
    """Return micro-batches of one shape."""
    return micro_batches(subject)[:1] * subject.micro_batches


def counted(case: ProofCase) -> list[tuple[float, float]]:
    """Return each stage's bytes that graphs of its passes read and leave after a step, and those of
    gradients without padding: whole ones, and shares of their sums."""
    found: list[tuple[float, float]] = []

    def execute(data: ShardedState, *given: Any) -> Any:
        run: Any = build_executor(data, Recorder)
        data.parts.model.precision_policy.in_place_copies = (
            False  # no tensor without values is another's memory
        )
        left = run(*given)
        storages: dict[int, Any] = {}
        for one in run.graphs.passes:
            pairs = ((one.flow.rows, one.flow.piece), *one.flow.shifted_rows)
            rows = [getattr(x, name) for pair in pairs for x in pair if x for name in ROW_TENSORS]
            held = [(*x.static_inputs, *x.static_outputs) for x in one._parts.values()]
            tensors = [x for x in (*rows, *chain(*held)) if isinstance(x, Tensor)]
            storages.update((x.untyped_storage()._cdata, x.untyped_storage()) for x in tensors)
        sums = 4 * sum(one.numel() for one in data.parts.model.parameters())
        for bucket in data.buckets:
            bucket.wait_reduce()
            assert bucket.summed_L is not None and bucket._freed_gradients is not None
            whole, share = (
                one.untyped_storage()._cdata for one in (bucket._freed_gradients, bucket.summed_L)
            )
            sums += bucket.summed_L.nbytes * (whole != share)
        found.append((sum(storage.nbytes() for storage in storages.values()), sums))
        return left

    states: list[ShardedState] = []

    def state(parts: Any) -> ShardedState:
        states.append(ShardedState(parts))
        return states[-1]

    with (
        mock.patch.object(recording, "WARMUP_STEPS", 0),
        mock.patch.object(Tensor, "data_ptr", lambda one: one.untyped_storage()._cdata),
        mock.patch.object(capture, "ShardedState", state),
        mock.patch.object(capture, "micro_batches", alike),
        mock.patch.object(capture, "run_step", lambda *given: execute(states[-1], *given)),
    ):
        assert not capture.find_capture_blockers(case).failed_at
    return found


def planned(case: ProofCase, subject: Subject) -> Case:
    """Return the planner's case of the same step."""
    where, dp = parse_cluster(f"h100x{case.world}"), case.folding.dp
    task = TrainingTask("", subject.decoder, subject.rows, subject.micro_batches // dp * dp, where)
    return task.case(case.layout)


def check(model: str, ranks: int, given: dict[str, Any]) -> None:
    """Hold what is planned to what is counted, to the byte."""
    layout = Layout(experts="grouped", graphs="partial", **given)
    subject = replace(
        SUBJECTS[model], precision="bf16", micro_batches=micro_batch_count(layout, ranks)
    )
    subject = replace(subject, padding=0)
    case = ProofCase("", subject, layout, ranks)
    stages = range(layout.split.pp)
    states = [stage_bytes(planned(case, subject), rank).state for rank in stages]
    plan, found = [(one.graphs, one.gradients) for one in states], counted(case)
    print(model, given, plan, found)
    assert plan == found and min(static for static, _ in found) > 0


@pytest.mark.parametrize(("model", "ranks", "given"), FEW, ids=str)
def test_what_graphs_hold_is_planned(model: str, ranks: int, given: dict[str, Any]) -> None:
    check(model, ranks, given)


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks", "given"), MORE, ids=str)
def test_what_graphs_hold_is_planned_in_more_layouts(
    model: str, ranks: int, given: dict[str, Any]
) -> None:
    check(model, ranks, given)
