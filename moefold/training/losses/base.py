"""The loss of a step. Cross-entropy is the base class; other losses override its methods.

T rows of this rank, P rows of the tensor group, D hidden, F figures reported besides the loss.
"""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.config.base import Record
from moefold.data.batch import MicroBatch
from moefold.data.loader import Loader
from moefold.data.tokenizer import Tokenizer
from moefold.kernels.operand import Operand
from moefold.layers.flow import Flow
from moefold.layers.loss import loss_and_gradients, summed_loss
from moefold.model.config import Decoder
from moefold.parallel.apply import ModelParts
from moefold.run import Run


class OpenRun(Protocol):
    """The part of the trainer that a loss may use to set itself up; the same on all ranks."""

    run: Run
    folder: Path
    world: World
    parts: ModelParts
    loader: Loader
    tokenizer: Tokenizer

    @property
    def step_number(self) -> int:
        """Optimizer steps done since the start of the run."""
        ...

    @property
    def continues(self) -> bool:
        """Whether the run resumed from its own state, and did not begin here or as a fork."""
        ...


class Objective:
    """Mean cross-entropy over labels; the base of losses.

    A step's loss is a sum over units, here labels, divided by their number in the whole batch. It
    ends the last stage's forward, where all ranks of the stage call it for each micro-batch.

    Args:
        record: a record of the slot LOSS, whose owner is this class.
    """

    figures: tuple[str, ...] = ()
    """Names of figures reported besides the loss, each a mean over units."""

    def __init__(self, record: Record | None = None) -> None:
        self.record: Any = record

    def setup(self, job: OpenRun) -> Self:
        """Load what the loss needs besides a trainer's model, on all ranks; return the loss."""
        return self

    def move_out(self) -> int:
        """Move what the loss keeps on the device to host memory until it is used; return bytes."""
        return 0

    def for_proof(self, parts: ModelParts, decoder: Decoder, seed: int) -> "Objective":
        """Return the loss for a layout proof, which has a small model and no files.

        Args:
            parts: the model's parts on this rank.
            decoder: the model's description.
            seed: from which its weights were drawn.
        """
        return self

    def units(self, batch: MicroBatch) -> int:
        """Return the number of units in a whole micro-batch on the host."""
        return batch.n_labels

    def reference(self, parts: ModelParts, batch: MicroBatch, flow: Flow, chunk: int) -> Any:
        """Return further inputs of the loss for a micro-batch, which become ``Flow.reference``.

        All ranks call it before a step's first forward, so that it may run other models.
        """
        return None

    def __call__(
        self, x_TD: Tensor, head: Operand, flow: Flow, *, scale: float | Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the unscaled sum, and its gradient by ``x_TD``, scaled.

        The sum is [1 + F], loss first, or a scalar if F is 0. The head's gradient is added to the
        master's.

        Args:
            x_TD: normed rows of this rank.
            head: the head's matrix [V, D], of which this rank holds a part of the rows.
            flow: the forward pass.
            scale: 1 over the number of units in the whole batch.
            chunk: number of rows whose logits exist at a time.
        """
        return loss_and_gradients(x_TD, head, flow, scale=scale, chunk=chunk)

    def score(self, x_TD: Tensor, head: Operand, flow: Flow, *, chunk: int) -> Tensor:
        """Return this rank's part of the sum without gradients, for held-out data."""
        return summed_loss(x_TD, head, flow, chunk=chunk)


CROSS_ENTROPY = Objective()


def segment_digests(batch: MicroBatch) -> Iterator[tuple[str, slice]]:
    """Yield for each segment of a whole micro-batch a digest of its tokens and labels, and its
    rows."""
    rows_2T = torch.stack([batch.ids_T, batch.labels_T]).numpy()
    start = 0
    for length in batch.lengths:
        rows = slice(start, start + length)
        digest = sha256(rows_2T[:, rows].tobytes())
        yield digest.hexdigest()[:32], rows
        start += length
