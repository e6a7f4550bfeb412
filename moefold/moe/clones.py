"""Hot experts cloned for one micro-batch: which rank computes how many rows of which expert.

All ranks make the same plan from all senders' counts, on the device and in a fixed number of
operators, whatever the counts are: the host reads nothing. A rank gives away what it has above the
mean, of its largest experts first. What is given and what there is room for, each sorted by size,
are laid along one line (the north-west corner rule of the transport problem), and where two
intervals meet, rows move. A rank keeps the largest of what would fill its slots, and what is left
over is laid out again. That is done for several caps near the mean at once; the plan with the
emptiest fullest rank is taken.

P ranks of ``ep``, S of ``etp``, X = P * S senders, E experts, e of them at home on each rank, s
slots for clones on each, C caps, N = E * P, T rows of this rank, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.moe.dispatch.config import Clones
from moefold.moe.dispatch.routing_plan import gather_counts, sort_copies

CAPS = (1000, 1005, 1010, 1020, 1030, 1045, 1060, 1100, 1150, 1250, 1500, 2000)
"""Rows of the fullest rank that a plan aims at, in thousandths of the mean."""
TURNS = 3
"""How often what is left over is laid out again."""


class ClonePlan(NamedTuple):
    """Where the copies of this rank's rows are computed. Part of a layer's decision."""

    seats_TK: Tensor
    """int64 seat of each copy, ``rank * (e + s) + place``, experts at home first; one past the last
    for copies that are not sent. Dispatchers take seats for experts."""
    expert_Ps: Tensor
    """int64 expert whose clone is in each rank's slot; E where there is none."""


@torch.no_grad()
def plan_clones(experts_TK: Tensor, experts: int, record: Clones, world: World) -> ClonePlan:
    """Exchange counts, and return where each copy goes; E says that one is not sent."""
    ranks = world.group("ep").size
    order = sort_copies(experts_TK, experts)
    counts_XE = gather_counts(order.counts_B, world).flatten(0, 1)
    quota_EP = quotas(counts_XE.sum(0), ranks, record)
    seat_EP, expert_Ps = lay(quota_EP, record.slots)
    share_EP = shares(counts_XE, quota_EP, world.group("tp_ep").index)
    # Copies lie by expert, and those of one expert go to its ranks in order.
    ends_N = share_EP.flatten().cumsum(0)
    at_TK = torch.searchsorted(ends_N, order.row_TK, right=True)
    none = seat_EP.new_full((1,), experts + ranks * record.slots)
    return ClonePlan(torch.cat([seat_EP.flatten(), none])[at_TK], expert_Ps)


def quotas(counts_E: Tensor, ranks: int, record: Clones) -> Tensor:
    """Return int64 [E, P]: the rows of each expert that each rank computes."""
    home_EP = _at_home(counts_E, ranks)
    cap_C = counts_E.new_tensor(CAPS) * counts_E.sum()
    cap_C = cap_C.add(1000 * ranks - 1).div(1000 * ranks, rounding_mode="floor")
    start_EP = torch.where(home_EP, counts_E[:, None], 0)
    quota_CEP = start_EP.expand(len(CAPS), -1, -1)
    for _ in range(TURNS):
        quota_CEP = _moved(quota_CEP, home_EP, cap_C, record)
    best_1 = quota_CEP.sum(1).amax(1).argmin().reshape(1)
    return quota_CEP.index_select(0, best_1)[0]


