"""The tokens of micro-batches as a plain list, to compare an order of data with."""

from collections.abc import Iterator
from typing import NamedTuple

from moefold.data.batch import MicroBatch


class Token(NamedTuple):
    """A token of a data set, by its place in a document."""

    name: str
    document: int
    position: int


def tokens_of(batch: MicroBatch) -> Iterator[Token]:
    """Yield the tokens of a micro-batch, in the order of its rows."""
    for (name, document, start), length in zip(batch.sources, batch.lengths, strict=True):
        for i in range(length):
            yield Token(name, document, start + i)
