"""Planning of clones of hot experts: how many rows of which expert each rank computes.

All ranks compute the same plan from all senders' counts, on the device, in a fixed number of
operators and without a host read. A rank gives away its rows above a cap, those of its largest
experts first. Surpluses and free capacity, each sorted by size, are laid out along one line
(the north-west corner rule of the transportation problem), and rows move where two intervals
overlap. A rank accepts the largest moves that its slots allow; the rest is laid out again. Several
caps near the mean are tried at once; the plan whose fullest rank has the fewest rows wins.

P ranks of ``ep``, S of ``etp``, X = P * S senders, E experts, e own experts and s slots for clones
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
ITERATIONS = 3
"""Number of times that surpluses are laid out."""


class ClonePlan(NamedTuple):
    """Assigns this rank's copies of rows to experts and clones; part of a layer's decision."""

    physical_TK: Tensor
    """int64 physical expert of each copy, ``rank * (e + s) + index``, clones last on each rank; one
    past the last for copies that are not sent. Dispatchers treat physical experts as experts."""
    expert_Ps: Tensor
    """int64 expert cloned in each slot of each rank; E for an empty slot."""


@torch.no_grad()
def plan_clones(experts_TK: Tensor, experts: int, record: Clones, world: World) -> ClonePlan:
    """Exchange counts and plan clones; ``experts_TK`` is E for copies that are not sent."""
    ranks = world.group("ep").size
    order = sort_copies(experts_TK, experts)
    counts_XE = gather_counts(order.counts_B, world).flatten(0, 1)
    quota_EP = quotas(counts_XE.sum(0), ranks, record)
    physical_EP, expert_Ps = place_clones(quota_EP, record.slots)
    count_EP = send_counts(counts_XE, quota_EP, world.group("tp_ep").index)
    # Copies are sorted by expert; those of one expert are assigned to its ranks in order.
    ends_N = count_EP.flatten().cumsum(0)
    at_TK = torch.searchsorted(ends_N, order.row_TK, right=True)
    none = physical_EP.new_full((1,), experts + ranks * record.slots)
    return ClonePlan(torch.cat([physical_EP.flatten(), none])[at_TK], expert_Ps)


def quotas(counts_E: Tensor, ranks: int, record: Clones) -> Tensor:
    """Return int64 [E, P]: the rows of each expert that each rank computes."""
    owned_EP = _owner_mask(counts_E, ranks)
    unit = 1000 * ranks
    cap_C = counts_E.new_tensor(CAPS) * counts_E.sum()
    # Rounded up to whole rows.
    cap_C = cap_C.add(unit - 1).div(unit, rounding_mode="floor")
    start_EP = torch.where(owned_EP, counts_E[:, None], 0)
    quota_CEP = start_EP.expand(len(CAPS), -1, -1)
    for _ in range(ITERATIONS):
        quota_CEP = _move_rows(quota_CEP, owned_EP, cap_C, record)
    best_1 = quota_CEP.sum(1).amax(1).argmin().reshape(1)
    return quota_CEP.index_select(0, best_1)[0]


def _owner_mask(counts_E: Tensor, ranks: int) -> Tensor:
    """Return bool [E, P]: whether a rank owns an expert."""
    ids_E = torch.arange(counts_E.shape[0], device=counts_E.device)
    owner_E = ids_E.div(counts_E.shape[0] // ranks, rounding_mode="floor")
    return owner_E[:, None] == torch.arange(ranks, device=counts_E.device)


def _move_rows(quota_CEP: Tensor, owned_EP: Tensor, cap_C: Tensor, record: Clones) -> Tensor:
    """Move rows from ranks above a cap to ranks below it, as far as slots allow; return quotas."""
    ranks = owned_EP.shape[1]
    load_CP = quota_CEP.sum(1)
    clone_CEP = (quota_CEP > 0) & ~owned_EP
    free_CP = record.slots - clone_CEP.sum(1)
    over_CP = (load_CP - cap_C[:, None]).clamp(min=0)
    own_CE = torch.where(owned_EP, quota_CEP, 0).sum(2)
    own_CPe = own_CE.unflatten(1, (ranks, -1))
    big_CPe, index_CPe = own_CPe.sort(dim=2, descending=True, stable=True)
    before_CPe = big_CPe.cumsum(2) - big_CPe
    surplus_CPe = (over_CP[:, :, None] - before_CPe).clamp(min=0).minimum(big_CPe)
    surplus_CE = torch.zeros_like(surplus_CPe).scatter_(2, index_CPe, surplus_CPe).flatten(1)
    below_CP = (cap_C[:, None] - load_CP).clamp(min=0)
    room_CP = torch.where(free_CP > 0, below_CP, 0)
    move_CEP = _overlaps(surplus_CE, room_CP)
    # Slots go to the largest of the moves that need one.
    new_CEP = (move_CEP > 0) & ~clone_CEP
    size_CEP = torch.where(new_CEP, move_CEP, -1)
    by_size = size_CEP.argsort(dim=1, descending=True, stable=True)
    order_CEP = by_size.argsort(dim=1, stable=True)
    fits_CEP = (order_CEP < free_CP[:, None]) & (move_CEP >= record.least_rows)
    move_CEP = torch.where(fits_CEP | ~new_CEP, move_CEP, 0)
    given_CE1 = move_CEP.sum(2, keepdim=True)
    return quota_CEP + move_CEP - torch.where(owned_EP, given_CE1, 0)


def _overlaps(surplus_CE: Tensor, room_CP: Tensor) -> Tensor:
    """Return [C, E, P]: overlap of each surplus with each rank's room, both laid out by size."""
    surplus, giver = surplus_CE.sort(dim=1, descending=True, stable=True)
    room, taker = room_CP.sort(dim=1, descending=True, stable=True)
    sent = surplus.cumsum(1)
    taken = room.cumsum(1)
    sent_before = sent - surplus
    taken_before = taken - room
    ends_CEP = torch.minimum(sent[:, :, None], taken[:, None])
    starts_CEP = torch.maximum(sent_before[:, :, None], taken_before[:, None])
    overlap_CEP = (ends_CEP - starts_CEP).clamp(min=0)
    index_E = giver.argsort(dim=1)[:, :, None]
    index_P = taker.argsort(dim=1)[:, None]
    overlap_CEP = overlap_CEP.gather(1, index_E.expand_as(overlap_CEP))
    return overlap_CEP.gather(2, index_P.expand_as(overlap_CEP))


