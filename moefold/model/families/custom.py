"""A decoder written out in full, for models that no family describes."""

from collections.abc import Iterator
from typing import Literal

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.model.config import MODEL, Decoder
from moefold.model.families.base import refuse, too_few_rows


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
        refuse(self.violations(vocab))
        return self.decoder

    def violations(self, vocab: int) -> Iterator[Violation]:
        """Yield what does not fit a tokenizer of ``vocab`` tokens."""
        yield from too_few_rows(("decoder", "vocab"), self.decoder.vocab, vocab)
