"""The loader: a run's micro-batches, with random access to any step, and held-out text in order.

T rows of a micro-batch, V vocabulary.

A sequence is ``seq`` rows cut from concatenated documents, or packed conversations, in which only
answers are labels (``packing.py``). In text, a row's label is the next token of its document, even
if that token begins the next sequence: in an epoch each token of a document except the first is a
label exactly once. The last token of a document has no label. Positions restart with each segment.

Micro-batch j of a step holds sequences ``j * micro_batch`` to ``(j + 1) * micro_batch`` of the
step's batch, in any layout; it runs in round ``j // dp`` on data rank ``j % dp``.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain, islice, repeat
from typing import NamedTuple

import numpy as np

from moefold.data.batch import IGNORE_INDEX, MicroBatch, SegmentOrigin, assemble, pack
from moefold.data.config import BatchSizes
from moefold.data.errors import DataError
from moefold.data.index import DocumentPiece
from moefold.data.order import Given, Mixture, OrderStart, evenly_spaced, match_given
from moefold.data.packing import build_sequences
from moefold.data.prepare import PreparedData, PreparedPart
from moefold.spec.layer import round_up

_ORDER_VERSION = 1


class Reading(NamedTuple):
    """What some steps read of a training source."""

    name: str
    n_tokens: int
    """Tokens of the source."""
    epoch: int
    """Epochs of it that were read before, whole."""
    given: int
    """Tokens of the epoch in progress that were read before."""
    tokens: int
    """Tokens that the steps read."""
    again: int
    """Those among them of a second or later epoch."""


def same_data(stored: str, present: str) -> bool:
    """Return whether fingerprints of loaders agree in what both cover.

    Older ones do not cover all bytes of token files of other programs.
    """
    pairs = zip(stored.split("."), present.split("."), strict=False)
    return all(one == other for one, other in pairs)


class Loader:
    """Builds one data rank's micro-batches from prepared data.

    Every rank gets the same number: if the last round has too few, the remaining ranks get a
    micro-batch of padding.

    Args:
        prepared: tokenizer and token files.
        seq: tokens per sequence.
        batch: sequences per step, or the sizes of all steps.
        micro_batch: sequences per micro-batch; divides each size.
        seed: the run's seed.
        pad_to: rows of a micro-batch are padded to a multiple of this.
        rank: this data rank.
        ranks: number of data ranks.
    """

    def __init__(
        self,
        prepared: PreparedData,
        seq: int,
        batch: int | BatchSizes,
        micro_batch: int = 1,
        seed: int = 1,
        pad_to: int = 1,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        sizes = BatchSizes(((0, batch),)) if isinstance(batch, int) else batch
        for _, size in sizes.stages:
            if size % micro_batch:
                raise ValueError(f"batch {size} must be a multiple of micro_batch {micro_batch}")
        self.prepared = prepared
        self.seq = seq
        self.sizes = sizes
        self.micro_batch = micro_batch
        self._seed = seed
        self._rank = rank
        self._ranks = ranks
        self.rows = round_up(micro_batch * seq, pad_to)
        """Number of rows T of each micro-batch."""
        self._parts = prepared.train
        self._mixture = Mixture(tuple(p.weight for p in self._parts))
        self._valid = {p.name: p for p in prepared.valid}
        self._start: OrderStart | None = None
        self.start_order(OrderStart(), 0)

    def start_order(self, start: OrderStart, offset: int) -> None:
        """Read in the order that begins at ``start``.

        ``offset`` is added to the sequences of all earlier steps for the number of a step's first
        sequence. It is not zero in a fork of a run with another batch size.
        """
        self._first = start.first
        self._offset = offset
        if start == self._start:
            return
        self._start = start
        given, self._given_of_others = match_given(start.given, self.identities)
        self._sequences = [
            build_sequences(part.corpus, self._seed, part.name, self.seq, one)
            for part, one in zip(self._parts, given, strict=True)
        ]

    @property
    def identities(self) -> list[tuple[str, str]]:
        """Name and digest of each training source."""
        return [(part.name, part.digest) for part in self._parts]

    def given(self, step: int) -> tuple[Given, ...]:
        """Return what every source has given before ``step``, also those no longer read."""
        taken = self._taken(step)
        parts = zip(self._parts, self._sequences, taken, strict=True)
        given = (replace(s.given_after(n), digest=part.digest) for part, s, n in parts)
        return (*given, *self._given_of_others)

    def readings(self, first: int, end: int) -> tuple[Reading, ...]:
        """Return what steps ``first`` to ``end`` read of each training source."""
        before = self._taken(first)
        after = self._taken(end)
        return tuple(
            Reading(
                part.name,
                part.corpus.n_tokens,
                *source.place(n),
                source.count_tokens(n, until),
                source.again(until) - source.again(n),
            )
            for part, source, n, until in zip(
                self._parts, self._sequences, before, after, strict=True
            )
        )

    def _number(self, step: int) -> int:
        """Return the number, in this order, of a step's first sequence."""
        return self.sizes.before(step) + self._offset - self._first

    def _taken(self, step: int) -> tuple[int, ...]:
        """Return how many sequences of each source this order has before ``step``."""
        return self._mixture.counts(self._number(step))

    def n_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step, over all data ranks."""
        return self.sizes.size(step) // self.micro_batch

    @property
    def evaluation_sets(self) -> tuple[str, ...]:
        """Names of the held-out sets."""
        return tuple(self._valid)

    def fingerprint(self) -> str:
        """Return a SHA-256 of the data and of how sequences are cut, without seed and batch.

        Loaders with equal fingerprint, seed and batch return equal batches at every step. For token
        files of other programs a second digest follows, of all their bytes.
        """
        weights = [(p.name, p.weight) for p in self._parts]
        text = json.dumps([_ORDER_VERSION, self.prepared.fingerprint(), self.seq, weights])
        contents = self.prepared.contents()
        return sha256(text.encode()).hexdigest() + (f".{contents}" if contents else "")

    def epoch(self, step: int) -> dict[str, float]:
        """Return how many epochs of each training source precede ``step``."""
        pairs = zip(self._parts, self._taken(step), self._sequences, strict=True)
        return {part.name: source.epochs(n) for part, n, source in pairs}

    def load_step(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step (from 0), determined by seed and step."""
        count = self.n_micro_batches(step)
        mine = [self.load_micro_batch(step, j) for j in range(self._rank, count, self._ranks)]
        return list(self._pad_to_equal(iter(mine), count))

    def load_micro_batch(self, step: int, j: int) -> MicroBatch:
        """Return micro-batch ``j`` of a step, of any rank."""
        assert step >= 0 and 0 <= j < self.n_micro_batches(step), (step, j)
        number = self._number(step)
        if number < 0:
            raise ValueError(f"step {step} is before the data order of this fork begins")
        first = j * self.micro_batch
        sequences = []
        for i in range(first, first + self.micro_batch):
            source, n = self._mixture.pick(number + i)
            sequences.append((self._parts[source], self._sequences[source].train_sequence(n)))
        padding_rows = self.rows - self.micro_batch * self.seq
        padding = self.sizes.size(step) * self.seq + j * padding_rows
        return self._build(sequences, first * self.seq, padding)

    def evaluation(self, name: str | None = None, limit: int | None = None) -> Iterator[MicroBatch]:
        """Yield this rank's part of a held-out set (default: the only one), in order.

        The ranks' labels together cover each byte of its text once; or, with ``limit``, about that
        many tokens at most, in sequences evenly spaced over the set.
        """
        if name is None and len(self._valid) == 1:
            (name,) = self._valid
        if name not in self._valid:
            sets = ", ".join(self._valid) or "none; set holdout on a source, or add data.valid"
            raise DataError(f"no held-out set {name!r}; the held-out sets are: {sets}")
        return self._ordered_batches(self._valid[name], limit)

    def all_batches(self, held_out: bool = True) -> Iterator[MicroBatch]:
        """Yield this rank's part of the training and, if ``held_out``, other sets, in order."""
        for part in (*self._parts, *(self._valid.values() if held_out else ())):
            yield from self._ordered_batches(part, None)

    def _ordered_batches(self, part: PreparedPart, limit: int | None) -> Iterator[MicroBatch]:
        name = part.name
        each = self.micro_batch
        sequences = build_sequences(part.corpus, 0, name, self.seq, require_full=False)
        n = sequences.n_ordered_sequences
        chosen = range(n) if limit is None else evenly_spaced(n, max(limit // self.seq, 1))

        def batches() -> Iterator[MicroBatch]:
            for first in range(self._rank * each, len(chosen), self._ranks * each):
                group = [
                    (part, sequences.ordered_sequence(i)) for i in chosen[first : first + each]
                ]
                padding = len(chosen) * self.seq + first // each * self.rows
                yield self._build(group, first * self.seq, padding)

        return self._pad_to_equal(batches(), -(-len(chosen) // each))

    def _pad_to_equal(self, batches: Iterator[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """Append padding until this rank has as many of the ``count`` micro-batches as others."""
        per_rank = -(-count // self._ranks)
        padding = repeat(pack([], rows=self.rows))
        return islice(chain(batches, padding), per_rank)

    def _build(
        self,
        sequences: Sequence[tuple[PreparedPart, Iterable[DocumentPiece]]],
        first: int,
        padding: int,
    ) -> MicroBatch:
        """Assemble sequences, each a part and its pieces, into one micro-batch.

        ``first`` is the ``token_T`` of its first row, ``padding`` that of its first padding row.
        """
        ids = []
        labels = []
        lengths = []
        origins = []
        n_bytes = 0.0
        n_bytes_V = self.prepared.tokenizer.n_bytes_V
        for part, pieces in sequences:
            for piece in pieces:
                following = IGNORE_INDEX if piece.next_token is None else piece.next_token
                shifted = np.append(piece.ids_N[1:], following)
                if piece.loss_mask_N is not None:
                    shifted[~np.append(piece.loss_mask_N[1:], False)] = IGNORE_INDEX
                ids.append(piece.ids_N)
                labels.append(shifted)
                lengths.append(len(piece.ids_N))
                origins.append(SegmentOrigin(part.name, piece.document, piece.start))
                n_bytes += part.byte_ratio * int(n_bytes_V[shifted[shifted >= 0]].sum())
        inside = len(sequences) * self.seq
        end = padding + self.rows - inside
        numbers = np.arange(first, first + inside), np.arange(padding, end)
        return assemble(
            np.concatenate(ids),
            np.concatenate(labels),
            lengths,
            rows=self.rows,
            token_T=np.concatenate(numbers),
            n_bytes=n_bytes,
            sources=origins,
        )
