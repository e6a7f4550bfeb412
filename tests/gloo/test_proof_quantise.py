"""Weight products in few bits, in layouts that cut neither blocks nor rows: as on one rank."""

from dataclasses import replace

import pytest

from moefold.layers.config import Fp8Block, Fp8Tensor, Full, Mxfp8, Nvfp4, Quantise, Selective
from moefold.parallel.config import Layout
from moefold.proof.case import ProofCase, enough
from moefold.proof.matrix import SUBJECTS
from moefold.proof.verify import prove
from moefold.schedule.config import ZeroBubbleH1

KINDS = (
    Nvfp4(block=4),
    Mxfp8(block=4),
    Fp8Block(block=4),
    Fp8Tensor(),
    Mxfp8(block=4, scales="floor", wgrad="wide"),
)
LAYOUTS: tuple[dict, ...] = (
    {"sizes": "pp2", "schedule": ZeroBubbleH1(), "recompute": Full()},
    {"zero": 3, "recompute": Selective(modules=("experts", "norms"))},
    {"zero": 1},
    {"zero": 2, "recompute": Selective(modules=("ffn", "shared"))},
    {"zero": 0},
)


def case(kind: Quantise, name: str, **layout: object) -> ProofCase:
    record = Layout(**layout)  # type: ignore[arg-type]
    subject = SUBJECTS[name]
    decoder = subject.decoder.model_copy(update={"quantise": kind})
    subject = replace(subject, decoder=decoder, micro_batches=enough(record, 2))
    return ProofCase(f"{kind.kind} {name} {record.sizes or 'dp2'}", subject, record, 2)


def demand(cases: list[ProofCase]) -> None:
    proof = prove(cases)
    failed = {v.layout: (v.problems, v.worst) for v in proof.verdicts if not v.passed}
    assert not failed


def test_b52_few_bits_compute_on_two_ranks_what_one_computes() -> None:
    """Chance, split backward and recompute; weights that come from others. Plant: old codes."""
    demand([case(KINDS[0], "mla", **LAYOUTS[0]), case(KINDS[1], "gqa", **LAYOUTS[1])])


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gqa", "mla"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.kind} {kind.wgrad}")
def test_every_kind_in_every_layout_that_is_open_to_it(kind: Quantise, name: str) -> None:
    """Zero 0 to 3, a schedule that splits backward, recompute of each sort."""
    demand([case(kind, name, **one) for one in LAYOUTS])
