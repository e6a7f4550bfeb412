"""A decoder written out in full, for models that no family describes."""

from collections.abc import Iterator
from typing import Literal

from moefold.config.base import Record
from moefold.config.problems import Violation
from moefold.model.config import MODEL, Decoder


@MODEL.register
class Custom(Record):
    """Any pattern of blocks: ``decoder`` is the whole description."""

    family: Literal["custom"] = "custom"
    decoder: Decoder

    def describe(self, vocab: int) -> Decoder:
        """Return the decoder as written.

        Raises:
            ValueError: where it has fewer rows than the tokenizer has tokens.
        """
        if self.decoder.vocab < vocab:
            raise ValueError(
                f"model.decoder.vocab is {self.decoder.vocab}, but the tokenizer has {vocab} "
                f"tokens; set model.decoder.vocab={vocab} or more"
            )
        return self.decoder

    def rules(self) -> Iterator[Violation]:
        """The parts have rules of their own; there is none beyond them."""
        yield from ()
