"""Sequences of a corpus: chunks of text, or packed conversations of N tokens."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from moefold.data.config import DataError
from moefold.data.index import Corpus, DocumentPiece, IndexedDataset
from moefold.data.order import Epochs, permuted_index, stable_hash

REJECTED = 2
"""Added to the mask values of a pair's rejected answer."""


class ChunkedSequences:
    """Sequences of ``seq`` rows cut from concatenated documents (:class:`Epochs`)."""

    def __init__(self, corpus: Corpus, seed: int, name: str, seq: int) -> None:
        self._corpus, self._seq = corpus, seq
        self._epochs = Epochs(seed, name, corpus.n_tokens, seq)
        self.n_sequences = self._epochs.n_sequences
        """Number of sequences of an epoch."""
        self.n_ordered_sequences = -(-corpus.n_tokens // seq)
        """Number of consecutive sequences that cover every row once; the last may be shorter."""

    def train_sequence(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the pieces of the n-th training sequence, counted over all epochs."""
        return self._corpus.slice(self._epochs.start_row(n), self._seq)

    def ordered_sequence(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the pieces of the n-th consecutive sequence."""
        start = n * self._seq
        return self._corpus.slice(start, min(self._seq, self._corpus.n_tokens - start))


class PackedSequences:
    """Sequences of whole documents, the same in every epoch except for their order."""

    def __init__(self, corpus: "MaskedCorpus", seed: int, name: str, seq: int) -> None:
        self._corpus, self._seed, self._name = corpus, seed, name
        self._packs = best_fit_decreasing(corpus.lengths.tolist(), seq)
        self.n_sequences = self.n_ordered_sequences = len(self._packs)

    def train_sequence(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the documents of the n-th training sequence, counted over all epochs."""
        epoch, position = divmod(n, self.n_sequences)
        key = stable_hash("epoch", self._seed, self._name, epoch)
        return self.ordered_sequence(permuted_index(position, self.n_sequences, key))

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

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 number of tokens of each document."""
        return np.diff(self._starts_1)

    def pieces(self, i: int) -> Iterator[DocumentPiece]:
        """Yield the i-th document: a conversation, or the chosen and rejected ones of a pair."""
        number, ids_N = int(self._indices[i]), self.document(i)
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
        at, space = bisect_left(spaces, length), capacity
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
    corpus: Corpus, seed: int, name: str, seq: int, require_full: bool = True
) -> ChunkedSequences | PackedSequences:
    """Return the sequences of a corpus; with ``require_full``, text must fill at least one.

    Raises:
        DataError: if it does not, or if a conversation exceeds one.
    """
    if not isinstance(corpus, MaskedCorpus):
        if require_full and corpus.n_tokens < seq:
            raise DataError(
                f"source {corpus.name}: {corpus.n_tokens} tokens in {corpus.n_documents} documents "
                f"do not fill one sequence of {seq}; add text, or lower data.seq"
            )
        return ChunkedSequences(corpus, seed, name, seq)
    longest = int(corpus.lengths.max(initial=0))
    if longest > seq:
        raise DataError(
            f"source {corpus.name}: a conversation of {longest} tokens does not fit a sequence of "
            f"{seq}; raise data.seq"
        )
    return PackedSequences(corpus, seed, name, seq)
