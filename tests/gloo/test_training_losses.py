"""Losses beside cross-entropy in layouts: as on one rank, answers that context ranks share too."""

from dataclasses import replace
from typing import Any

import pytest

from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase, micro_batch_count
from moefold.proof.subjects import SUBJECTS
from moefold.proof.verify import prove
from moefold.spec.tuning import adapt
from moefold.training.config import Lora
from moefold.training.losses.config import Distill, Dpo

LORA = Lora(rank=4, targets=("all", "head"))
LOSSES = {
    "dpo": Dpo(beta=0.5),
    "ipo": Dpo(form="ipo"),
    "stored": Dpo(reference="stored"),
    "distill": Distill(teacher="", temperature=2.0),
    "top_k": Distill(teacher="", temperature=2.0, stored=""),
}
MANY = (
    *(("dpo", sizes, 2, {}) for sizes in ("tp2", "cp2", "pp2", "ep2")),
    *(("distill", sizes, 2, {"zero": 3}) for sizes in ("tp2", "cp2", "pp2", "ep2")),
    ("ipo", "cp4", 4, {"context": {"kind": "all_gather"}}),
    ("ipo", "tp2 cp2", 4, {"zero": 3}),
    ("stored", "pp2 cp2", 4, {}),
    ("distill", "tp2 cp2", 4, {}),
    ("top_k", "tp2 cp2", 4, {"zero": 3}),
    ("top_k", "pp2 ep2", 4, {}),
    ("dpo", "pp2 vpp2 ep2", 4, {"schedule": {"kind": "dualpipe_v"}}),
    ("distill", "pp2 vpp2 ep2", 4, {"schedule": {"kind": "dualpipe_v"}, "zero": 3}),
    ("dpo", "tp2 ep2 etp2", 4, {"zero": 3}),
)


def case(loss: str, sizes: str, world: int, layout: dict[str, Any]) -> ProofCase:
    record = Layout(sizes=sizes, **layout)
    deep = "deep" if "vpp" in sizes else "gqa"
    decoder = SUBJECTS[deep].decoder
    decoder = decoder if loss in ("stored", "distill", "top_k") else adapt(decoder, LORA)
    changed = {"decoder": decoder, "loss": LOSSES[loss], "masked": True}
    subject = replace(SUBJECTS[deep], micro_batches=micro_batch_count(record, world), **changed)
    return ProofCase(f"{loss}: {sizes} {layout}", subject, record, world)


def with_vocabulary(made: ProofCase, vocab: int) -> ProofCase:
    decoder = made.subject.decoder.model_copy(update={"vocab": vocab})
    return replace(made, subject=replace(made.subject, decoder=decoder))


def failed(cases: list[ProofCase]) -> dict[str, Any]:
    """Return what is wrong by layout."""
    found = prove(cases).verdicts
    return {v.layout: (v.problems, v.worst) for v in found if not v.passed}


def test_pairs_and_teachers_on_context_ranks_are_those_of_one_rank() -> None:
    cases = [case("ipo", "cp2", 2, {}), case("distill", "cp2", 2, {})]
    assert not failed(cases)


def test_pairs_and_teachers_where_ranks_share_the_vocabulary() -> None:
    assert not failed([case(loss, "tp2", 2, {}) for loss in ("dpo", "distill", "top_k")])


def test_pairs_and_teachers_where_ranks_have_different_numbers_of_tokens() -> None:
    """With seven tokens, one of four ranks has fewer than the two of a teacher that are kept."""
    cases = [with_vocabulary(case("dpo", "tp2", 2, {}), 67)]
    cases += [with_vocabulary(case(loss, "tp4", 4, {}), 7) for loss in ("distill", "top_k")]
    assert not failed(cases)


@pytest.mark.matrix
def test_losses_in_every_kind_of_layout() -> None:
    assert not failed([case(*one) for one in MANY])
