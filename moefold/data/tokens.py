"""Documents of a token file as a ring of rows, from which sequences are cut.

Shape suffix: N tokens of a piece.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moefold.data.config import DataError
from moefold.data.index import Indexed, check_ids


class Piece(NamedTuple):
    """The part of a document that fell into a sequence."""

    document: int
    """Number of the document in its file."""
    start: int
    """First token of the piece inside the document."""
    ids_N: np.ndarray
    """int64 token ids."""
    following: int | None
    """The token after the piece in the same document, None at the document's end."""


class Corpus:
    """The documents of a token file, or a choice of them, one after another.

    Args:
        name: how messages call it.
        indexed: the token file.
        vocab: ids must lie in ``[0, vocab)``.
        chosen: numbers of the documents that belong to it, ascending (default: all).
    """

    def __init__(
        self, name: str, indexed: Indexed, vocab: int, chosen: np.ndarray | None = None
    ) -> None:
        self.name, self.indexed, self.vocab = name, indexed, vocab
        lengths = np.diff(indexed.rows_1)
        numbers = np.arange(len(indexed)) if chosen is None else chosen
        self._numbers = numbers[lengths[numbers] > 0]
        self._ends_1 = np.append(0, np.cumsum(lengths[self._numbers], dtype=np.int64))

    @property
    def documents(self) -> int:
        """Number of documents with at least one token."""
        return len(self._numbers)

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self._ends_1[-1])

    def cut(self, start: int, rows: int) -> Iterator[Piece]:
        """Yield the pieces of ``rows`` rows from ``start`` on; after the last comes the first."""
        assert 0 <= start < self.tokens and 0 <= rows <= self.tokens, (start, rows, self.tokens)
        d = int(np.searchsorted(self._ends_1, start, side="right")) - 1
        while rows:
            first, end = int(self._ends_1[d]), int(self._ends_1[d + 1])
            taken = min(rows, end - start)
            number = int(self._numbers[d])
            base = int(self.indexed.rows_1[number]) + start - first
            more = 1 if start + taken < end else 0
            ids = self.indexed.read(base, base + taken + more)
            check_ids(ids, self.vocab, f"{self.indexed.bin}: document {number}", start - first)
            yield Piece(number, start - first, ids[:taken], int(ids[-1]) if more else None)
            rows -= taken
            d = (d + 1) % self.documents
            start = int(self._ends_1[d])

    def document(self, i: int) -> np.ndarray:
        """Return int64 ids of the i-th document of the choice."""
        return self.indexed.document(int(self._numbers[i]))

    def check_length(self, seq: int) -> None:
        """Refuse a corpus that does not fill one sequence."""
        if self.tokens < seq:
            raise DataError(
                f"source {self.name}: {self.tokens} tokens in {self.documents} documents do not "
                f"fill one sequence of {seq}; add text, or lower data.seq"
            )
