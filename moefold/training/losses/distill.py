"""Distillation: a model learns a teacher's distribution at each label.

T rows of this rank, P rows of the tensor group, D hidden of the teacher, W = 2 K + 1 numbers a row,
as :func:`moefold.layers.divergence.top_probabilities` returns them.

The teacher is a model in the run's layout whose forward runs before the step's; only its last
normed rows are saved until the loss. Alternatively its K largest probabilities at each label are
stored: a file of fp32 rows for each data rank, with the labels of one segment after another;
``index.json`` records what was scored, and the file and first row of each segment.
"""

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from moefold.comm.agree import run_on_first
from moefold.comm.collectives import gather_objects, sum_
from moefold.convert.importer import import_folder
from moefold.data.batch import IGNORE_INDEX, MicroBatch
from moefold.data.config import DataError
from moefold.data.tokenizer import from_path
from moefold.files import read_json, write_json
from moefold.kernels.operand import Operand
from moefold.layers.divergence import (
    compare_full,
    compare_top,
    divergence_and_gradients,
    top_probabilities,
)
from moefold.layers.flow import Flow
from moefold.model.config import Decoder
from moefold.model.init import initialise
from moefold.parallel.apply import ModelParts, build_flow, build_parts
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.score import forward, score, unsharded_head
from moefold.spec.tuning import freeze, without_tuning
from moefold.training.losses.base import Objective, OpenRun, segment_digests
from moefold.training.losses.config import Distill
from moefold.training.model_checkpoint import fill_from_folder

_log = logging.getLogger("moefold.training")
INDEX_FILE = "index.json"
ROWS_FILE = "{}.rows"


def build_distillation(record: Distill) -> "Distillation":
    """Return the loss that a record describes."""
    return (Distillation if record.stored is None else TopKDistillation)(record)


