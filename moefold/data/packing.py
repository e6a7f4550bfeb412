"""Sequences of a corpus: cut from text, or packed from whole conversations of N tokens."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from moefold.data.config import DataError
from moefold.data.index import Corpus, DocumentPiece, Indexed
from moefold.data.order import Epochs, key_of, shuffled

REJECTED = 2
"""Offset of the marks in a pair's rejected answer."""


class Cuts:
    """Sequences of text: ``seq`` rows of a corpus as a ring (:class:`Epochs`)."""

    def __init__(self, corpus: Corpus, seed: int, name: str, seq: int) -> None:
        self._corpus, self._seq = corpus, seq
        self._epochs = Epochs(seed, name, corpus.tokens, seq)
        self.sequences = self._epochs.sequences
        """Number of sequences of an epoch."""
        self.held = -(-corpus.tokens // seq)
        """Number of sequences that contain every row once, the last one maybe shorter."""

    def drawn(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the pieces of the n-th training sequence, counted over all epochs."""
        return self._corpus.cut(self._epochs.start(n), self._seq)

    def in_order(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the pieces of the n-th of the sequences that contain every row once."""
        start = n * self._seq
        return self._corpus.cut(start, min(self._seq, self._corpus.tokens - start))


class Packs:
    """Sequences of whole documents, equal in all epochs except for their order."""

    def __init__(self, corpus: "Conversations", seed: int, name: str, seq: int) -> None:
        self._corpus, self._seed, self._name = corpus, seed, name
        self._packs = best_fit(corpus.lengths.tolist(), seq)
        self.sequences = self.held = len(self._packs)

    def drawn(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the documents of the n-th training sequence, counted over all epochs."""
        epoch, place = divmod(n, self.sequences)
        key = key_of("epoch", self._seed, self._name, epoch)
        return self.in_order(shuffled(place, self.sequences, key))

    def in_order(self, n: int) -> Iterator[DocumentPiece]:
        """Yield the documents of the n-th pack."""
        return chain.from_iterable(map(self._corpus.pieces, self._packs[n]))


class Conversations(Corpus):
    """Documents that are never cut, in which only some tokens are labels.

    ``trained`` has the same documents with a mark for each token: 1 if it is a label, else 0, plus
    :data:`REJECTED` in the second part of a pair.
    """

    def __init__(self, name: str, indexed: Indexed, vocab: int, trained: Indexed) -> None:
        super().__init__(name, indexed, vocab)
        if not np.array_equal(indexed.rows_1, trained.rows_1):
            raise DataError(f"{trained.bin}: does not match {indexed.bin}; prepare both again")
        self._trained = trained

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64, number of tokens of each document."""
        return np.diff(self._ends_1)

    def pieces(self, i: int) -> Iterator[DocumentPiece]:
        """Yield the i-th document: a conversation, or the chosen and the rejected one of a pair."""
        number, ids_N = int(self._numbers[i]), self.document(i)
        marks_N = self._trained.document(number)
        parts = np.flatnonzero(np.diff(marks_N // REJECTED)) + 1
        for start, end in zip((0, *parts), (*parts, len(ids_N)), strict=True):
            trained_N = marks_N[start:end] % REJECTED != 0
            yield DocumentPiece(number, int(start), ids_N[start:end], None, trained_N)


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack documents into sequences of ``room`` rows; return the document numbers in each.

    Best fit decreasing (Johnson 1973): longest first, each where the least room is left. It needs
    at most 11/9 of the optimal number of sequences, plus one, and is deterministic.
    """
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, ascending
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[number]
        assert 0 < length <= room, (number, length, room)
        place, left = bisect_left(rooms, length), room
        if place == len(rooms):
            pack = len(packs)
            packs.append([])
        else:
            left = rooms[place]
            pack = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[place]
        packs[pack].append(number)
        if left := left - length:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(pack)
    return packs


def sequences_of(
    corpus: Corpus, seed: int, name: str, seq: int, whole: bool = True
) -> Cuts | Packs:
    """Return the sequences of a corpus; with ``whole``, text must fill at least one.

    Raises:
        DataError: if it does not, or if a conversation does not fit in one.
    """
    if not isinstance(corpus, Conversations):
        if whole and corpus.tokens < seq:
            raise DataError(
                f"source {corpus.name}: {corpus.tokens} tokens in {corpus.documents} documents do "
                f"not fill one sequence of {seq}; add text, or lower data.seq"
            )
        return Cuts(corpus, seed, name, seq)
    longest = int(corpus.lengths.max(initial=0))
    if longest > seq:
        raise DataError(
            f"source {corpus.name}: a conversation of {longest} tokens does not fit a sequence of "
            f"{seq}; raise data.seq"
        )
    return Packs(corpus, seed, name, seq)
