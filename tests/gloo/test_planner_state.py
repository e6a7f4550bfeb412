"""Bytes of masters and moments on the device, the host and disk: the planner's, to the byte."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moefold.comm.world import World
from moefold.config.base import to_dict
from moefold.mesh.folding import Folding
from moefold.optim.adamw import AdamWOptimizer
from moefold.optim.muon import MuonOptimizer
from moefold.parallel.config import StatePlacement
from moefold.planner.case import NumberFormats, Recipe
from moefold.planner.hardware import Cluster, cpu_device
from moefold.planner.memory import StageMemory, estimate_memory
from moefold.planner.task import TrainingTask
from moefold.run import load_run
from moefold.training.memory import resolve_recompute
from moefold.training.step import gradients
from tests.cpu.checkpoint_tools import quick_folder
from tests.gloo.harness import run_ranks
from tests.gloo.offloading import BY_HOST, PLACES, Trip
from tests.gloo.shares import CHUNK, DECODERS, OPTIMIZERS, Case, opened, own, update

RANKS = 2
CASES = tuple(
    (Case(zero=zero, optim=optim), precision, place)
    for zero, optim, precision in (
        (0, "adamw", "bf16"), (0, "adamw fp8", "bf16"), (1, "muon", "bf16"), (2, "adamw", "fp32"),
        (3, "adamw", "bf16"),
    )
    for place in (*PLACES, *(BY_HOST if optim == "adamw" else ()))
)  # fmt: skip
Kind = tuple[Case, Recipe, StatePlacement]


def looked(case: Case, precision: Any) -> dict[str, int]:
    """Make a step; return what lies where after it, and the most that came for the update."""
    data = opened(case, RANKS, precision)
    optimizer, offload = data.optimizer(OPTIMIZERS[case.optim]), data.offload
    assert offload is not None
    runs = [bucket.master_L for bucket in data.buckets]
    moments, most = data._moments, 0

    def there(tensors: list[torch.Tensor]) -> int:
        return sum(t.untyped_storage().nbytes() for t in tensors)

    steps = [kind.step for kind in (AdamWOptimizer, MuonOptimizer)]

    def noted(self: Any, *given: Any) -> None:
        nonlocal most
        most = max(most, there(runs) + there(moments))
        steps[isinstance(self, MuonOptimizer)](self, *given)

    found = gradients(data, own(case, data), CHUNK)
    with (
        mock.patch.object(AdamWOptimizer, "step", noted),
        mock.patch.object(MuonOptimizer, "step", noted),
    ):
        update(data, optimizer, found.grad_norm)
    return {
        "master": sum(r.nbytes for r, b in zip(runs, data.buckets, strict=True) if b.offloaded),
        "moments": sum(m.nbytes for m in moments),
        "on device": 0 if offload.updates_on_host else there(runs) + there(moments),
        "came": most,
        "host": offload.pool.bytes,
        "disk": offload.file.bytes if offload.file else 0,
        "weights": sum(bucket.values.nbytes for bucket in data.buckets),
        "padding": sum(bucket.values.numel() for bucket in data.buckets)
        - sum(p.numel() for p in data.parts.model.parameters()),
    }


def looks(rank: int, folder: str) -> list[dict[str, int]]:
    """Look at all cases."""
    found = []
    for case, precision, place in CASES:
        trip = Trip(case, case, precision).put(place, Path(folder))
        found.append(looked(trip.first, precision))
    return found


@cache
def seen() -> list[list[dict[str, int]]]:
    """Return what each rank saw."""
    with quick_folder(Path("/tmp")) as folder:
        return run_ranks(looks, RANKS, str(folder), time_out_s=120)


def planned(case: Case, precision: Recipe, place: StatePlacement) -> StageMemory:
    """Return what the planner says of a case."""
    record, device = DECODERS[case.model], cpu_device(1e11, 1e10, 2**34)
    numbers = NumberFormats(precision, OPTIMIZERS[case.optim])
    cluster = Cluster(device, RANKS, RANKS, RANKS)
    task = TrainingTask("state", record, 24, 4 * RANKS, cluster, numbers)
    layout = case.layout.model_copy(update={"state": place})
    (found,) = estimate_memory(task.case(layout))
    return found


@pytest.mark.parametrize(("number", "kind"), [*enumerate(CASES)], ids=str)
def test_what_lies_where_is_what_the_planner_says(number: int, kind: Kind) -> None:
    case, _, place = kind
    said = planned(*kind)
    ranks = [rank[number] for rank in seen()]
    tier = place.at
    assert {name.split()[-1] for name in said.offloaded_state} == {tier}
    for rank in ranks:
        padding = 4 * rank["padding"]
        other = {"host": "disk", "disk": "host"}[tier]
        assert rank[tier] == rank["master"] + rank["moments"]
        assert rank[other] == 0
        assert rank["on device"] == (0 if place.share == 1 else rank["on device"])
        if place.share == 1:
            assert 0 <= rank["master"] - said.state.offloaded_master <= padding
            assert said.state.master == said.state.moments == 0
            if case.zero < 3:
                assert 0 <= rank["weights"] - said.state.weights <= padding
            if place.step == "device":
                came = said.actions[-1].temporaries
                assert 0 <= came + padding - rank["came"] <= 2 * padding
    moments = sum(rank["moments"] for rank in ranks)
    if place.share == 1:
        assert moments == pytest.approx(RANKS * said.state.offloaded_moments)


def settled(rank: int) -> dict[str, Any]:
    """Return the layout in which a rank runs what asks for ``auto`` recompute."""
    auto = "layout.recompute={kind: auto, host: true}"
    run = load_run("tiny", ["layout.sizes=ep2", auto])
    world = World.open(Folding(run.layout.split, RANKS), "cpu", 60)
    return to_dict(resolve_recompute(run, world).layout)


def test_ranks_agree_on_what_auto_recomputes() -> None:
    """The first rank decides, and the others are told: a run of several ranks could not begin."""
    one, other = run_ranks(settled, RANKS)
    run = load_run("tiny", ["layout.sizes=ep2"])
    assert one == other == to_dict(run.layout), "there is memory for all that it saves"
