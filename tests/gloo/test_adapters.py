"""Adapters in layouts: as one rank, each expert's and each slice's among them."""

from dataclasses import replace
from typing import Any

import pytest

from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase, enough
from moefold.proof.matrix import SUBJECTS
from moefold.proof.verify import prove
from moefold.spec.tuning import adapt
from moefold.training.config import Lora

LORA = Lora(rank=4, targets=("all", "router", "head"))
MANY = (
    *(("gqa", sizes, 2, {}) for sizes in ("tp2", "cp2", "ep2")),
    ("mla", "tp2", 2, {"zero": 3}),
    ("mla", "pp2 ep2", 4, {"zero": 3, "schedule": {"kind": "zb_h1"}}),
    ("deep", "pp2 vpp2", 2, {"schedule": {"kind": "zb_v"}}),
    ("deep", "pp2 vpp2 ep2", 4, {"schedule": {"kind": "dualpipe_v"}}),
    ("gqa", "tp2 cp2", 4, {"zero": 1, "recompute": {"kind": "full"}}),
    ("gqa", "tp2 ep2 etp2", 4, {"zero": 3}),
)


def case(name: str, sizes: str, world: int, layout: dict[str, Any]) -> ProofCase:
    record = Layout(sizes=sizes, **layout)
    described = adapt(SUBJECTS[name].decoder, LORA)
    subject = replace(SUBJECTS[name], decoder=described, micro_batches=enough(record, world))
    return ProofCase(f"{name}: {sizes or 'dp'} {layout}", subject, record, world)


def failed(cases: list[ProofCase]) -> dict[str, Any]:
    """Return what is wrong by layout."""
    found = prove(cases).verdicts
    return {v.layout: (v.problems, v.worst) for v in found if not v.passed}


def test_b61_layouts_with_adapters_compute_what_one_rank_computes() -> None:
    assert not failed([case("gqa", "tp2 etp2", 2, {})])


@pytest.mark.matrix
def test_adapters_in_every_kind_of_layout() -> None:
    assert not failed([case(*one) for one in MANY])
