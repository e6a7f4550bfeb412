"""Sequences of a corpus: chunks of text, or packed conversations of N tokens."""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, starmap

import numpy as np

from moefold.data.config import DataError
from moefold.data.index import Corpus, DocumentPiece, IndexedDataset
from moefold.data.order import Epochs, Given, epoch_key, permuted_index

REJECTED = 2
"""Added to the mask values of a pair's rejected answer."""


class TrainSequences(ABC):
    """Training sequences of a source, from the place that it has reached on: epoch after epoch.

    First come those that are left of the epoch in progress, which ``given`` describes, cut to
    ``seq`` if they were cut to another length; then whole epochs in the order of ``seed`` and
    ``name``. Numbers n count from that place.
    """

    n_sequences: int
    """Number of sequences of an epoch."""
    n_left: int
    """Number of sequences left of the epoch in progress."""

    def __init__(self, tokens: int, seed: int, name: str, seq: int, given: Given | None) -> None:
        fresh = Given(name, "", seed, ((seq, 0),))
        given = given or fresh
        if given.is_between_epochs:  # nothing ties its next epoch to an earlier order
            given = replace(fresh, digest=given.digest, epoch=given.epoch)
        self.given = given
        self.tokens = tokens
        self.seq = seq
        self._fresh = replace(fresh, digest=given.digest)

    def given_after(self, n: int) -> Given:
        """Return what the source has given after ``n`` sequences."""
        if n < self.n_left:
            return self.given.more(self.seq, n)
        epoch, position = self._place(n)
        return replace(self._fresh, epoch=epoch, cuts=((self.seq, position),))

    def epochs(self, n: int) -> float:
        """Return how many epochs of the source precede the n-th sequence, over the whole run."""
        if n < self.n_left:
            read = self.tokens_given / self.tokens
            return self.given.epoch + read + (1 - read) * n / self.n_left
        epoch, position = self._place(n)
        return epoch + position / self.n_sequences

    def place(self, n: int) -> tuple[int, int]:
        """Return the epoch that the n-th sequence belongs to, and its tokens that precede it."""
        if n < self.n_left:
            return self.given.epoch, self.tokens_given + self.count_tokens(0, n)
        epoch, position = self._place(n)
        return epoch, self.count_tokens(n - position, n)

    def again(self, n: int) -> int:
        """Return how many tokens of the next ``n`` sequences are of a second or later epoch.

        All of them were given before, except for the fewer than one sequence of tokens that the
        first epoch of text leaves out.
        """
        if self.given.epoch:
            return self.count_tokens(0, n)
        return self.count_tokens(min(n, self.n_left), n)

    @abstractmethod
    def train_sequence(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the pieces of the n-th training sequence."""

    @abstractmethod
    def count_tokens(self, first: int, end: int) -> int:
        """Return the number of tokens of sequences ``first`` to ``end``."""

    @property
    @abstractmethod
    def tokens_given(self) -> int:
        """Number of tokens of the epoch in progress that were given before."""

    def _place(self, n: int) -> tuple[int, int]:
        """Return epoch and position in it of a sequence after the epoch in progress."""
        epoch, position = divmod(n - self.n_left, self.n_sequences)
        return self.given.epoch + 1 + epoch, position


class ChunkedSequences(TrainSequences):
    """Sequences of ``seq`` rows cut from concatenated documents (:class:`Epochs`).

    What is left of an epoch that was cut to another length is one stretch of its sequences in
    their order, end to end, cut anew; the last sequence of it may be shorter.
    """

    def __init__(
        self, corpus: Corpus, seed: int, name: str, seq: int, given: Given | None = None
    ) -> None:
        tokens = corpus.n_tokens
        super().__init__(tokens, seed, name, seq, given)
        self._corpus = corpus
        self._epochs = Epochs(seed, name, tokens, seq)
        given = self.given
        self._begun = Epochs(given.seed, given.name, tokens, given.cuts[0][0])
        self.n_sequences = self._epochs.n_sequences
        self.n_left = -(-(self._begun.rows - self.tokens_given) // seq)
        self.n_ordered_sequences = -(-tokens // seq)
        """Number of consecutive sequences that cover every row once; the last may be shorter."""

    @property
    def tokens_given(self) -> int:
        """Number of tokens of the epoch in progress that were given before."""
        return sum(seq * n for seq, n in self.given.cuts)

    def train_sequence(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the pieces of the n-th training sequence."""
        if n < self.n_left:
            start = self.tokens_given + n * self.seq
            rows = min(self.seq, self._begun.rows - start)
            stretch = self._begun.stretch(self.given.epoch, start, rows)
        else:
            epoch, position = self._place(n)
            stretch = self._epochs.stretch(epoch, position * self.seq, self.seq)
        return chain.from_iterable(starmap(self._corpus.slice, stretch))

    def count_tokens(self, first: int, end: int) -> int:
        """Return the number of tokens of sequences ``first`` to ``end``."""
        left = self._begun.rows - self.tokens_given

        def until(n: int) -> int:
            next_epochs = max(n - self.n_left, 0) * self.seq
            return min(n * self.seq, left) + next_epochs

        return until(end) - until(first)

    def ordered_sequence(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the pieces of the n-th consecutive sequence."""
        start = n * self.seq
        return self._corpus.slice(start, min(self.seq, self._corpus.n_tokens - start))


class PackedSequences(TrainSequences):
    """Sequences of whole documents, the same in every epoch except for their order.

    The documents that are left of an epoch that was packed to another length are packed anew.
    """

    def __init__(
        self,
        corpus: "MaskedCorpus",
        seed: int,
        name: str,
        seq: int,
        given: Given | None = None,
    ) -> None:
        super().__init__(corpus.n_tokens, seed, name, seq, given)
        self._corpus = corpus
        self._packs = best_fit_decreasing(corpus.lengths.tolist(), seq)
        # Packs of the epoch in progress, by document, and how many of them were given before.
        self._begun = self._packs
        self._skipped = 0
        if not self.given.is_between_epochs:
            self._begun, self._skipped = self._pack_rest()
        self.n_sequences = self.n_ordered_sequences = len(self._packs)
        self.n_left = len(self._begun) - self._skipped

    def _pack_rest(self) -> tuple[list[list[int]], int]:
        """Return the packs of the epoch in progress, and how many of them were given before."""
        lengths = self._corpus.lengths
        key = self.given.key
        documents = list(range(len(lengths)))
        packs = list[list[int]]()
        given = 0
        cuts = self.given.cuts
        for seq, count in cuts if cuts[-1][0] == self.seq else (*cuts, (self.seq, 0)):
            left = (packs[permuted_index(i, len(packs), key)] for i in range(given, len(packs)))
            documents = sorted(chain.from_iterable(left)) if packs else documents
            packed = best_fit_decreasing(lengths[documents].tolist(), seq)
            packs = [[documents[i] for i in pack] for pack in packed]
            given = count
        return packs, given

    @cached_property
    def tokens_given(self) -> int:
        """Number of tokens of the epoch in progress that were given before."""
        if self.given.is_between_epochs:
            return 0
        return self._corpus.n_tokens - self.count_tokens(0, self.n_left)

    def train_sequence(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the documents of the n-th training sequence."""
        return chain.from_iterable(map(self._corpus.pieces, self._pack(n)))

    def _pack(self, n: int) -> list[int]:
        """Return the documents of the n-th training sequence."""
        packs = self._begun
        key = self.given.key
        position = self._skipped + n
        if n >= self.n_left:
            epoch, position = self._place(n)
            packs = self._packs
            key = epoch_key(self._fresh.seed, self._fresh.name, epoch)
        return packs[permuted_index(position, len(packs), key)]

    def count_tokens(self, first: int, end: int) -> int:
        """Return the number of tokens of sequences ``first`` to ``end``."""
        lengths = self._corpus.lengths

        def until(n: int) -> int:
            epochs, rest = divmod(max(n - self.n_left, 0), self.n_sequences)
            numbers = chain(range(min(n, self.n_left)), range(n - rest, n))
            documents = list(chain.from_iterable(map(self._pack, numbers)))
            return epochs * self._corpus.n_tokens + int(lengths[documents].sum())

        return until(end) - until(first)

    def ordered_sequence(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the documents of the n-th pack."""
        return chain.from_iterable(map(self._corpus.pieces, self._packs[n]))


class MaskedCorpus(Corpus):
    """Documents that are never cut and in which only some tokens are labels.

    ``mask`` has a value for each token: 1 if it is a label, else 0, plus :data:`REJECTED` in the
    second part of a pair.
    """

    def __init__(self, name: str, tokens: IndexedDataset, vocab: int, mask: IndexedDataset) -> None:
        super().__init__(name, tokens, vocab)
        if not np.array_equal(tokens.document_starts_1, mask.document_starts_1):
            raise DataError(f"{mask.bin}: does not match {tokens.bin}; prepare both again")
        self._mask = mask

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """The files of tokens and of masks."""
        return self.dataset, self._mask

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 number of tokens of each document."""
        return np.diff(self._starts_1)

    def pieces(self, i: int) -> Iterator[DocumentPiece]:
        """Yield the i-th document: a conversation, or the chosen and rejected ones of a pair."""
        number = int(self._indices[i])
        ids_N = self.document(i)
        marks_N = self._mask.document(number)
        parts = np.flatnonzero(np.diff(marks_N // REJECTED)) + 1
        for start, end in zip((0, *parts), (*parts, len(ids_N)), strict=True):
            loss_mask_N = marks_N[start:end] % REJECTED != 0
            yield DocumentPiece(number, int(start), ids_N[start:end], None, loss_mask_N)


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack documents into sequences of ``capacity`` rows; return the document indices of each.

    Best fit decreasing (Johnson 1973): longest first, each where the least space remains. It needs
    at most 11/9 of the optimal number of sequences, plus one, and is deterministic.
    """
    packs: list[list[int]] = []
    packs_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # the keys of packs_by_space, ascending
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[number]
        assert 0 < length <= capacity, (number, length, capacity)
        at = bisect_left(spaces, length)
        space = capacity
        if at == len(spaces):
            pack = len(packs)
            packs.append([])
        else:
            space = spaces[at]
            pack = packs_by_space[space].pop()
            if not packs_by_space[space]:
                del packs_by_space[space], spaces[at]
        packs[pack].append(number)
        if space := space - length:
            if space not in packs_by_space:
                packs_by_space[space] = []
                insort(spaces, space)
            packs_by_space[space].append(pack)
    return packs


def build_sequences(
    corpus: Corpus,
    seed: int,
    name: str,
    seq: int,
    given: Given | None = None,
    require_full: bool = True,
) -> ChunkedSequences | PackedSequences:
    """Return the sequences of a corpus; with ``require_full``, text must fill at least one.

    ``given`` is what the source has given before; None: nothing.

    Raises:
        DataError: if it does not, or if a conversation exceeds one.
    """
    if not isinstance(corpus, MaskedCorpus):
        if require_full and corpus.n_tokens < seq:
            raise DataError(
                f"source {corpus.name}: {corpus.n_tokens} tokens in {corpus.n_documents} documents "
                f"do not fill one sequence of {seq}; add text, or lower data.seq"
            )
        return ChunkedSequences(corpus, seed, name, seq, given)
    longest = int(corpus.lengths.max(initial=0))
    if longest > seq:
        raise DataError(
            f"source {corpus.name}: a conversation of {longest} tokens does not fit a sequence of "
            f"{seq}; raise data.seq"
        )
    return PackedSequences(corpus, seed, name, seq, given)