class Distillation(Objective):
    """Mean KL divergence over labels in training; cross-entropy on held-out data."""

    record: Distill
    teacher: ModelParts
    """The teacher's parts on this rank."""
    _state: ShardedState

    def setup(self, job: OpenRun) -> Self:
        """Load the teacher; raises ``DataError`` if its tokenizer differs from the run's."""
        record = self.record
        folder = Path(self.record.teacher)
        if (folder / "tokenizer.json").is_file():
            difference = job.tokenizer.first_difference(from_path(str(folder)))
            if difference is not None:
                number, own_token, teacher_token = difference
                raise DataError(
                    f"{folder}: the teacher's token {number} is {teacher_token!r}, the model's is "
                    f"{own_token!r}; both need one tokenizer: set data.tokenizer to "
                    f"{{kind: file, path: {folder}}}"
                )
        config = record.read_config()
        layout = record.layout(job.run.layout)
        decoder = freeze(without_tuning(config.decoder), ("*",))
        precision = job.parts.model.precision_policy.precision
        state = ShardedState(build_parts(decoder, precision, layout, job.world, "meta"))
        with import_folder(record.teacher, config=config) as imported:
            fill_from_folder(imported, state)
        for note in imported.left_out if job.world.rank == 0 else ():
            _log.warning("%s", note)
        self._state = state
        self.teacher = state.parts
        return self

    def move_out(self) -> int:
        """Move the teacher's weights to host memory."""
        return self._state.move_out()

    def for_proof(self, parts: ModelParts, decoder: Decoder, seed: int) -> Objective:
        """Return the loss with a copy of the model with other initial values as teacher."""
        frozen = freeze(without_tuning(decoder), ("*",))
        teacher = build_parts(
            frozen, parts.model.precision_policy.precision, parts.layout, parts.world
        )
        initialise(teacher.model, frozen, seed + 1, teacher.shards)
        self.teacher = ShardedState(teacher).parts
        return self

    def reference(self, parts: ModelParts, batch: MicroBatch, flow: Flow, chunk: int) -> Any:
        """Return the teacher's output; None for held-out data, which needs none."""
        return self.teacher_output(parts, batch, flow, chunk) if flow.training else None

    @torch.no_grad()
    def teacher_output(
        self, parts: ModelParts, batch: MicroBatch, flow: Flow, chunk: int
    ) -> Tensor | None:
        """Return the teacher's last normed rows [T, D]; None before the last stage."""
        return forward(self.teacher, self.teacher_flow(batch))

    def teacher_flow(self, batch: MicroBatch) -> Flow:
        """Return the teacher's forward pass for a micro-batch."""
        return build_flow(self.teacher, batch, training=False, exact=True)

    def __call__(
        self, x_TD: Tensor, head: Operand, flow: Flow, *, scale: float | Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Return the summed divergence, and its gradient."""
        t = self.record.temperature
        with unsharded_head(self.teacher):
            compare = compare_full(flow.reference, self.teacher.model.head_operand(), t, flow)
            return divergence_and_gradients(
                x_TD, head, flow, compare=compare, temperature=t, scale=scale, chunk=chunk
            )


class TopKDistillation(Distillation):
    """Divergence over the teacher's stored top K probabilities; it is loaded to write them only."""

    _folder: Path | None = None
    """Folder with the probabilities; None: the teacher runs in each step."""

    def setup(self, job: OpenRun) -> Self:
        """Open the stored probabilities; if missing, let the teacher score all training data.

        Raises:
            DataError: if they were scored with other settings than the run's.
        """
        folder = Path(self.record.stored or "")
        ranks = job.world.on_host
        settings = run_on_first(partial(_settings, self.record, job), ranks)
        if not run_on_first((folder / INDEX_FILE).is_file, ranks):
            super().setup(job)
            run_on_first(partial(folder.mkdir, parents=True, exist_ok=True), ranks)
            index = {"of": settings, "begins": self._score_training_data(job, folder)}
            run_on_first(partial(write_json, folder / INDEX_FILE, index), ranks)
            del self.teacher
        index = run_on_first(partial(read_json, folder / INDEX_FILE), ranks)
        for name, expected in settings.items():
            if (stored := index["of"].get(name)) != expected:
                raise DataError(
                    f"{folder}: was scored with {name} {stored!r}, but this run has {expected!r}; "
                    "set train.loss.stored to a new folder, so that the teacher scores again"
                )
        self._folder = folder
        self._segment_starts = index["begins"]
        self._files: dict[int, np.ndarray] = {}
        return self

    def for_proof(self, parts: ModelParts, decoder: Decoder, seed: int) -> Objective:
        """Return the loss with a teacher that runs in each step, and K for a small vocabulary."""
        top_k = max(2, decoder.vocab // 8)
        self.record = self.record.model_copy(update={"top_k": top_k})
        return super().for_proof(parts, decoder, seed)

    def __call__(
        self, x_TD: Tensor, head: Operand, flow: Flow, *, scale: float | Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Return the summed divergence, and its gradient."""
        compare = compare_top(flow.reference, head)
        t = self.record.temperature
        return divergence_and_gradients(
            x_TD, head, flow, compare=compare, temperature=t, scale=scale, chunk=chunk
        )

    def teacher_output(
        self, parts: ModelParts, batch: MicroBatch, flow: Flow, chunk: int
    ) -> Tensor | None:
        """Return the teacher's top probabilities [P, W]; None before the last stage."""
        if self._folder is None:
            return self._top_probabilities(self.teacher_flow(batch), chunk)
        if not any(part.has_head for part in parts.chunks):
            return None
        probs_TW = torch.from_numpy(self._read_stored(batch)).to(parts.world.device)
        return probs_TW[flow.whole.rows.full_row_T]

    def _top_probabilities(self, flow: Flow, chunk: int) -> Tensor | None:
        """Return the top probabilities of a micro-batch, computed by the teacher."""
        k = self.record.top_k
        temperature = self.record.temperature
        score_fn = partial(top_probabilities, k=k, temperature=temperature)
        return score(self.teacher, flow, score_fn, chunk)

    def _score_training_data(self, job: OpenRun, folder: Path) -> dict[str, tuple[int, int]]:
        """Write one file per data rank; return the file and the first row of each segment."""
        segment_starts: dict[str, tuple[int, int]] = {}
        coords = job.world.attention
        count = 0
        with ExitStack() as stack:
            file = None
            has_head = any(part.has_head for part in job.parts.chunks)
            if has_head and coords.tp == coords.cp == 0:
                path = folder / ROWS_FILE.format(coords.dp)
                file = stack.enter_context(path.open("wb"))
            for batch in job.loader.all_batches(held_out=False):
                flow = self.teacher_flow(batch)
                probs_PW = self._top_probabilities(flow, job.run.train.loss_chunk)
                if probs_PW is None:
                    continue
                probs_TW = probs_PW.new_zeros(batch.rows, probs_PW.shape[1])
                probs_TW[flow.whole.rows.full_row_T] = probs_PW
                probs_TW = sum_(probs_TW, job.world.group("cp")).float().cpu()
                if file is None:
                    continue
                for key, rows in segment_digests(batch):
                    label_TW = probs_TW[rows][batch.labels_T[rows] != IGNORE_INDEX]
                    segment_starts[key] = coords.dp, count
                    count += len(label_TW)
                    file.write(label_TW.numpy().tobytes())
        by_rank = gather_objects(segment_starts, job.world.on_host)
        return {digest: start for starts in by_rank for digest, start in starts.items()}

    def _read_stored(self, batch: MicroBatch) -> np.ndarray:
        """Return the stored probabilities of a micro-batch's rows [T, W]; 0 for rows without label.

        Raises:
            DataError: if a segment was not scored.
        """
        assert self._folder is not None
        width = 2 * self.record.top_k + 1
        probs_TW = np.zeros((batch.rows, width), np.float32)
        for (key, rows), origin in zip(segment_digests(batch), batch.sources, strict=True):
            if key not in self._segment_starts:
                raise DataError(
                    f"{self._folder}: document {origin.document} of {origin.name} was not scored; "
                    "set train.loss.stored to a new folder, so that the teacher scores again"
                )
            dp, first = self._segment_starts[key]
            if dp not in self._files:
                stored = np.memmap(self._folder / ROWS_FILE.format(dp), np.float32, "r")
                self._files[dp] = stored.reshape(-1, probs_TW.shape[1])
            rows_R = np.flatnonzero(batch.labels_T[rows] != IGNORE_INDEX) + rows.start
            last = first + len(rows_R)
            probs_TW[rows_R] = self._files[dp][first:last]
        return probs_TW


def _settings(record: Distill, job: OpenRun) -> dict[str, Any]:
    """Return the settings that identify stored probabilities."""
    with import_folder(record.teacher, config=record.read_config()) as imported:
        teacher = imported.tensors.identity()
    return {
        "teacher": teacher,
        "tokenizer": job.tokenizer.fingerprint,
        "seq": job.run.data.seq,
        "top_k": record.top_k,
        "temperature": record.temperature,
    }
