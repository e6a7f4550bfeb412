"""The loader: a pure function of seed and step, whole documents, exact counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.load import load
from moefold.data.batch import IGNORE_INDEX, MicroBatch
from moefold.data.config import Data, DataError
from moefold.data.index import Corpus, IndexedDataset, IndexWriter
from moefold.data.loader import Loader
from moefold.data.prepare import PreparedData, PreparedPart, prepare

TENSORS = ("ids_T", "labels_T", "positions_T", "valid_T", "token_T")
WORDS = ("queue", "class", "return", "none", "ü", "when", "it", "is", "empty")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    folder, chance = tmp_path_factory.mktemp("data"), np.random.default_rng(3)
    for name, documents in (("a", 90), ("b", 40)):
        texts = [" ".join(chance.choice(WORDS, chance.integers(1, 40))) for _ in range(documents)]
        (folder / f"{name}.txt").write_text("|".join(texts), encoding="utf-8")
    sources = [
        {"source": "text", "name": n, "files": [f"{folder}/{n}.txt"], "split": "|", "weight": w}
        for n, w in (("a", 3.0), ("b", 1.0))
    ]
    sources[0]["holdout"] = 0.2
    raw: dict[str, Any] = {"seq": 8, "tokenizer": {"kind": "bpe", "vocab": 290}, "train": sources}
    return prepare(load(Data, raw).record, folder / "out")


def rows(batches: list[MicroBatch]) -> list[tuple]:
    """Valid rows as (global number, id, label, position, document, place), sorted by number."""
    found = []
    for batch in batches:
        at = 0
        for length, (name, document, start) in zip(batch.lengths, batch.sources, strict=True):
            for i in range(length):
                named = ("token_T", "ids_T", "labels_T", "positions_T")
                numbers = (int(getattr(batch, n)[at + i]) for n in named)
                found.append((*numbers, name, document, start + i))
            at += length
    return sorted(found)


def same(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    return all(
        torch.equal(getattr(a, n), getattr(b, n))
        for a, b in zip(one, other, strict=True)
        for n in TENSORS
    ) and [b.sources for b in one] == [b.sources for b in other]


def documents(parts: tuple[PreparedPart, ...]) -> dict[tuple[str, int], list[int]]:
    return {
        (p.name, i): p.corpus.document(i).tolist()
        for p in parts
        for i in range(p.corpus.n_documents)
    }


def test_rows_are_documents_and_labels_cross_no_end(prepared: PreparedData) -> None:
    texts = {
        (p.name, i): p.corpus.dataset.document(i).tolist()
        for p in prepared.train
        for i in range(p.corpus.n_documents)
    }
    loader = Loader(prepared, seq=8, batch=6, micro_batch=2)
    for step in range(25):
        batches = loader.load_step(step)
        assert [b.rows for b in batches] == [16] * 3
        found = rows(batches)
        assert [r[0] for r in found] == list(range(48))
        for _, ids, label, _, name, document, place in found:
            text = texts[name, document]
            assert ids == text[place]
            assert label == (text[place + 1] if place + 1 < len(text) else IGNORE_INDEX)
        for batch in batches:
            ends = np.cumsum(batch.lengths)
            assert set(range(8, 16, 8)) <= set(ends.tolist())  # no segment crosses a sequence
            for end, length in zip(ends, batch.lengths, strict=True):
                assert batch.positions_T[end - length : end].tolist() == list(range(length))
            assert batch.n_labels == int((batch.labels_T != IGNORE_INDEX).sum())


def test_data_order_is_the_same_after_any_stop_and_in_any_layout(
    prepared: PreparedData,
) -> None:
    """Order stays the same after a resume, with other ranks, and at an epoch's end."""
    seq, batch = 8, 4
    unbroken = Loader(prepared, seq, batch, 1, seed=5)
    steps = 2 + int(unbroken.prepared.train[0].corpus.n_tokens / (seq * batch * 0.75))
    expected = [rows(unbroken.load_step(s)) for s in range(steps)]
    assert unbroken.epoch(0)["a"] == 0 and 1 < unbroken.epoch(steps)["a"] < 2
    for start in range(0, steps, max(steps // 20, 1)):  # killed at step `start`, any layout after
        for micro_batch in (1, 2, 4):
            for pad_to in (1, 12):
                again = Loader(prepared, seq, batch, micro_batch, seed=5, pad_to=pad_to)
                for step in (start, min(start + 1, steps - 1)):
                    assert rows(again.load_step(step)) == expected[step]
    for dp in (1, 2, 4):  # rank by rank, each asking for its own only
        loader = Loader(prepared, seq, batch, 1, seed=5)
        for step in (0, steps - 1):
            parts = [
                loader.load_micro_batch(step, j) for rank in range(dp) for j in range(rank, 4, dp)
            ]
            assert rows(parts) == expected[step]


def test_steps_asked_for_in_any_order_are_the_same(prepared: PreparedData) -> None:
    loader = Loader(prepared, 8, 4, 2, seed=9)
    forwards = {s: loader.load_step(s) for s in range(12)}
    list(loader.evaluation())
    for step in (11, 3, 3, 0, 7):
        assert same(loader.load_step(step), forwards[step])


def test_the_seed_and_the_epoch_change_the_order(prepared: PreparedData) -> None:
    one, two = (Loader(prepared, 8, 4, seed=s) for s in (1, 2))
    assert not any(same(one.load_step(s), two.load_step(s)) for s in range(5))
    assert one.fingerprint() == two.fingerprint()
    assert one.fingerprint() != Loader(prepared, 9, 4).fingerprint()


def test_an_epoch_reads_each_token_once(prepared: PreparedData) -> None:
    only = PreparedData(**{**vars(prepared), "train": prepared.train[:1]})
    loader = Loader(only, seq=7, batch=1)
    tokens = only.train[0].corpus.n_tokens
    for epoch in range(2):
        first = epoch * (tokens // 7)
        seen = [
            (r[5], r[6])
            for s in range(first, first + tokens // 7)
            for r in rows(loader.load_step(s))
        ]
        assert len(set(seen)) == len(seen) == tokens // 7 * 7 > tokens - 7


def test_weights_are_shares_of_the_sequences(prepared: PreparedData) -> None:
    loader = Loader(prepared, seq=8, batch=8)
    names = [b.sources[0].name for s in range(10) for b in loader.load_step(s)]
    assert names.count("a") == 60 and names.count("b") == 20


def test_padding_is_last_numbered_apart_and_in_no_segment(prepared: PreparedData) -> None:
    loader = Loader(prepared, seq=7, batch=4, micro_batch=2, pad_to=8)
    batches = loader.load_step(3)
    numbers = torch.cat([b.token_T for b in batches]).tolist()
    assert sorted(numbers) == list(range(32))
    for batch in batches:
        assert (batch.rows, batch.n_valid) == (16, 14)
        assert batch.valid_T.tolist() == [True] * 14 + [False] * 2
        assert (batch.labels_T[14:] == IGNORE_INDEX).all() and sum(batch.lengths) == 14
        assert (batch.token_T[~batch.valid_T] >= 28).all()


def test_evaluation_predicts_every_byte_of_the_held_out_text_once(prepared: PreparedData) -> None:
    part = prepared.valid[0]
    text = b"".join(
        prepared.tokenizer.decode(part.corpus.document(i).tolist()).encode()
        for i in range(part.corpus.n_documents)
    )
    for micro_batch, pad_to in ((1, 1), (3, 1), (3, 16)):
        loader = Loader(prepared, 8, 6, micro_batch, pad_to=pad_to)
        batches = list(loader.evaluation("a"))
        assert sum(b.n_bytes for b in batches) == len(text) == part.n_bytes
        assert sum(b.n_valid for b in batches) == part.corpus.n_tokens
        assert sum(b.n_labels for b in batches) == part.corpus.n_tokens - part.corpus.n_documents
        labels = torch.cat([b.labels_T[b.labels_T >= 0] for b in batches]).tolist()
        assert b"".join(prepared.tokenizer.token_bytes[i] for i in labels) == text
        assert {b.rows for b in batches} == {loader.rows}
        numbers = torch.cat([b.token_T for b in batches]).tolist()
        assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("limit", [1, 20, 64, 10**9])
def test_a_limited_evaluation_is_spread_over_the_set(prepared: PreparedData, limit: int) -> None:
    loader = Loader(prepared, 8, 6, 2)
    whole, some = list(loader.evaluation()), list(loader.evaluation(limit=limit))
    n = sum(b.n_valid for b in some)
    assert n <= max(limit, 8) and n > min(limit - 8, sum(b.n_valid for b in whole) - 1) - 8
    last = [b.sources[-1].document for b in (some[-1], whole[-1])]
    if limit == 64:
        assert some[0].sources[0] == whole[0].sources[0] and last[0] > last[1] * 0.6


def test_ranks_share_an_evaluation(prepared: PreparedData) -> None:
    whole = list(Loader(prepared, 8, 6, 2).evaluation())
    shares = [list(Loader(prepared, 8, 6, 2, rank=r, ranks=3).evaluation()) for r in range(3)]
    assert [len(share) for share in shares] == [-(-len(whole) // 3)] * 3
    assert all(
        batch.n_valid == 0 for share in shares[len(whole) % 3 or 3 :] for batch in share[-1:]
    )
    for j, batch in enumerate(whole):
        assert same([batch], [shares[j % 3][j // 3]])


def corpus_of(
    folder: Path, prepared: PreparedData, texts: list[list[int]], vocab: int
) -> PreparedData:
    with IndexWriter(folder / "x", 60_000) as writer:
        for ids in texts:
            writer.add(ids)
    part = PreparedPart("x", 1.0, Corpus("x", IndexedDataset(folder / "x"), vocab), "", 0, 1.0)
    return PreparedData(**{**vars(prepared), "train": (part,), "valid": (part,)})


def test_ids_of_no_token_are_refused_with_document_and_position(
    tmp_path: Path, prepared: PreparedData
) -> None:
    """Also ids between the tokenizer's and the embedding's size, which no token has."""
    size = prepared.tokenizer.size
    bad = corpus_of(tmp_path, prepared, [[1, 2, 3], [4, 5, 6, size, 7]], size)
    said = rf"x\.bin: document 1, position 3: token id {size} is not in \[0, {size}\)"
    with pytest.raises(DataError, match=said):
        list(Loader(bad, 4, 1).evaluation())
    with pytest.raises(DataError, match="document 1, position 3"):
        [Loader(bad, 4, 1).load_step(s) for s in range(4)]


@settings(max_examples=40, deadline=None, database=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(2, 9))
def test_documents_of_any_length(
    prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq: int
) -> None:
    """One token, or many sequences long: every step ends, every row is right."""
    texts = [[i * 31 % 200 + j for j in range(n)] for i, n in enumerate(lengths)]
    found = corpus_of(tmp_path_factory.mktemp("x"), prepared, texts, 290)
    if sum(lengths) < seq:
        with pytest.raises(DataError, match=f"do not fill one sequence of {seq}"):
            Loader(found, seq, 2)
        return
    loader = Loader(found, seq, 2)
    for step in range(6):
        for _, ids, _, _, _, document, place in rows(loader.load_step(step)):
            assert ids == texts[document][place]
    assert sum(b.n_valid for b in loader.evaluation()) == sum(lengths)


def test_what_is_asked_for_must_be_there(prepared: PreparedData) -> None:
    with pytest.raises(ValueError, match="batch 6 must be a multiple"):
        Loader(prepared, 8, 6, 4)
    with pytest.raises(DataError, match="no held-out set 'b'; the held-out sets are: a"):
        next(Loader(prepared, 8, 6).evaluation("b"))
    assert Loader(prepared, 8, 6).evaluation_sets == ("a",)