def place_clones(quota_EP: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return physical experts [E, P] on ranks with rows of them, and experts [P, s] of slots."""
    experts, ranks = quota_EP.shape
    owned_EP = _owner_mask(quota_EP[:, 0], ranks)
    ids_E1 = torch.arange(experts, device=quota_EP.device)[:, None]
    clone_EP = (quota_EP > 0) & ~owned_EP
    slot_EP = clone_EP.cumsum(0) - 1
    per_rank = experts // ranks
    index_EP = torch.where(owned_EP, ids_E1 % per_rank, per_rank + slot_EP)
    first_P = torch.arange(ranks, device=quota_EP.device) * (per_rank + slots)
    # An extra slot collects all entries that are not clones.
    expert_Ps = quota_EP.new_full((ranks, slots + 1), experts)
    slot_PE = torch.where(clone_EP, slot_EP, slots).t()
    expert_Ps.scatter_(1, slot_PE, torch.where(clone_EP, ids_E1, experts).t())
    return first_P + index_EP, expert_Ps[:, :slots].contiguous()


def send_counts(counts_XE: Tensor, quota_EP: Tensor, sender: int) -> Tensor:
    """Return int64 [E, P]: the rows of each expert that one sender sends to each rank.

    As many as possible of a rank's own rows stay on it; the rest is assigned in order.
    """
    ranks = quota_EP.shape[1]
    slices = counts_XE.shape[0] // ranks
    counts_PSE = counts_XE.unflatten(0, (ranks, slices))
    stay_PE = counts_PSE.sum(1).minimum(quota_EP.t())
    before_PSE = counts_PSE.cumsum(1) - counts_PSE
    own_PSE = (stay_PE[:, None] - before_PSE).clamp(min=0).minimum(counts_PSE)
    remaining_XE = (counts_PSE - own_PSE).flatten(0, 1)
    free_EP = quota_EP - stay_PE.t()
    end_E = remaining_XE.cumsum(0)[sender]
    to_EP = free_EP.cumsum(1)
    start_E = end_E - remaining_XE[sender]
    from_EP = to_EP - free_EP
    ends_EP = torch.minimum(end_E[:, None], to_EP)
    starts_EP = torch.maximum(start_E[:, None], from_EP)
    count_EP = (ends_EP - starts_EP).clamp(min=0)
    own_rank = sender // slices
    count_EP[:, own_rank] += own_PSE[own_rank, sender % slices]
    return count_EP
