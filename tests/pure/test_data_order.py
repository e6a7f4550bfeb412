"""The order of sequences: arithmetic that can be asked for any number."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.data.order import Epochs, Mixture, evenly_spaced, permuted_index, stable_hash

QUICK = settings(max_examples=60, deadline=None, database=None)


@QUICK
@given(st.integers(1, 400), st.integers(0, 2**64 - 1))
def test_shuffled_is_a_permutation(n: int, key: int) -> None:
    assert sorted(permuted_index(i, n, key) for i in range(n)) == list(range(n))


def test_shuffled_depends_on_the_key_and_leaves_little_in_place() -> None:
    one, two = ([permuted_index(i, 1000, key) for i in range(1000)] for key in (1, 2))
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 20
    assert sum(a == i for i, a in enumerate(one)) < 20
    # Neighbours are drawn apart: a step of one is as rare as in a random order.
    assert sum(b - a == 1 for a, b in pairwise(one)) < 20


def test_every_place_is_equally_likely() -> None:
    n, keys = 7, 7000
    counts = [[0] * n for _ in range(n)]
    for key in range(keys):
        for i in range(n):
            counts[i][permuted_index(i, n, key)] += 1
    expected = keys / n
    chi = sum((c - expected) ** 2 / expected for row in counts for c in row)
    assert chi < 80, chi  # 36 degrees of freedom: 80 is beyond one in ten thousand


def test_huge_orders_need_no_table() -> None:
    n = 10**15
    assert len({permuted_index(i, n, 5) for i in range(2000)}) == 2000


def test_the_order_never_changes_between_versions() -> None:
    """Resuming an old run must find the old order: these numbers may never change."""
    assert stable_hash("epoch", 1, "python_stdlib", 0) == 8031562490594936319
    assert [permuted_index(i, 10, 42) for i in range(10)] == [4, 8, 3, 2, 9, 5, 1, 7, 0, 6]
    epochs = Epochs(seed=1, name="python_stdlib", tokens=1000, seq=100)
    assert [epochs.start_row(n) for n in range(3)] == [82, 882, 182]
    mixture = Mixture((0.7, 0.2, 0.1))
    assert [mixture.pick(k)[0] for k in range(10)] == [0, 1, 0, 0, 0, 2, 0, 0, 1, 0]


WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5).map(tuple)


@QUICK
@given(WEIGHTS, st.integers(0, 500))
def test_a_mixture_gives_each_source_its_share_in_order(weights: tuple, k: int) -> None:
    mixture, given_so_far = Mixture(weights), [0] * len(weights)
    exact = [Fraction(repr(w)) for w in weights]
    for i in range(k):
        assert mixture.counts(i) == tuple(given_so_far)
        source, number = mixture.pick(i)
        assert number == given_so_far[source]
        given_so_far[source] += 1
        for count, weight in zip(given_so_far, exact, strict=True):
            assert abs(count - (i + 1) * weight / sum(exact)) < len(weights)


def test_a_mixture_is_exact_far_out() -> None:
    mixture = Mixture((0.1, 0.2, 0.7))
    assert mixture.counts(10**15) == (10**14, 2 * 10**14, 7 * 10**14)


@QUICK
@given(st.integers(0, 99), st.integers(1, 40), st.integers(0, 400))
def test_each_epoch_takes_whole_sequences_once(seed: int, seq: int, extra: int) -> None:
    tokens = seq + extra
    epochs = Epochs(seed, "x", tokens, seq)
    for epoch in range(3):
        first = epoch * epochs.n_sequences
        starts = [epochs.start_row(n) for n in range(first, first + epochs.n_sequences)]
        rows = [(s + i) % tokens for s in starts for i in range(seq)]
        assert len(set(rows)) == len(rows) == epochs.n_sequences * seq
        assert tokens - len(rows) < seq


def test_epochs_differ_in_order_and_in_where_they_are_cut() -> None:
    epochs = Epochs(1, "x", 10_007, 10)
    size = epochs.n_sequences
    first, second = ([epochs.start_row(n) for n in range(e * size, (e + 1) * size)] for e in (0, 1))
    assert {s % 10 for s in first[:3]} and sorted(first) != sorted(second)
    left_out = [
        set(range(10_007)) - {(s + i) % 10_007 for s in starts for i in range(10)}
        for starts in (first, second)
    ]
    assert len(left_out[0]) == 7 and left_out[0] != left_out[1]


@pytest.mark.parametrize(("n", "chosen"), [(10, 3), (10, 10), (10, 99), (1, 1), (1000, 999)])
def test_spread(n: int, chosen: int) -> None:
    found = list(evenly_spaced(n, chosen))
    assert len(found) == min(n, chosen) == len(set(found)) and found[0] == 0
    gaps = {b - a for a, b in pairwise(found)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
