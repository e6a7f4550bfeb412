"""Weight products in few bits, over every axis: as on one rank.

``moefold verify --matrix precisions optimizers`` has every kind in every layout that is open to it.
"""

import pytest

from moefold.proof.case import ProofCase
from moefold.proof.matrix import matrix
from moefold.proof.verify import prove


def demand(cases: list[ProofCase]) -> None:
    proof = prove(cases)
    failed = {v.layout: (v.problems, v.worst) for v in proof.verdicts if not v.passed}
    assert cases and not failed


def chosen(*words: str) -> list[ProofCase]:
    """The cases whose names have all of these words."""
    found = [case for case in matrix()["precisions"] if all(word in case.name for word in words)]
    assert found, f"no case is {words}"
    return found


@pytest.mark.slow
def test_few_bits_compute_on_four_ranks_what_one_computes() -> None:
    """Latents of tensor ranks' own rows, backward in halves and again; experts whose rows come
    from ranks that hold pieces of several micro-batches, with weights that come from others; and
    moments of runs that cut groups.

    Plants: old codes, amaxes of one rank, rows as they come, blocks across micro-batches, chance
    by what is here, and scales of moments, or histories, that are each rank's own.
    """
    moments = [one for one in matrix()["optimizers"] if one.name == "moments cut: dp4 on 4, zero 1"]
    assert moments
    cases = moments + chosen("nvfp4 mla", "zb_h1") + chosen("nvfp4 gqa", "cp2 ep2 etp2", "zero 3")
    cases += chosen("delayed: tp2 cp2 ep2") + chosen("hidden codes mla: tp2 ep2 on 2")[:1]
    demand(cases + chosen("codes sent fp8_block gqa", "alltoall", "ep2 etp2")[:1])
