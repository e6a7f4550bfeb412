"""Micro-batches: tokens are rows, documents are segments of rows.

T rows of the micro-batch, B sequences, S tokens of a sequence, N segments.

A segment is a document, or the piece of one in a sequence. Attention does not cross segments,
positions restart with each, and labels do not cross its end. Padding rows come last, belong to no
segment, and are never counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moefold.spec.layer import round_up

IGNORE_INDEX = -100
"""Label of rows without a label."""
ROW_TENSORS = ("ids_T", "labels_T", "positions_T", "valid_T", "token_T")
"""Fields of a micro-batch that have an entry for each row."""


class SegmentOrigin(NamedTuple):
    """Origin of a segment: data set, document index, position of its first token there."""

    name: str
    document: int
    start: int


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass. Counts are on the host, to avoid synchronisation."""

    ids_T: Tensor
    """int64 token ids; 0 on padding rows."""
    labels_T: Tensor
    """int64 next token of the document, ``IGNORE_INDEX`` where there is none."""
    positions_T: Tensor
    """int64 position in the segment, from 0."""
    valid_T: Tensor
    """bool, False on padding rows."""
    token_T: Tensor
    """int64 index of the row in the step's global batch, independent of the layout."""
    lengths: tuple[int, ...]
    """Rows of each segment of the full micro-batch, in row order."""
    n_valid: int
    """Rows on this rank that are not padding; they come first."""
    n_labels: int
    """Rows with a label."""
    n_bytes: float = 0.0
    """UTF-8 bytes of the labels' text, the divisor of bits per byte; 0 if unknown."""
    sources: tuple[SegmentOrigin, ...] = ()
    """Origin of each segment, for reports; empty if unknown."""
    row_T: Tensor | None = None
    """int64 index of each row in the full micro-batch; None if all rows are here."""
    first: int = 0
    """Index of the full micro-batch's first row in the step's global batch."""

    def __post_init__(self) -> None:
        rows = self.ids_T.shape
        assert len(rows) == 1 and self.n_valid <= rows[0]
        assert self.row_T is not None or self.n_valid == self.population
        others = (self.labels_T, self.positions_T, self.valid_T, self.token_T)
        assert all(t.shape == rows for t in others), [tuple(t.shape) for t in others]

    @property
    def rows(self) -> int:
        """Number of rows T, padding included."""
        return self.ids_T.shape[0]

    @property
    def population(self) -> int:
        """Number of valid rows of the full micro-batch, on this and other ranks."""
        return sum(self.lengths)

    @cached_property
    def full_row_T(self) -> Tensor:
        """int64 index of each row in the full micro-batch."""
        if self.row_T is not None:
            return self.row_T
        return torch.arange(self.rows, device=self.ids_T.device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [N + 1], first row of each segment and the end of the last, on the rows' device."""
        ends = np.cumsum((0, *self.lengths), dtype=np.int32)
        return torch.from_numpy(ends).to(self.ids_T.device, non_blocking=True)

    @cached_property
    def segment_T(self) -> Tensor:
        """int64 segment number of each valid row."""
        rows_T = self.full_row_T[: self.n_valid]
        return torch.searchsorted(self.cu_seqlens[1:], rows_T, right=True)

    def gather_last(self, x_TX: Tensor) -> Tensor:
        """Return the last row of each segment; requires all rows of the micro-batch."""
        if len(self.lengths) == self.rows:
            return x_TX
        return x_TX[(self.cu_seqlens[1:] - 1).long()]

    def select_rows(self, ranges: Sequence[range]) -> "MicroBatch":
        """Return the rows in ``ranges``, ascending to keep valid rows first; host tensors only."""
        rows_T = torch.cat([torch.arange(p.start, p.stop) for p in ranges])
        picked = {name: getattr(self, name)[rows_T] for name in ROW_TENSORS}
        row_T = self.full_row_T[rows_T]
        n_valid = sum(len(range(p.start, min(p.stop, self.n_valid))) for p in ranges)
        n_labels = int((picked["labels_T"] != IGNORE_INDEX).sum())
        return replace(self, **picked, row_T=row_T, n_valid=n_valid, n_labels=n_labels)

    def shift(self, by: int) -> "MicroBatch":
        """Return the full micro-batch with ids and labels of ``by`` tokens later.

        Beyond a segment's end, rows have its last token as id and no label.
        """
        device = self.ids_T.device
        lengths_N = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        end_T = lengths_N.cumsum(0).repeat_interleave(lengths_N)
        from_T = torch.arange(self.rows, device=device)
        later_T = from_T[: self.n_valid] + by
        inside_T = torch.zeros_like(self.valid_T)
        inside_T[: self.n_valid] = later_T < end_T
        from_T[: self.n_valid] = later_T.minimum(end_T - 1)
        labels_T = self.labels_T[from_T].where(inside_T, IGNORE_INDEX)
        n_labels = int((labels_T != IGNORE_INDEX).sum())
        return replace(self, ids_T=self.ids_T[from_T], labels_T=labels_T, n_labels=n_labels)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Return the micro-batch with its tensors on ``device``, copied asynchronously."""
        if torch.device(device) == self.ids_T.device:
            return self
        names = ROW_TENSORS if self.row_T is None else (*ROW_TENSORS, "row_T")
        rows: dict[str, Tensor] = {name: getattr(self, name) for name in names}
        if torch.device(device).type == "cuda":
            # CUDA copies from pageable memory are synchronous.
            rows = {name: x if x.is_cuda else x.pin_memory() for name, x in rows.items()}
        return replace(self, **{n: x.to(device, non_blocking=True) for n, x in rows.items()})


def zigzag_rows(rows: int, index: int, ranks: int) -> tuple[range, ...]:
    """Return the row ranges of context rank ``index`` of ``ranks``: one from either end.

    This balances causal attention. ``2 * ranks`` must divide ``rows``.
    """
    if ranks == 1:
        return (range(rows),)
    piece = rows // (2 * ranks)
    assert piece * 2 * ranks == rows, (rows, ranks)
    first = index * piece
    last = (2 * ranks - 1 - index) * piece
    return range(first, first + piece), range(last, last + piece)


def contiguous_rows(rows: int, index: int, ranks: int) -> tuple[range, ...]:
    """Return the row range of tensor rank ``index`` of ``ranks``."""
    piece = rows // ranks
    assert piece * ranks == rows, (rows, ranks)
    return (range(index * piece, (index + 1) * piece),)


def assemble(
    ids_T: np.ndarray,
    labels_T: np.ndarray,
    lengths: Sequence[int],
    *,
    rows: int | None = None,
    token_T: np.ndarray | None = None,
    n_bytes: float = 0.0,
    sources: Sequence[SegmentOrigin] = (),
) -> MicroBatch:
    """Build a micro-batch from its valid rows, padded to ``rows`` rows.

    Args:
        ids_T: token ids of the valid rows.
        labels_T: labels of the valid rows, ``IGNORE_INDEX`` where there is none.
        lengths: rows of each segment; they sum to the number of valid rows.
        rows: rows of the result, padding included (default: no padding).
        token_T: indices of all rows in the step's global batch (default: from 0).
        n_bytes: UTF-8 bytes of the labels' text.
        sources: origin of each segment.
    """
    valid = len(ids_T)
    rows = valid if rows is None else rows
    assert valid == len(labels_T) == sum(lengths) <= rows, (valid, len(labels_T), rows)
    lengths_N = np.asarray(lengths, dtype=np.int64)
    starts_N = np.cumsum(lengths_N) - lengths_N
    ids = np.zeros(rows, np.int64)
    labels = np.full(rows, IGNORE_INDEX, np.int64)
    positions = np.zeros(rows, np.int64)
    inside = np.zeros(rows, np.bool_)
    ids[:valid] = ids_T
    labels[:valid] = labels_T
    inside[:valid] = True
    positions[:valid] = np.arange(valid) - np.repeat(starts_N, lengths_N)
    numbers = np.arange(rows, dtype=np.int64) if token_T is None else token_T
    return MicroBatch(
        ids_T=torch.from_numpy(ids),
        labels_T=torch.from_numpy(labels),
        positions_T=torch.from_numpy(positions),
        valid_T=torch.from_numpy(inside),
        token_T=torch.from_numpy(numbers),
        lengths=tuple(int(n) for n in lengths),
        n_valid=valid,
        n_labels=int(np.count_nonzero(labels != IGNORE_INDEX)),
        n_bytes=n_bytes,
        sources=tuple(sources),
        first=int(numbers[0]) if rows else 0,
    )


def pack(
    documents: Sequence[Sequence[int]],
    pad_to: int = 1,
    first_token: int = 0,
    rows: int | None = None,
) -> MicroBatch:
    """Pack whole documents one after another; labels are the next token of each document.

    Each non-empty document becomes a segment. The result has ``rows`` rows, by default as many as
    needed, rounded up to a multiple of ``pad_to``; ``token_T`` starts at ``first_token``.
    """
    kept = [np.asarray(d, dtype=np.int64) for d in documents if len(d)]
    none = np.zeros(0, np.int64)
    ids_T = np.concatenate([none, *kept])
    labels_T = np.concatenate([none, *(np.append(d[1:], IGNORE_INDEX) for d in kept)])
    rows = round_up(len(ids_T), pad_to) if rows is None else rows
    token_T = np.arange(first_token, first_token + rows, dtype=np.int64)
    return assemble(ids_T, labels_T, [len(d) for d in kept], rows=rows, token_T=token_T)


def pack_last_tokens(texts: Sequence[Sequence[int]], pad_to: int = 1) -> MicroBatch:
    """Pack the last token of each text as a segment of one row, at its position in the text."""
    valid = len(texts)
    rows = round_up(valid, pad_to)
    token_T = torch.arange(rows)
    none = [0] * (rows - valid)
    return MicroBatch(
        ids_T=torch.tensor([text[-1] for text in texts] + none),
        labels_T=torch.full_like(token_T, IGNORE_INDEX),
        positions_T=torch.tensor([len(text) - 1 for text in texts] + none),
        valid_T=token_T < valid,
        token_T=token_T,
        lengths=(1,) * valid,
        n_valid=valid,
        n_labels=0,
    )


def random_batches(vocab: int, shape: tuple[int, int], number: int, seed: int) -> list[MicroBatch]:
    """Return micro-batches of random ids of this shape, the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    return [from_ids(torch.randint(vocab, shape, generator=draw)) for _ in range(number)]


def from_ids(ids_BS: Tensor, labels_BS: Tensor | None = None) -> MicroBatch:
    """Turn B sequences of S tokens into rows, one segment each, on the device of ``ids_BS``.

    By default each row's label is the next token of its sequence, and the last row has none.
    ``labels_BS`` [B, S], if given, must already be shifted.
    """
    if ids_BS.dim() != 2:
        raise ValueError(f"ids must have the shape [sequences, tokens], not {list(ids_BS.shape)}")
    b, s = ids_BS.shape
    if labels_BS is None:
        shifted_BS = torch.full_like(ids_BS, IGNORE_INDEX, dtype=torch.int64)
        shifted_BS[:, : max(s - 1, 0)] = ids_BS[:, 1:]
    elif labels_BS.shape == ids_BS.shape:
        shifted_BS = labels_BS.to(torch.int64)
    else:
        raise ValueError(f"labels {list(labels_BS.shape)} and ids {[b, s]} differ in shape")
    device = ids_BS.device
    labels_T = shifted_BS.reshape(-1)
    return MicroBatch(
        ids_T=ids_BS.reshape(-1).to(torch.int64),
        labels_T=labels_T,
        positions_T=torch.arange(s, device=device).repeat(b),
        valid_T=torch.ones(b * s, dtype=torch.bool, device=device),
        token_T=torch.arange(b * s, device=device),
        lengths=(s,) * b if s else (),
        n_valid=b * s,
        n_labels=int((labels_T != IGNORE_INDEX).sum()),
    )
