"""Micro-batches: rows, segments, and padding that belongs to none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.data.batch import IGNORE_INDEX, MicroBatch, from_ids, pack

DOCUMENTS = st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=5)


@settings(max_examples=60, deadline=None, database=None)
@given(DOCUMENTS, st.integers(1, 8))
def test_packing_keeps_documents_apart_and_padding_out(documents: list, pad_to: int) -> None:
    batch = pack(documents, pad_to, first_token=7)
    kept = [d for d in documents if d]
    assert batch.lengths == tuple(map(len, kept)) and batch.n_valid == sum(batch.lengths)
    assert batch.rows % pad_to == 0 and batch.rows - batch.n_valid < pad_to
    bounds = batch.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == batch.n_valid and batch.cu_seqlens.dtype == torch.int32
    for ids, start, end in zip(kept, bounds, bounds[1:], strict=False):
        assert batch.ids_T[start:end].tolist() == ids
        assert batch.labels_T[start:end].tolist() == [*ids[1:], IGNORE_INDEX]
        assert batch.positions_T[start:end].tolist() == list(range(len(ids)))
    n = batch.n_valid
    assert batch.valid_T.tolist() == [True] * n + [False] * (batch.rows - n)
    assert (batch.labels_T[n:] == IGNORE_INDEX).all()
    assert batch.n_labels == sum(len(d) - 1 for d in kept)
    assert batch.token_T.tolist() == list(range(7, 7 + batch.rows))


def test_all_padding_is_a_legal_batch() -> None:
    batch = pack([[]], pad_to=4)
    assert batch.rows == 0 and batch.cu_seqlens.tolist() == [0]


def test_rows_of_a_rectangle() -> None:
    ids_BS = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = from_ids(ids_BS)
    assert batch.labels_T.tolist() == [2, 3, IGNORE_INDEX, 5, 6, IGNORE_INDEX]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 2] and batch.lengths == (3, 3)
    assert batch.n_labels == 4
    own = from_ids(ids_BS, torch.tensor([[2, IGNORE_INDEX, 9], [5, 6, 7]]))
    assert own.labels_T.tolist() == [2, IGNORE_INDEX, 9, 5, 6, 7] and own.n_labels == 5
    assert from_ids(ids_BS[:, :1]).labels_T.tolist() == [IGNORE_INDEX] * 2
    assert from_ids(ids_BS[:, :0]).lengths == ()
    for wrong in (ids_BS[0], ids_BS[None]):
        with pytest.raises(ValueError, match="shape"):
            from_ids(wrong)
    with pytest.raises(ValueError, match="differ in shape"):
        from_ids(ids_BS, ids_BS[:, :2])


def test_moving_keeps_what_the_host_knows() -> None:
    batch = pack([[1, 2], [3]], pad_to=4)
    moved: MicroBatch = batch.to("meta")
    tensors = (moved.ids_T, moved.labels_T, moved.positions_T, moved.valid_T, moved.token_T)
    assert all(t.is_meta for t in tensors) and moved.cu_seqlens.is_meta
    assert moved.lengths == batch.lengths and moved.n_labels == batch.n_labels


def test_the_types_are_those_of_the_contract() -> None:
    for batch in (
        pack([[1, 2], [3]], pad_to=4),
        from_ids(torch.tensor([[1, 2]], dtype=torch.int32)),
    ):
        for name in ("ids_T", "labels_T", "positions_T", "token_T"):
            assert getattr(batch, name).dtype == torch.int64, name
        assert batch.valid_T.dtype == torch.bool
