"""Weight products in few bits, over every axis: as on one rank."""

import pytest

from moefold.layers.config import QUANTISE
from moefold.proof.case import ProofCase
from moefold.proof.matrix import matrix
from moefold.proof.verify import prove


def demand(cases: list[ProofCase]) -> None:
    proof = prove(cases)
    failed = {v.layout: (v.problems, v.worst) for v in proof.verdicts if not v.passed}
    assert cases and not failed


def chosen(*words: str) -> list[ProofCase]:
    """The cases whose names have all of these words."""
    return [case for case in matrix()["precisions"] if all(word in case.name for word in words)]


def test_b52_few_bits_compute_on_four_ranks_what_one_computes() -> None:
    """Latents of tensor ranks' own rows, backward in halves and again; and experts whose rows come
    from ranks that hold pieces of several micro-batches, with weights that come from others.

    Plants: old codes, amaxes of one rank, rows as they come, blocks across micro-batches, and
    chance by what is here.
    """
    demand(chosen("nvfp4 mla", "zb_h1") + chosen("nvfp4 gqa", "cp2 ep2 etp2", "zero 3"))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [*QUANTISE.kinds, "wgrad wide", "published"])
def test_every_kind_in_every_layout_that_is_open_to_it(kind: str) -> None:
    """A third of them; ``moefold verify --matrix precisions`` has all."""
    demand([case for case in matrix()["precisions"] if case.name.startswith(kind)][::3])
