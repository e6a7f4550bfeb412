"""Distillation: a model learns the distribution that another one has of each label.

T rows here, D hidden of the teacher. The teacher is a model in the run's layout whose forward runs
before the step's; what is kept of it until the loss are its last normed rows.
"""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from moefold.convert.importer import import_folder
from moefold.data.batch import MicroBatch
from moefold.data.config import DataError
from moefold.data.tokenizer import Tokenizer, from_path
from moefold.kernels.operand import Operand
from moefold.layers.divergence import divergence_and_gradients, whole
from moefold.layers.flow import Flow
from moefold.model.config import Decoder
from moefold.model.init import initialise
from moefold.parallel.apply import ModelParts, build, flow_of
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.score import forward, head_here
from moefold.spec.tuning import freeze, trainable
from moefold.training.losses.base import Objective
from moefold.training.losses.config import Distill
from moefold.training.model_checkpoint import fill_from


class Distillation(Objective):
    """Mean divergence over labels; held-out data has cross-entropy."""

    record: Distill
    teacher: ModelParts
    """The teacher's parts on this rank."""

    def opened(self, job: Any) -> Self:
        """Load the teacher.

        Raises:
            DataError: where its tokens are others.
        """
        record = self.record
        demand_same_tokens(Path(record.teacher), job.tokenizer)
        decoder = _frozen(record.decoder())
        layout, precision = record.layout(job.run.layout), job.precision.precision
        data = ShardedState(build(decoder, precision, layout, job.world, "meta"))
        with import_folder(record.teacher, reading=record.reading()) as imported:
            fill_from(imported, data)
        self.teacher = data.placed
        return self

    def trial(self, placed: ModelParts, subject: Any) -> Objective:
        """Return the loss with a teacher that is the model itself with other values."""
        decoder = _frozen(subject.decoder)
        parts = build(decoder, placed.model.recipe.precision, placed.layout, placed.world)
        initialise(parts.model, decoder, subject.seed + 1, parts.shards)
        self.teacher = ShardedState(parts).placed
        return self

    def known(self, placed: ModelParts, batch: MicroBatch, flow: Flow, chunk: int) -> Any:
        """Return what the teacher says, where the last stage is; held-out data needs nothing."""
        return self.told(placed, batch, flow, chunk) if flow.training else None

    @torch.no_grad()
    def told(self, placed: ModelParts, batch: MicroBatch, flow: Flow, chunk: int) -> Tensor | None:
        """Return the teacher's normed rows [T, D]."""
        return forward(self.teacher, self.asked(batch))

    def asked(self, batch: MicroBatch) -> Flow:
        """Return the teacher's pass of a micro-batch."""
        return flow_of(self.teacher, batch, training=False, exact=True)

    def __call__(
        self, x_TD: Tensor, head: Operand, flow: Flow, *, scale: float | Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Return the summed divergence, and its gradient."""
        t = self.record.temperature
        with head_here(self.teacher):
            compare = whole(flow.known, self.teacher.model.head_operand(), t, flow)
            how = {"compare": compare, "temperature": t, "scale": scale, "chunk": chunk}
            return divergence_and_gradients(x_TD, head, flow, **how)


def _frozen(decoder: Decoder) -> Decoder:
    return freeze(trainable(decoder), ("*",))


def demand_same_tokens(folder: Path, own: Tokenizer) -> None:
    """Refuse a teacher whose tokenizer, where the folder has one, numbers tokens otherwise."""
    if not (folder / "tokenizer.json").is_file():
        return
    if (found := own.first_difference(from_path(str(folder)))) is not None:
        number, ours, theirs = found
        raise DataError(
            f"{folder}: its token {number} is {theirs!r} and the model's {ours!r}: a teacher needs "
            "the model's tokenizer; name its folder as data.tokenizer"
        )
