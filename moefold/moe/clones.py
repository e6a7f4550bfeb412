"""Planning of clones of hot experts: how many rows of which expert each rank computes.

All ranks compute the same plan from all senders' counts, on the device and in a fixed number of
operators, without a host read. A rank gives away the rows that it has above a cap, those of its
largest experts first. Surpluses and free room, each sorted by size, are laid out along one line
(the north-west corner rule of the transportation problem), and rows move where two intervals
overlap. A rank accepts the largest moves that its slots allow; the rest is laid out again. This is
done at once for several caps near the mean; the plan whose fullest rank has the fewest rows wins.

P ranks of ``ep``, S of ``etp``, X = P * S senders, E experts, e home experts and s slots for clones
on each rank, C caps, N = E * P, T rows of this rank, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.world import World
from moefold.moe.dispatch.config import Clones
from moefold.moe.dispatch.routing_plan import gather_counts, sort_copies

CAPS = (1000, 1005, 1010, 1020, 1030, 1045, 1060, 1100, 1150, 1250, 1500, 2000)
"""Caps on the rows of a rank, in thousandths of the mean."""
TURNS = 3
"""Number of times that surpluses are laid out."""


class ClonePlan(NamedTuple):
    """Where the copies of this rank's rows are computed; part of a layer's decision."""

    seats_TK: Tensor
    """int64 seat of each copy, ``rank * (e + s) + place``, home experts before clones; one past the
    last for copies that are not sent. Dispatchers treat seats as experts."""
    expert_Ps: Tensor
    """int64 expert cloned in each slot of each rank; E for an empty slot."""


@torch.no_grad()
def plan_clones(experts_TK: Tensor, experts: int, record: Clones, world: World) -> ClonePlan:
    """Exchange counts and plan clones; ``experts_TK`` is E for copies that are not sent."""
    ranks = world.group("ep").size
    order = sort_copies(experts_TK, experts)
    counts_XE = gather_counts(order.counts_B, world).flatten(0, 1)
    quota_EP = quotas(counts_XE.sum(0), ranks, record)
    seat_EP, expert_Ps = lay(quota_EP, record.slots)
    share_EP = shares(counts_XE, quota_EP, world.group("tp_ep").index)
    # Copies are sorted by expert; those of one expert are assigned to its ranks in order.
    ends_N = share_EP.flatten().cumsum(0)
    at_TK = torch.searchsorted(ends_N, order.row_TK, right=True)
    none = seat_EP.new_full((1,), experts + ranks * record.slots)
    return ClonePlan(torch.cat([seat_EP.flatten(), none])[at_TK], expert_Ps)


def quotas(counts_E: Tensor, ranks: int, record: Clones) -> Tensor:
    """Return int64 [E, P]: how many rows of each expert each rank computes."""
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
    """Return bool [E, P]: whether a rank is the home of an expert."""
    ids_E = torch.arange(counts_E.shape[0], device=counts_E.device)
    home_E = ids_E.div(counts_E.shape[0] // ranks, rounding_mode="floor")
    return home_E[:, None] == torch.arange(ranks, device=counts_E.device)


def _moved(quota_CEP: Tensor, home_EP: Tensor, cap_C: Tensor, record: Clones) -> Tensor:
    """Return quotas with rows moved from ranks above a cap to ranks below it, within the slots."""
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
    # The largest moves that need a new slot get one.
    fresh_CEP = (move_CEP > 0) & ~clone_CEP
    wish_CEP = torch.where(fresh_CEP, move_CEP, -1)
    by_size = wish_CEP.argsort(dim=1, descending=True, stable=True)
    turn_CEP = by_size.argsort(dim=1, stable=True)
    fits_CEP = (turn_CEP < free_CP[:, None]) & (move_CEP >= record.least_rows)
    move_CEP = torch.where(fits_CEP | ~fresh_CEP, move_CEP, 0)
    return quota_CEP + move_CEP - torch.where(home_EP, move_CEP.sum(2, keepdim=True), 0)


def _meeting(give_CE: Tensor, room_CP: Tensor) -> Tensor:
    """Return [C, E, P]: overlap of each surplus with each room, both laid out by size."""
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
    """Return seats [E, P] of experts on ranks with rows of them, and experts [P, s] of slots."""
    experts, ranks = quota_EP.shape
    home_EP = _at_home(quota_EP[:, 0], ranks)
    ids_E1 = torch.arange(experts, device=quota_EP.device)[:, None]
    clone_EP = (quota_EP > 0) & ~home_EP
    slot_EP = clone_EP.cumsum(0) - 1
    per_rank = experts // ranks
    place_EP = torch.where(home_EP, ids_E1 % per_rank, per_rank + slot_EP)
    first_P = torch.arange(ranks, device=quota_EP.device) * (per_rank + slots)
    # An extra slot collects all entries that are no clones.
    expert_Ps = quota_EP.new_full((ranks, slots + 1), experts)
    slot_PE = torch.where(clone_EP, slot_EP, slots).t()
    expert_Ps.scatter_(1, slot_PE, torch.where(clone_EP, ids_E1, experts).t())
    return first_P + place_EP, expert_Ps[:, :slots].contiguous()


def shares(counts_XE: Tensor, quota_EP: Tensor, sender: int) -> Tensor:
    """Return int64 [E, P]: how many rows of each expert one sender sends to each rank.

    As many as possible of a rank's own rows stay on it; the rest is assigned in order.
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