def _at_home(counts_E: Tensor, ranks: int) -> Tensor:
    """Return bool [E, P]: which rank has each expert anyway."""
    ids_E = torch.arange(counts_E.shape[0], device=counts_E.device)
    home_E = ids_E.div(counts_E.shape[0] // ranks, rounding_mode="floor")
    return home_E[:, None] == torch.arange(ranks, device=counts_E.device)


def _moved(quota_CEP: Tensor, home_EP: Tensor, cap_C: Tensor, record: Clones) -> Tensor:
    """Move rows from ranks above a cap to ranks below it, as far as slots allow."""
    ranks = home_EP.shape[1]
    load_CP, clone_CEP = quota_CEP.sum(1), (quota_CEP > 0) & ~home_EP
    free_CP = record.slots - clone_CEP.sum(1)
    over_CP = (load_CP - cap_C[:, None]).clamp(min=0)
    own_CPe = torch.where(home_EP, quota_CEP, 0).sum(2).unflatten(1, (ranks, -1))
    big_CPe, at_CPe = own_CPe.sort(dim=2, descending=True, stable=True)
    before_CPe = big_CPe.cumsum(2) - big_CPe
    give_CPe = (over_CP[:, :, None] - before_CPe).clamp(min=0).minimum(big_CPe)
    give_CE = torch.zeros_like(give_CPe).scatter_(2, at_CPe, give_CPe).flatten(1)
    room_CP = torch.where(free_CP > 0, (cap_C[:, None] - load_CP).clamp(min=0), 0)
    move_CEP = _meeting(give_CE, room_CP)
    # Of those that want a new slot the largest get one.
    fresh_CEP = (move_CEP > 0) & ~clone_CEP
    wish_CEP = torch.where(fresh_CEP, move_CEP, -1)
    by_size = wish_CEP.argsort(dim=1, descending=True, stable=True)
    turn_CEP = by_size.argsort(dim=1, stable=True)
    fits_CEP = (turn_CEP < free_CP[:, None]) & (move_CEP >= record.least_rows)
    move_CEP = torch.where(fits_CEP | ~fresh_CEP, move_CEP, 0)
    return quota_CEP + move_CEP - torch.where(home_EP, move_CEP.sum(2, keepdim=True), 0)


def _meeting(give_CE: Tensor, room_CP: Tensor) -> Tensor:
    """Return [C, E, P]: how much of each two intervals is common, both laid out by size."""
    give, giver = give_CE.sort(dim=1, descending=True, stable=True)
    room, taker = room_CP.sort(dim=1, descending=True, stable=True)
    given, taken = give.cumsum(1), room.cumsum(1)
    ends_CEP = torch.minimum(given[:, :, None], taken[:, None])
    starts_CEP = torch.maximum((given - give)[:, :, None], (taken - room)[:, None])
    meet_CEP = (ends_CEP - starts_CEP).clamp(min=0)
    at_E, at_P = giver.argsort(dim=1)[:, :, None], taker.argsort(dim=1)[:, None]
    meet_CEP = meet_CEP.gather(1, at_E.expand_as(meet_CEP))
    return meet_CEP.gather(2, at_P.expand_as(meet_CEP))


def lay(quota_EP: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return each expert's seat [E, P] on each rank that has any of its rows, and [P, s] the expert
    in each slot.
    """
    experts, ranks = quota_EP.shape
    home_EP = _at_home(quota_EP[:, 0], ranks)
    ids_E1 = torch.arange(experts, device=quota_EP.device)[:, None]
    clone_EP = (quota_EP > 0) & ~home_EP
    slot_EP = clone_EP.cumsum(0) - 1
    per_rank = experts // ranks
    place_EP = torch.where(home_EP, ids_E1 % per_rank, per_rank + slot_EP)
    first_P = torch.arange(ranks, device=quota_EP.device) * (per_rank + slots)
    # One slot more takes all that are no clones.
    expert_Ps = quota_EP.new_full((ranks, slots + 1), experts)
    slot_PE = torch.where(clone_EP, slot_EP, slots).t()
    expert_Ps.scatter_(1, slot_PE, torch.where(clone_EP, ids_E1, experts).t())
    return first_P + place_EP, expert_Ps[:, :slots].contiguous()


def shares(counts_XE: Tensor, quota_EP: Tensor, sender: int) -> Tensor:
    """Return int64 [E, P]: the rows that one sender sends of each expert to each rank.

    A rank's own rows stay where it computes any of their expert; the rest goes in order.
    """
    ranks = quota_EP.shape[1]
    slices = counts_XE.shape[0] // ranks
    counts_PSE = counts_XE.unflatten(0, (ranks, slices))
    stay_PE = counts_PSE.sum(1).minimum(quota_EP.t())
    before_PSE = counts_PSE.cumsum(1) - counts_PSE
    own_PSE = (stay_PE[:, None] - before_PSE).clamp(min=0).minimum(counts_PSE)
    left_XE, free_EP = (counts_PSE - own_PSE).flatten(0, 1), quota_EP - stay_PE.t()
    end_E, to_EP = left_XE.cumsum(0)[sender], free_EP.cumsum(1)
    start_E, from_EP = end_E - left_XE[sender], to_EP - free_EP
    ends_EP = torch.minimum(end_E[:, None], to_EP)
    share_EP = (ends_EP - torch.maximum(start_E[:, None], from_EP)).clamp(min=0)
    share_EP[:, sender // slices] += own_PSE[sender // slices, sender % slices]
    return share_EP
