"""Exchange of clones' weights, in forward and again in backward, and of their gradients.

All shapes are fixed, whichever ranks have clones, and nothing is read on the host. A weight is cut
into P pieces. Each rank receives one piece of all experts, and forwards that piece of the clones
that each rank has: a rank sends (P - 1) / P of the weights of e + s experts. Direct sends from the
owners would need buffers for s of them between each pair of ranks. Gradients return by the same
route: the rank with a piece sums the gradients of its clones, in the order of ranks.

E experts, e owned experts and s slots for clones on each of P ranks, N elements of a piece.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from moefold.comm.collectives import exchange
from moefold.comm.group import Group
from moefold.kernels.gradients import GradientSink, precomputed
from moefold.kernels.operand import Operand


def append_clones(
    values: Sequence[Tensor], expert_Ps: Tensor, ranks: Group, label: str | None = None
) -> tuple[Tensor, ...]:
    """Append this rank's clones to each of its weights: [e, ...] becomes [e + s, ...].

    An empty slot holds some expert's weight, which no row reads.
    """
    slots = expert_Ps.shape[1]
    pieces_EN = _exchange_evenly(_split_pieces(values, ranks.size), ranks, label)
    expert_R = expert_Ps.flatten().clamp(max=pieces_EN.shape[0] - 1)
    received = _exchange_evenly(pieces_EN.index_select(0, expert_R), ranks, label)
    shapes = [value.shape[1:] for value in values]
    clones = _join_pieces(received, slots, shapes)
    return tuple(torch.cat(pair) for pair in zip(values, clones, strict=True))


def reduce_clone_gradients(
    gradients: Sequence[Tensor], expert_Ps: Tensor, experts: int, ranks: Group, label: str
) -> list[Tensor]:
    """Return the gradients [e, ...] of this rank's experts, summed over all their clones.

    ``gradients`` [s, ...] are those of the clones on this rank; ``expert_Ps`` is E for empty slots.
    """
    received = _exchange_evenly(_split_pieces(gradients, ranks.size), ranks, label)
    total_EN = received.new_zeros(experts + 1, received.shape[1])
    for expert_s, sent in zip(expert_Ps.unbind(), received.chunk(ranks.size), strict=True):
        total_EN.index_add_(0, expert_s, sent)  # rank by rank: deterministic
    own = _exchange_evenly(total_EN[:experts], ranks, label)
    shapes = [grad.shape[1:] for grad in gradients]
    return _join_pieces(own, experts // ranks.size, shapes)


def _exchange_evenly(rows: Tensor, ranks: Group, label: str | None) -> Tensor:
    splits = [rows.shape[0] // ranks.size] * ranks.size
    return exchange(rows, ranks, splits, splits, label)


def _split_pieces(values: Sequence[Tensor], ranks: int) -> Tensor:
    """Return the pieces [P * n, N] of n experts' weights, ordered by rank."""
    flat = torch.cat([value.flatten(1) for value in values], 1)
    missing = -flat.shape[1] % ranks
    flat = pad(flat, (0, missing))
    return flat.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)


def _join_pieces(pieces: Tensor, number: int, shapes: Sequence[Size]) -> list[Tensor]:
    """Assemble ``number`` weights of each shape from their pieces."""
    sizes = [shape.numel() for shape in shapes]
    padded = pieces.unflatten(0, (-1, number)).transpose(0, 1).flatten(1)
    flat = padded[:, : sum(sizes)]
    parts = flat.split(sizes, 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


class CloneGradients(Function):
    """Maps masters [e, ...] to stand-ins [e + s, ...] and sums their gradients in one exchange.

    Stand-ins hold no values. The sink gets gradients summed over an expert and its clones, so
    deferred weight gradients need no further communication.
    """

    @staticmethod
    def forward(
        ctx: Any,
        expert_Ps: Tensor,
        ranks: Group,
        sink: GradientSink,
        *masters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return a stand-in for each master."""
        ctx.save_for_backward(expert_Ps)
        ctx.set_materialize_grads(False)
        ctx.ranks = ranks
        ctx.sink = sink
        ctx.masters = masters
        ctx.label = ranks.recorder.label
        slots = expert_Ps.shape[1]
        rows = masters[0].shape[0] + slots
        stand_ins = [w.new_zeros(()).expand(rows, *w.shape[1:]) for w in masters]
        trained = ctx.needs_input_grad[3:]
        pairs = zip(stand_ins, trained, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, needed in pairs if not needed))
        return tuple(stand_ins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Send clones' gradients to their experts' ranks, and deliver the sums to the sink."""
        (expert_Ps,) = ctx.saved_tensors
        masters: tuple[Tensor, ...] = ctx.masters
        indices = [i for i, grad in enumerate(gradients) if grad is not None]
        results: list[Tensor | None] = [None] * len(masters)
        own = masters[0].shape[0]
        present = [grad for grad in gradients if grad is not None]
        of_clones = [grad[own:] for grad in present]
        experts = own * ctx.ranks.size
        sums = reduce_clone_gradients(of_clones, expert_Ps, experts, ctx.ranks, ctx.label)
        for i, grad, clones in zip(indices, present, sums, strict=True):
            total = precomputed(grad[:own] + clones)
            results[i] = ctx.sink.deliver(masters[i], total)
        return None, None, None, *results


def leaf_operands(weights: Sequence[Operand]) -> list[Operand]:
    """Return the weights, each followed by A and B of its adapter if it has one."""
    leaves = []
    for weight in weights:
        leaves.append(weight)
        if weight.low_rank is not None:
            leaves += (weight.low_rank.a, weight.low_rank.b)
    return leaves
