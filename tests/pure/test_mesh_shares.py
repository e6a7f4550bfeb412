"""How ranks divide things among them that their number need not divide."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from moefold.mesh.shares import largest_share, share
from moefold.proof.subjects import DENSE, GQA, SHARED, decoder
from moefold.spec.decoder import model_needs
from moefold.spec.layer import Units, Weight

NUMBERS = st.integers(1, 10_000)


@given(NUMBERS, st.integers(1, 64))
def test_shares_are_a_partition_in_order_and_differ_by_at_most_one(number: int, ranks: int) -> None:
    shares = [share(number, ranks, index) for index in range(ranks)]
    ends = [end for _, end in shares]
    assert [start for start, _ in shares] == [0, *ends[:-1]]
    assert ends[-1] == number
    lengths = [end - start for start, end in shares]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == largest_share(number, ranks) <= lengths[-1] + 1


@given(NUMBERS, st.integers(1, 64))
def test_an_uneven_weight_is_planned_as_on_the_fullest_rank(vocab: int, tp: int) -> None:
    units = Units("tp", vocab, "the vocabulary size", uneven=True)
    weight = Weight("embed.weight", (vocab, 48), ((0, units),))
    rows = math.ceil(Fraction(vocab, tp))
    assert weight.local_elements(tp, 1, 1) == rows * 48
    assert weight.local_matrix(tp, 1, 1) == (rows, 48, 1.0)
    assert units.allows(tp) == (tp <= vocab)


def test_a_vocabulary_never_restricts_tp_but_to_its_size() -> None:
    needs = model_needs(decoder(GQA, DENSE, SHARED, vocab=3))
    assert needs.legal_sizes("tp") == [1, 2]
