"""Sources that continue where they stopped, compared with a plain list of every token read."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.data.order import Given, OrderStart, match_given
from moefold.data.packing import ChunkedSequences, PackedSequences, TrainSequences

QUICK = settings(max_examples=120, deadline=None, database=None)
LEGS = st.lists(st.tuples(st.integers(2, 13), st.integers(0, 40), st.integers(1, 2)), max_size=5)
"""Per leg: tokens per sequence, sequences read, seed."""


def text(tokens: int) -> Any:
    """A corpus of text whose pieces are the numbers of their tokens."""

    def piece(start: int, rows: int) -> Iterator[list[int]]:
        yield [(start + i) % tokens for i in range(rows)]

    return SimpleNamespace(n_tokens=tokens, slice=piece)


def chat(lengths: list[int]) -> Any:
    """A corpus of conversations whose pieces are the numbers of their tokens."""
    starts = np.cumsum([0, *lengths])

    def pieces(i: int) -> Iterator[list[int]]:
        yield list(range(starts[i], starts[i + 1]))

    return SimpleNamespace(n_tokens=sum(lengths), lengths=np.array(lengths), pieces=pieces)


def read_legs(
    kind: type[TrainSequences], corpus: Any, legs: list[tuple[int, int, int]]
) -> Iterator[tuple[int, list[int], int]]:
    """Yield (epoch, tokens, tokens that are read for the first time but said to be repeated)."""
    state: Given | None = None
    seen, by_epoch = Counter[int](), Counter[int]()
    for seq, count, seed in legs:
        sequences: Any = kind(corpus, seed, "name", seq, state)  # type: ignore[arg-type]
        again = 0
        for n in range(count):
            tokens = [token for piece in sequences.train_sequence(n) for token in piece]
            again += sum(token in seen for token in tokens)
            seen.update(tokens)
            assert len(tokens) == sequences.count_tokens(n, n + 1)
            by_epoch[sequences.given_after(n).epoch] += len(tokens)
            yield sequences.given_after(n).epoch, tokens, sequences.again(n + 1) - again
        state = Given.from_dict(sequences.given_after(count).to_dict())
        assert sequences.place(count) == (state.epoch, by_epoch[state.epoch])


def check_epochs(reads: list[tuple[int, list[int], int]], size: Any) -> None:
    """Each epoch has every token at most once, and is complete before the next begins."""
    epochs = [epoch for epoch, _, _ in reads]
    assert epochs == sorted(epochs)
    for epoch in dict.fromkeys(epochs):
        tokens = [token for at, read, _ in reads if at == epoch for token in read]
        assert len(set(tokens)) == len(tokens), "a token is repeated before its source is used up"
        if epoch != epochs[-1]:
            assert len(tokens) in size, "a token is skipped"


@QUICK
@given(st.integers(13, 90), LEGS)
def test_text_continues_at_any_length_and_seed(tokens: int, legs: list) -> None:
    reads = list(read_legs(ChunkedSequences, text(tokens), legs))
    check_epochs(reads, {tokens // seq * seq for seq, _, _ in legs})
    # What the first epoch leaves out counts as repeated when a later one reads it.
    first = next((seq for seq, count, _ in legs if count), 2)
    assert all(0 <= excess <= tokens % first for _, _, excess in reads)


@settings(QUICK, max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=4, max_size=30), LEGS)
def test_conversations_continue_at_any_length_and_seed(lengths: list[int], legs: list) -> None:
    legs = [(max(seq, 4), count, seed) for seq, count, seed in legs]
    reads = list(read_legs(PackedSequences, chat(lengths), legs))
    check_epochs(reads, {sum(lengths)})
    assert all(excess == 0 for _, _, excess in reads)


@pytest.mark.parametrize("kind", [ChunkedSequences, PackedSequences])
def test_a_stop_changes_nothing_where_nothing_is_changed(kind: Any) -> None:
    """The order after any number of stops is the order of one run, to the token."""
    corpus = text(70) if kind is ChunkedSequences else chat([3, 1, 4, 1, 5, 2, 6, 5, 3, 5])
    unbroken = [read for _, read, _ in read_legs(kind, corpus, [(6, 60, 3)])]
    for parts in ([10, 50], [1] * 60, [11, 0, 1, 23, 25]):
        stopped = read_legs(kind, corpus, [(6, count, 3) for count in parts])
        assert [read for _, read, _ in stopped] == unbroken


def test_an_epoch_in_progress_keeps_its_seed_and_name() -> None:
    """A new seed orders the next epoch; what is left of this one was drawn already."""
    corpus = text(60)
    begun = ChunkedSequences(corpus, 1, "old", 6).given_after(4)
    renamed = ChunkedSequences(corpus, 2, "new", 6, begun)
    fresh = ChunkedSequences(corpus, 2, "new", 6, Given("new", "", 2, ((6, 0),), epoch=1))
    old = ChunkedSequences(corpus, 1, "old", 6)
    assert [list(renamed.train_sequence(n)) for n in range(6)] == [
        list(old.train_sequence(n)) for n in range(4, 10)
    ]
    assert [list(renamed.train_sequence(6 + n)) for n in range(10)] == [
        list(fresh.train_sequence(n)) for n in range(10)
    ]


def test_a_source_that_has_given_nothing_of_an_epoch_begins_it_anew() -> None:
    """Nothing ties it to the length and seed that it would have had."""
    begun = ChunkedSequences(text(60), 1, "name", 6).given_after(10)
    assert begun == Given("name", "", 1, ((6, 0),), epoch=1)
    later = ChunkedSequences(text(60), 2, "name", 20, begun)
    assert later.n_left == later.n_sequences == 3 and later.given.cuts == ((20, 0),)


def test_sources_are_recognised_by_their_tokens() -> None:
    web, code, twin = (Given(name, digest, 1, ((8, n),)) for name, digest, n in
                       (("web", "x", 1), ("code", "y", 2), ("twin", "x", 3)))  # fmt: skip
    matched, left = match_given([web, code, twin], [("twin", "x"), ("renamed", "y"), ("new", "z")])
    assert matched == [twin, code, None] and left == [web]
    matched, left = match_given([web, twin], [("a", "x"), ("b", "x")])
    assert matched == [web, twin] and not left


def test_an_order_is_read_as_it_was_written() -> None:
    one = Given("web", "x", 7, ((8, 3), (16, 2)), 4)
    assert Given.from_dict(one.to_dict()) == one
    start = {"first": 9, "given": [one.to_dict()]}
    assert OrderStart.from_dict(start) == OrderStart(9, (one,))
