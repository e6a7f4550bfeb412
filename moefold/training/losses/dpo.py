"""Direct preference optimisation on pairs of a chosen and a rejected answer.

T rows of this rank, P rows of the tensor group, N segments of a micro-batch: chosen and rejected in
turn. With log-probabilities of whole answers, sums over labels, of model p and reference r,

    h = (log p(chosen) - log p(rejected)) - (log r(chosen) - log r(rejected))

the loss of a pair is ``-log sigmoid(beta h)`` (arXiv 2305.18290, eq. 7) or, for IPO,
``(h - 1 / (2 beta))^2`` (arXiv 2310.12036, eq. 17). The rows of an answer are spread over context
ranks, which sum their log-probabilities and then all compute the same loss.
"""

from collections import defaultdict
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.checkpoint.errors import CheckpointError
from moefold.comm.agree import run_on_first
from moefold.comm.collectives import gather_objects, sum_
from moefold.data.batch import MicroBatch
from moefold.files import read_json, write_json
from moefold.kernels.operand import Operand
from moefold.layers.flow import Flow
from moefold.layers.loss import label_losses, loss_and_gradients
from moefold.model.config import Decoder
from moefold.optim.norm import widest_dtype
from moefold.parallel.apply import ModelParts, build_flow
from moefold.parallel.pipeline.score import score
from moefold.training.losses.base import Objective, OpenRun, segment_digests
from moefold.training.losses.config import Dpo

REFERENCE_FILE = "reference.json"


def build_preference(record: Dpo) -> "Preference":
    """Return the loss that a record describes."""
    return (StoredPreference if record.reference == "stored" else Preference)(record)


class Preference(Objective):
    """Mean loss over pairs, with the model without its adapters as reference."""

    record: Dpo
    figures = ("preference/margin", "preference/accuracy")

    def units(self, batch: MicroBatch) -> int:
        """Return the number of pairs."""
        return len(batch.lengths) // 2

    def reference(self, parts: ModelParts, batch: MicroBatch, flow: Flow, chunk: int) -> Any:
        """Return the reference's log-probability of each segment [N]; on the last stage only."""
        with parts.model.precision_policy.without_adapters():
            reference_flow = build_flow(parts, batch, training=False, exact=True)
            return score(parts, reference_flow, log_probabilities, chunk)

    def __call__(
        self, x_TD: Tensor, head: Operand, flow: Flow, *, scale: float | Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Return sums over pairs [3] of loss, margin and correct order, and the scaled gradient.

        As the loss is known only after all logits, the products with the head are computed twice.
        """
        sums, slope_N = self._pair_sums(log_probabilities(x_TD, head, flow, chunk=chunk), flow)
        # A row's cross-entropy is minus its log-probability.
        weight_P = torch.zeros(flow.whole.rows.rows, dtype=slope_N.dtype, device=x_TD.device)
        segment_P = flow.whole.rows.segment_T
        weight_P[: len(segment_P)] = -slope_N[segment_P]
        _, dx_TD = loss_and_gradients(x_TD, head, flow, scale=weight_P * scale, chunk=chunk)
        return sums, dx_TD

    def score(self, x_TD: Tensor, head: Operand, flow: Flow, *, chunk: int) -> Tensor:
        """Return sums over pairs [3] of loss, margin and correct order."""
        return self._pair_sums(log_probabilities(x_TD, head, flow, chunk=chunk), flow)[0]

    def _pair_sums(self, log_N: Tensor, flow: Flow) -> tuple[Tensor, Tensor]:
        """Return sums over pairs [3], and the loss's derivative by each log-probability [N]."""
        gain_N = log_N - flow.reference
        h = gain_N[0::2] - gain_N[1::2]
        beta = self.record.beta
        if self.record.form == "ipo":
            distance = h - 1 / (2 * beta)
            losses = distance.square()
            slope = 2 * distance
        else:
            losses = -F.logsigmoid(beta * h)
            slope = -beta * torch.sigmoid(-beta * h)
        better = (h > 0).sum()
        sums = torch.stack([losses.sum(), beta * h.sum(), better.to(h.dtype)])
        # All ranks that share the rows have the same sums: only the first one returns them.
        if flow.world.group("tp_cp").index > 0:
            sums = torch.zeros_like(sums)
        return sums, torch.stack([slope, -slope], 1).flatten()


class StoredPreference(Preference):
    """Loss whose reference is the model at the start of the run; its scores are in the folder."""

    _stored: dict[str, float]

    def setup(self, job: OpenRun) -> Self:
        """Read the reference's scores; before the first step, compute them for all answers.

        Raises:
            CheckpointError: if the run has trained already and the file of scores is missing.
        """
        path = job.folder / REFERENCE_FILE
        if not run_on_first(path.exists, job.world.on_host):
            if job.step_number and job.continues:
                raise CheckpointError(
                    f"{path} is missing, and the model has been trained since the reference was "
                    "scored; restore the file, or start a new run"
                )
            scores: dict[str, float] = {}  # log-probability of every answer, by its digest
            for batch in job.loader.all_batches():
                flow = build_flow(job.parts, batch, training=False, exact=True)
                log_N = score(job.parts, flow, log_probabilities, job.run.train.loss_chunk)
                if log_N is not None:
                    digests = (digest for digest, _ in segment_digests(batch))
                    scores |= zip(digests, log_N.tolist(), strict=True)
            by_rank = gather_objects(scores, job.world.on_host)
            all_scores = {digest: score for part in by_rank for digest, score in part.items()}
            run_on_first(partial(write_json, path, all_scores), job.world.on_host)
        self._stored = run_on_first(partial(read_json, path), job.world.on_host)
        return self

    def for_proof(self, parts: ModelParts, decoder: Decoder, seed: int) -> Objective:
        """Return the loss with a reference whose log-probabilities are all 0."""
        self._stored = defaultdict(float)
        return self

    def reference(self, parts: ModelParts, batch: MicroBatch, flow: Flow, chunk: int) -> Any:
        """Return the stored log-probability of each segment [N]."""
        stored = [self._stored[digest] for digest, _ in segment_digests(batch)]
        device = parts.world.device
        return torch.tensor(stored, dtype=widest_dtype(device)).to(device)


@torch.no_grad()
def log_probabilities(x_TD: Tensor, head: Operand, flow: Flow, *, chunk: int) -> Tensor:
    """Return the summed log-probability [N] of each whole segment's labels, in the widest dtype."""
    rows = flow.whole.rows
    losses_P = label_losses(x_TD, head, flow, chunk=chunk)
    wide = widest_dtype(losses_P.device)
    number_N1 = torch.arange(len(rows.lengths), device=losses_P.device)[:, None]
    in_segment_NP = rows.segment_T == number_N1
    # One sum per segment: scatter-add would not fix the order of additions.
    valid_P = losses_P[: rows.n_valid].to(wide)
    log_N = -torch.where(in_segment_NP, valid_P, 0).sum(1)
    return sum_(log_N, flow.world.group("cp"))
