"""Records of what a step minimises, without torch."""

from collections.abc import Iterator
from typing import Any, Literal

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.slot import Slot

LOSS = Slot("loss")


class Loss(Record):
    """Base of the records in the loss slot."""

    def misfits(self, run: Any) -> Iterator[Violation]:
        """Yield what of a run does not fit its loss, by paths from the run on."""
        yield from ()


@LOSS.register
class CrossEntropy(Loss):
    """Mean cross-entropy over labels."""

    kind: Literal["cross_entropy"] = "cross_entropy"

    owner = "moefold.training.losses.base:Objective"
