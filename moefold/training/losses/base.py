"""What a step minimises. Cross-entropy is the base: another loss replaces what it does otherwise.

T rows here, P rows of the tensor group, D hidden, F figures beside the loss.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Self

import torch
from torch import Tensor

from moefold.config.base import Record
from moefold.data.batch import MicroBatch
from moefold.kernels.operand import Operand
from moefold.layers.flow import Flow
from moefold.layers.loss import loss_and_gradients, summed_loss
from moefold.parallel.apply import ModelParts


class Objective:
    """Mean cross-entropy over labels.

    A step's loss is a sum over units, here labels, divided by their number in the whole batch. It
    ends the last stage's forward, where all ranks of a stage call it for one micro-batch.

    Args:
        record: of the slot LOSS, which names this class as its owner.
    """

    figures: tuple[str, ...] = ()
    """What is told beside the loss, each a mean over units too."""

    def __init__(self, record: Record | None = None) -> None:
        self.record: Any = record

    def opened(self, job: Any) -> Self:
        """Bring what the loss needs beside a trainer's model, on all ranks; return itself."""
        return self

    def trial(self, placed: ModelParts, subject: Any) -> "Objective":
        """Return the loss as a proof runs it, beside whose model nothing is to be found."""
        return self

    def units(self, batch: MicroBatch) -> int:
        """Return how many units a micro-batch has, which is whole and on the host."""
        return batch.n_labels

    def known(self, placed: ModelParts, batch: MicroBatch, flow: Flow, chunk: int) -> Any:
        """Return what the loss has to know of a pass beside its rows, for ``Flow.known``.

        All ranks call it before a step's first forward, so that it may run other models.
        """
        return None

    def __call__(
        self, x_TD: Tensor, head: Operand, flow: Flow, *, scale: float | Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the sum, and ``scale`` times its gradient by ``x_TD``.

        The head's gradient is added to the master's. The share is [1 + F], the figures' after the
        loss's, and unscaled; a number alone where there are none.

        Args:
            x_TD: normed rows of this rank.
            head: the head's matrix [V, D], this rank's share of its rows.
            flow: the pass.
            scale: one over the units of the whole batch.
            chunk: rows whose logits exist at once.
        """
        return loss_and_gradients(x_TD, head, flow, scale=scale, chunk=chunk)

    def score(self, x_TD: Tensor, head: Operand, flow: Flow, *, chunk: int) -> Tensor:
        """Return the share alone, for held-out data."""
        return summed_loss(x_TD, head, flow, chunk=chunk)


CROSS_ENTROPY = Objective()


def segments(batch: MicroBatch) -> Iterator[tuple[str, slice]]:
    """Yield what each segment of a whole micro-batch is known by, its tokens and labels, and its
    rows."""
    rows_2T, start = torch.stack([batch.ids_T, batch.labels_T]).numpy(), 0
    for length in batch.lengths:
        rows = slice(start, start + length)
        yield sha256(rows_2T[:, rows].tobytes()).hexdigest()[:32], rows
        start += length
