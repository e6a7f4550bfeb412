"""The model family ``custom``: a full description, for models that no other family covers."""

from collections.abc import Iterator
from typing import Literal

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.model.config import MODEL, Decoder
from moefold.model.families.base import raise_violations, vocab_violations


@MODEL.register
class Custom(Record):
    """A model given by its full description, with any pattern of blocks."""

    family: Literal["custom"] = "custom"
    decoder: Decoder

    def describe(self, vocab: int) -> Decoder:
        """Return ``decoder``.

        Raises:
            ValueError: if its vocabulary is smaller than ``vocab``.
        """
        raise_violations(self.violations(vocab))
        return self.decoder

    def violations(self, vocab: int) -> Iterator[Violation]:
        """Yield values that do not fit a tokenizer of ``vocab`` tokens."""
        yield from vocab_violations(("decoder", "vocab"), self.decoder.vocab, vocab)
