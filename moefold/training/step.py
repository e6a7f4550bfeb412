"""One optimizer step: micro-batches forward and backward, the checks, the update.

T rows, D hidden. The loss of a step is the summed cross-entropy of its valid labels over their
global count, plus each router term weighted by its micro-batch's share of the step's valid rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.base import Record
from moefold.data.batch import MicroBatch
from moefold.kernels.cross_entropy.chunked import cross_entropy_sum, loss_and_gradients
from moefold.kernels.gradients import Accumulated
from moefold.layers.flow import Flow
from moefold.model.decoder import DecoderModel
from moefold.optim.norm import read_scalars, squared_norm
from moefold.policies.recompute import Recompute


@dataclass(frozen=True)
class StepFigures:
    """What one forward and backward of a whole batch gave, read from the device once."""

    lm_loss: float
    """Mean cross-entropy over the step's labels, in nats."""
    grad_norm: float
    """Global norm of the gradient, before clipping."""
    router_terms: dict[str, float]
    """Each balancing term, averaged over layers and over the step's valid rows."""
    tokens: int
    """Valid rows."""

    @property
    def finite(self) -> bool:
        """Whether the update may be made."""
        figures = (self.lm_loss, self.grad_norm, *self.router_terms.values())
        return all(abs(f) < float("inf") for f in figures)


def gradients(
    model: DecoderModel, batches: Sequence[MicroBatch], recompute: Record | None, loss_chunk: int
) -> StepFigures:
    """Accumulate into ``.grad`` the gradients of the step's loss; every trained parameter gets one.

    Args:
        model: the model; its gradients are dropped first.
        batches: the micro-batches of the step, in order.
        recompute: policy record, or None to keep all that backward needs.
        loss_chunk: rows whose logits exist at once.
    """
    labels = max(sum(b.n_labels for b in batches), 1)
    tokens = sum(b.n_valid for b in batches)
    rows = max(tokens, 1)
    for parameter in model.parameters():
        parameter.grad = None
    for _, mixture in model.mixtures():
        mixture.balance.start_step()
    losses, terms = list[Tensor](), dict[str, Tensor]()
    for batch in batches:
        flow = Flow(batch, model.recipe, Accumulated(), Recompute(recompute))
        loss, values = _micro_batch(model, flow, 1 / labels, batch.n_valid / rows, loss_chunk)
        losses.append(loss)
        for name, value in values.items():
            share = value.detach() * (batch.n_valid / rows)
            terms[name] = terms[name] + share if name in terms else share
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm_squared = squared_norm([p.grad for p in trained if p.grad is not None])
    loss, norm, *figures = read_scalars(
        torch.stack(losses).sum(), norm_squared.sqrt().to(losses[0].device), *terms.values()
    )
    return StepFigures(loss / labels, norm, dict(zip(terms, figures, strict=True)), tokens)


def _micro_batch(
    model: DecoderModel, flow: Flow, scale: float, share: float, chunk: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one micro-batch forward and backward; returns its summed loss and its router terms."""
    x_TD, by_layer = model(flow)
    head = model.head_operand()
    loss, dx_TD = loss_and_gradients(
        x_TD.detach(), head, flow.rows.labels_T, scale=scale, chunk=chunk
    )
    values, weighted = model.router_terms(by_layer)
    roots, starts = [x_TD], [dx_TD]
    if weighted is not None and weighted.requires_grad:
        roots.append(weighted)
        starts.append(torch.full_like(weighted, share))
    if x_TD.requires_grad:
        torch.autograd.backward(roots, starts)
    return loss, values


@torch.no_grad()
def evaluate(
    model: DecoderModel, batches: Iterable[MicroBatch], loss_chunk: int
) -> tuple[float, int, float]:
    """Return summed cross-entropy in nats, number of labels, and bytes of their text.

    Micro-batches are taken one by one: a held-out set may be larger than memory.
    """
    total, labels, n_bytes = torch.zeros((), dtype=torch.float64), 0, 0.0
    for batch in batches:
        x_TD, _ = model(Flow(batch, model.recipe, training=False))
        summed = cross_entropy_sum(x_TD, model.head_operand(), batch.labels_T, chunk=loss_chunk)
        total += summed.double().cpu()
        labels += batch.n_labels
        n_bytes += batch.n_bytes
    return float(total), labels, n_bytes
