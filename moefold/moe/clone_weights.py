"""Exchange of clones' weights, for a forward and again for its backward, and of their gradients.

All shapes are fixed, whichever ranks have clones, and nothing is read on the host. A weight is cut
into P pieces. Each rank receives one piece of all experts, and forwards that piece of the clones
that each rank has: a rank sends (P - 1) / P of the weights of e + s experts, where sending clones
directly from their homes would need room for s of them between each pair of ranks. Gradients return
by the same route: the rank with a piece sums the gradients of its clones, in the order of ranks.

E experts, e home experts and s slots for clones on each of P ranks, N elements of a piece.
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


def bring(
    values: Sequence[Tensor], expert_Ps: Tensor, ranks: Group, label: str | None = None
) -> tuple[Tensor, ...]:
    """Append the weights of this rank's clones to each of its weights: [e, ...] to [e + s, ...].

    An empty slot holds another expert's weight, which no row reads.
    """
    slots = expert_Ps.shape[1]
    pieces_EN = _even(_cut(values, ranks.size), ranks, label)
    wanted = expert_Ps.flatten().clamp(max=pieces_EN.shape[0] - 1)
    came = _even(pieces_EN.index_select(0, wanted), ranks, label)
    clones = _joined(came, slots, [one.shape[1:] for one in values])
    return tuple(torch.cat(pair) for pair in zip(values, clones, strict=True))


def take_home(
    gradients: Sequence[Tensor], expert_Ps: Tensor, experts: int, ranks: Group, label: str
) -> list[Tensor]:
    """Return [e, ...]: the gradients of this rank's experts summed over all their clones.

    ``gradients`` [s, ...] are of the clones on this rank; ``expert_Ps`` is E for empty slots.
    """
    came = _even(_cut(gradients, ranks.size), ranks, label)
    total_EN = came.new_zeros(experts + 1, came.shape[1])
    for expert_s, sent in zip(expert_Ps.unbind(), came.chunk(ranks.size), strict=True):
        total_EN.index_add_(0, expert_s, sent)  # rank by rank, so that it is deterministic
    home = _even(total_EN[:experts], ranks, label)
    return _joined(home, experts // ranks.size, [one.shape[1:] for one in gradients])


def _even(rows: Tensor, ranks: Group, label: str | None) -> Tensor:
    splits = [rows.shape[0] // ranks.size] * ranks.size
    return exchange(rows, ranks, splits, splits, label)


def _cut(values: Sequence[Tensor], ranks: int) -> Tensor:
    """Return the pieces [P * n, N] of n experts' weights, ordered by rank."""
    flat = torch.cat([one.flatten(1) for one in values], 1)
    flat = pad(flat, (0, -flat.shape[1] % ranks))
    return flat.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)


def _joined(pieces: Tensor, number: int, shapes: Sequence[Size]) -> list[Tensor]:
    """Assemble ``number`` weights of each shape from their pieces."""
    sizes = [shape.numel() for shape in shapes]
    flat = pieces.unflatten(0, (-1, number)).transpose(0, 1).flatten(1)[:, : sum(sizes)]
    return [
        one.unflatten(1, shape) for one, shape in zip(flat.split(sizes, 1), shapes, strict=True)
    ]


class CloneGradients(Function):
    """Maps masters [e, ...] to stand-ins [e + s, ...], whose gradients it sums in one exchange.

    The stand-ins hold no values. The sink gets gradients summed over an expert and its clones, so
    that deferred weight gradients need no further communication.
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
        ctx.ranks, ctx.sink, ctx.masters = ranks, sink, masters
        ctx.label = ranks.recorder.label
        slots = expert_Ps.shape[1]
        stand_ins = [
            one.new_zeros(()).expand(one.shape[0] + slots, *one.shape[1:]) for one in masters
        ]
        trained = ctx.needs_input_grad[3:]
        pairs = zip(stand_ins, trained, strict=True)
        ctx.mark_non_differentiable(*(one for one, live in pairs if not live))
        return tuple(stand_ins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Send clones' gradients to their experts' ranks, and deliver the sums to the sink."""
        (expert_Ps,) = ctx.saved_tensors
        masters: tuple[Tensor, ...] = ctx.masters
        live = [at for at, one in enumerate(gradients) if one is not None]
        found: list[Tensor | None] = [None] * len(masters)
        here = masters[0].shape[0]
        given = [one for one in gradients if one is not None]
        sums = take_home(
            [one[here:] for one in given], expert_Ps, here * ctx.ranks.size, ctx.ranks, ctx.label
        )
        for at, one, back in zip(live, given, sums, strict=True):
            found[at] = ctx.sink.deliver(masters[at], precomputed(one[:here] + back))
        return None, None, None, *found


def leaves(weights: Sequence[Operand]) -> list[Operand]:
    """Return the weights, each followed by A and B of its adapter, if any."""
    low = [() if one.low_rank is None else (one.low_rank.a, one.low_rank.b) for one in weights]
    return [leaf for pair in zip(weights, low, strict=True) for leaf in (pair[0], *pair[1])]
