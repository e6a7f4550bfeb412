"""Adapters in layouts: as one rank, each expert's and each slice's among them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase, micro_batch_count
from moefold.proof.subjects import SUBJECTS
from moefold.proof.verify import prove
from moefold.spec.tuning import adapt
from moefold.training.config import Lora
from moefold.training.model_checkpoint import StoredModel
from moefold.training.trainer import Trainer
from tests.gloo.offloading import ELSEWHERE
from tests.gloo.test_checkpoint_jobs import in_ranks, quick

__all__ = ["quick"]
LORA = Lora(rank=4, targets=("all", "router", "head"))
DROPPED = LORA.model_copy(update={"dropout": 0.3})
MANY = (
    *(("gqa", sizes, 2, {}) for sizes in ("tp2", "cp2", "ep2")),
    ("mla", "tp2", 2, {"zero": 3}),
    ("mla", "pp2 ep2", 4, {"zero": 3, "schedule": {"kind": "zb_h1"}}),
    ("deep", "pp2 vpp2", 2, {"schedule": {"kind": "zb_v"}}),
    ("deep", "pp2 vpp2 ep2", 4, {"schedule": {"kind": "dualpipe_v"}}),
    ("gqa", "tp2 cp2", 4, {"zero": 1, "recompute": {"kind": "full"}}),
    ("gqa", "tp2 ep2 etp2", 4, {"zero": 3}),
)


def case(name: str, sizes: str, world: int, layout: dict[str, Any], lora: Lora = LORA) -> ProofCase:
    record = Layout(sizes=sizes, **layout)
    described = adapt(SUBJECTS[name].decoder, lora)
    changed = {
        "decoder": described,
        "micro_batches": micro_batch_count(record, world),
        "masked": True,
    }
    subject = replace(SUBJECTS[name], **changed)
    return ProofCase(f"{name}: {sizes or 'dp'} {layout}", subject, record, world)


def failed(cases: list[ProofCase]) -> dict[str, Any]:
    """Return what is wrong by layout."""
    found = prove(cases).verdicts
    return {v.layout: (v.problems, v.worst) for v in found if not v.passed}


def test_layouts_with_adapters_compute_what_one_rank_computes() -> None:
    assert not failed([case("gqa", "tp2 etp2", 2, {})])


def test_ranks_leave_the_same_features_out() -> None:
    cases = [case("gqa", sizes, 2, {}, DROPPED) for sizes in ("tp2 etp2", "cp2 ep2")]
    assert not failed(cases)


def test_adapters_of_experts_of_all_ranks_are_saved(quick: Path) -> None:
    def work(job: Trainer) -> None:
        job.step()
        found = [(one.name, one.box, one.tensor.clone()) for one in job.state.weights()]
        torch.save(found, quick / f"{job.world.rank}.pt")
        job.save()

    assert in_ranks(quick, "out", "ep2", 2, work, {"kind": "lora", "rank": 2}) == [0, 0]
    with StoredModel.open(quick / "out") as stored:
        for name, box, values in (one for rank in "01" for one in torch.load(quick / f"{rank}.pt")):
            whole = stored.tensors.stored(name)
            assert torch.equal(whole[tuple(slice(*ends) for ends in box)], values), name
        a = stored.tensors.stored("layers.0.moe.experts.w_in_lora_b")
        assert a.flatten(1).any(1).all()


@pytest.mark.matrix
def test_adapters_in_every_kind_of_layout() -> None:
    assert not failed([case(*one, lora) for one in MANY for lora in (LORA, DROPPED)])


@pytest.mark.matrix
def test_adapters_where_rows_and_state_lie_elsewhere() -> None:
    assert not failed([case(*one, lora) for one in ELSEWHERE for lora in (LORA, DROPPED)])
