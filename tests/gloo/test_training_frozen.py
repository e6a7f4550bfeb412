"""Frozen weights in layouts: as one rank, and whatever shares or pipelines the others."""

from dataclasses import replace
from typing import Any

import pytest

from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase, micro_batch_count
from moefold.proof.subjects import SUBJECTS
from moefold.proof.verify import prove
from moefold.spec.tuning import freeze
from tests.gloo.offloading import ELSEWHERE

FIRST = ("embed.weight", "*.router.*", "*.experts.*", "layers.0.*", "norm.weight")
LAST = ("layers.1.*", "head.weight", "*.q*")
FEW = (
    ("mla", "tp2", 2, {"zero": 3}),
    ("deep", "pp2 vpp2", 2, {"schedule": {"kind": "zb_v"}}),
)
MANY = (
    *(("mla", "", 2, {"zero": zero}) for zero in (1, 2, 3)),
    *(("gqa", sizes, 2, {}) for sizes in ("ep2", "etp2", "cp2")),
    ("tied deep", "pp2 vpp2", 2, {"schedule": {"kind": "dualpipe_v"}}),
    ("gqa", "pp2", 2, {"schedule": {"kind": "zb_h1"}}),
    ("gqa", "tp2 cp2", 4, {"zero": 2}),
    ("gqa", "tp2 ep2 etp2", 4, {"zero": 3, "recompute": {"kind": "full"}}),
    ("deep", "pp2 vpp2 ep2", 4, {"zero": 3, "schedule": {"kind": "dualpipe_v"}}),
)


def case(name: str, sizes: str, world: int, layout: dict[str, Any], frozen: Any) -> ProofCase:
    record = Layout(sizes=sizes, **layout)
    subject = SUBJECTS[name]
    described = freeze(subject.decoder, frozen)
    subject = replace(subject, decoder=described, micro_batches=micro_batch_count(record, world))
    return ProofCase(f"{name}: {sizes or 'dp'} {layout}", subject, record, world)


def failed(cases: list[ProofCase]) -> dict[str, Any]:
    """Return what is wrong by layout."""
    found = prove(cases).verdicts
    return {v.layout: (v.problems, v.worst) for v in found if not v.passed}


def test_layouts_with_frozen_weights_compute_what_one_rank_computes() -> None:
    assert not failed([case(*one, FIRST) for one in FEW])


@pytest.mark.matrix
@pytest.mark.parametrize("frozen", [FIRST, LAST], ids=["first", "last"])
def test_frozen_weights_in_every_kind_of_layout(frozen: tuple[str, ...]) -> None:
    assert not failed([case(*one, frozen) for one in (*FEW, *MANY, *ELSEWHERE)])
