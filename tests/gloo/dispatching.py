"""Routed rows on several ranks, and what one rank makes of all of them.

T rows of a rank, D hidden, K experts per token, E experts, F width, R rows after dispatch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.config.base import Record
from moefold.config.slot import build
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.moe.dispatch.base import Dispatcher
from moefold.moe.dispatch.config import (
    AllGather,
    AllToAll,
    AllToAllOnce,
    LocalExperts,
    Padded,
    Spread,
    TwoLevel,
)

E, D, F = 8, 6, 4
ROOM = 64
WAYS: dict[str, Record] = {
    "alltoall": AllToAll(),
    "once": AllToAllOnce(),
    "allgather": AllGather(),
    "two_level": TwoLevel(node=2),
    "padded": Padded(max_rows=ROOM),
    "spread": Spread(max_rows=3 * ROOM),
}


def open_world(sizes: str, ranks: int) -> World:
    """Return the groups of a layout on this rank."""
    return World.open(Folding(Sizes.parse(sizes), ranks), "cpu", 20)


@dataclass(frozen=True)
class Routed:
    """The rows of one rank and where they go."""

    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    cotangent_TD: Tensor

    @property
    def no_drop(self) -> bool:
        """Whether no entry says "none"."""
        return bool((self.experts_TK < E).all())


NAMES = ("x_TD", "weights_TK", "experts_TK", "cotangent_TD")
CASES = ("even", "dropped", "idle", "one_rank", "one_expert", "top_8")


def routed(case: str, rank: int) -> Routed:
    """Return the rows of a rank; every rank can draw those of all."""
    generator = torch.Generator().manual_seed(100 * CASES.index(case) + rank)
    top_k = {"one_expert": 1, "top_8": 8}.get(case, 3)
    rows = {"even": 7, "idle": 0 if rank == 1 else 4}.get(case, 3 + 2 * rank)
    scores_TE = torch.rand(rows, E, generator=generator)
    if case == "one_rank":
        scores_TE[:, :4] += 1
    if case == "one_expert":
        scores_TE[:, 5] += 1
    if case == "idle":
        scores_TE[:, 3] -= 1
    experts_TK = scores_TE.topk(top_k, dim=1).indices
    if case == "dropped":
        experts_TK = torch.where(torch.rand(rows, top_k, generator=generator) < 0.3, E, experts_TK)
        experts_TK[rows - 1 - rank :] = E
    draw = [torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (D, top_k, D)]
    weights_TK = torch.where(experts_TK < E, draw[1], 0)
    return Routed(draw[0], weights_TK, experts_TK, draw[2])


def joined(parts: list[Routed]) -> Routed:
    """Return the rows of several ranks as one rank's."""
    return Routed(**{name: torch.cat([vars(part)[name] for part in parts]) for name in NAMES})


def expert_weights() -> tuple[Tensor, Tensor]:
    """Return the weights of all experts whole, [E, F, D] and [E, D, F]."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((E, F, D), (E, D, F))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)  # type: ignore[return-value]


class _Tail(torch.autograd.Function):
    """Rows past ``end`` are NaN, and so are their gradients: nobody may read either."""

    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, end: int) -> Tensor:
        ctx.end = end
        return _spoilt(x_RX, end)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _spoilt(grad, ctx.end), None


def _spoilt(x_RX: Tensor, end: int) -> Tensor:
    x_RX = x_RX.clone()
    x_RX[end:] = torch.nan
    return x_RX


def run_experts(
    x_RD: Tensor, offs_E: Tensor, probs_R: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """Return each expert's results; what lies past the last offset is NaN both ways."""
    starts, ends = [0, *offs_E.tolist()[:-1]], offs_E.tolist()
    x_RD, probs_R = _Tail.apply(x_RD, ends[-1]), _Tail.apply(probs_R, ends[-1])  # type: ignore[assignment]
    pieces = []
    for e, (start, end) in enumerate(zip(starts, ends, strict=True)):
        hidden = torch.tanh(x_RD[start:end] @ w_in[e].t())
        hidden = hidden * probs_R[start:end, None].to(hidden.dtype)
        pieces.append(hidden @ w_out[e].t())
    y_RD = torch.cat([*pieces, x_RD.new_zeros(x_RD.shape[0] - ends[-1], D)])
    return _Tail.apply(y_RD, ends[-1])  # type: ignore[return-value]


@dataclass(frozen=True)
class Results:
    """What a dispatch there and back gives, with every gradient."""

    out_TD: Tensor
    dx_TD: Tensor
    dweights_TK: Tensor
    dw_in: Tensor
    dw_out: Tensor
    overflow: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: value for name, value in vars(self).items() if name != "overflow"}


def there_and_back(
    record: Record, rows: Routed, w_in: Tensor, w_out: Tensor, world: World | None = None
) -> Results:
    """Dispatch, run the experts that are here, combine, and go back."""
    dispatcher: Dispatcher = build(record, E)
    world = world or World.single()
    x_TD = rows.x_TD.clone().requires_grad_()
    weights_TK = rows.weights_TK.clone().requires_grad_()
    w_in, w_out = (w.clone().requires_grad_() for w in (w_in, w_out))
    sent = dispatcher.dispatch(x_TD, weights_TK, rows.experts_TK, rows.no_drop, world)
    y_RD = run_experts(sent.x_RD, sent.offs_E, sent.probs_R, w_in, w_out)
    out_TD = dispatcher.combine(y_RD, sent.handle, rows.no_drop, world)
    (out_TD * rows.cotangent_TD).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (w_in, w_out)]
    assert x_TD.grad is not None and weights_TK.grad is not None
    dw_in, dw_out = grads
    return Results(out_TD.detach(), x_TD.grad, weights_TK.grad, dw_in, dw_out, sent.overflow)


def sources(world: World) -> tuple[int, ...]:
    """Return the ranks whose rows come to the experts of this rank, in the order of ep, etp."""
    return world.group("tp_ep").ranks


def here(world: World, w_in: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's pieces of the experts' weights."""
    spot, sizes = world.experts, world.folding.sizes
    e, f = E // sizes.ep, F // sizes.etp
    es, fs = slice(spot.ep * e, spot.ep * e + e), slice(spot.etp * f, spot.etp * f + f)
    return w_in[es, fs], w_out[es, :, fs]


def expected(case: str, world: World) -> Results:
    """Return this rank's share of what one rank makes of all rows that come together."""
    ranks = sources(world)
    parts = [routed(case, rank) for rank in ranks]
    whole = there_and_back(LocalExperts(), joined(parts), *expert_weights())
    place, counts = ranks.index(world.rank), [part.x_TD.shape[0] for part in parts]
    out_TD, dx_TD, dweights_TK = (
        t.split(counts)[place] for t in (whole.out_TD, whole.dx_TD, whole.dweights_TK)
    )
    return Results(out_TD, dx_TD, dweights_TK, *here(world, whole.dw_in, whole.dw_out))


def gap(ours: Results, theirs: Results) -> float:
    """Return the largest error of any tensor, relative to its largest value; NaN if any is."""
    worst = 0.0
    for name, want in theirs.named().items():
        got = ours.named()[name]
        assert got.shape == want.shape, (name, got.shape, want.shape)
        if want.numel():
            error = float((got - want).abs().max() / want.abs().max().clamp(min=1.0))
            worst = error if error != error else max(worst, error)
    return worst
