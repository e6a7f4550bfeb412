"""Top-k selection of experts, capacity drops, and counts: integer functions without gradients.

T token rows, E experts, K experts per token, G groups of e = E / G experts each, C = T * K copies
(pairs of a token and one of its experts). Ties go to the lowest id on every device.
"""

import torch
from torch import Tensor

from moefold.kernels.fused import uses_triton
from moefold.kernels.routing import fused as kernels
from moefold.moe.config import Groups, Router

SORT_LIMIT = 1024
"""Most values for which one sort on a CPU is faster than k maxima."""


@torch.no_grad()
def select(
    scores_TE: Tensor,
    top_k: int,
    *,
    bias_E: Tensor | None = None,
    groups: Groups | None = None,
    valid_T: Tensor | None = None,
) -> Tensor:
    """Return int64 ids [T, K] of the best experts by score plus bias, best first.

    With ``groups`` only experts of the best groups qualify. Ties of experts and groups go to the
    lowest id; NaN is the largest value. Rows that are not valid hold E.
    """
    if uses_triton(scores_TE) and scores_TE.dtype == torch.float32:
        limits = (1, 1, 1) if groups is None else (groups.count, groups.keep, groups.summed_scores)
        return kernels.select(scores_TE, bias_E, valid_T, top_k, *limits)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if groups is not None:
        choice_TGe = choice_TE.unflatten(1, (groups.count, choice_TE.shape[1] // groups.count))
        if groups.score == "max":
            score_TG = choice_TGe.amax(2)
        else:
            score_TG = choice_TGe.topk(groups.best, dim=2).values.sum(2)
        chosen_TG = torch.zeros_like(score_TG, dtype=torch.bool)
        chosen_TG.scatter_(1, stable_topk(score_TG, groups.keep), True)
        choice_TE = torch.where(chosen_TG[:, :, None], choice_TGe, -torch.inf).flatten(1)
    experts_TK = stable_topk(choice_TE, top_k)
    if valid_T is None:
        return experts_TK
    return torch.where(valid_T[:, None], experts_TK, scores_TE.shape[1])


@torch.no_grad()
def stable_topk(values_TE: Tensor, k: int) -> Tensor:
    """Return the ids [T, k] of the k largest of each row, largest first, ties by lowest id.

    ``torch.topk`` does not define ties. On a CPU k maxima (torch guarantees their first index) take
    as long as one ``topk`` and a third of a stable sort; elsewhere, and for few values, one sort.
    """
    if values_TE.device.type != "cpu" or values_TE.numel() <= SORT_LIMIT:
        return values_TE.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    # Selected values become -inf, below all remaining ones.
    remaining_TE = values_TE.clamp(min=torch.finfo(values_TE.dtype).min)
    picks = []
    for _ in range(k):
        pick_T1 = remaining_TE.max(dim=1, keepdim=True).indices
        remaining_TE.scatter_(1, pick_T1, -torch.inf)
        picks.append(pick_T1)
    return torch.cat(picks, dim=1)


@torch.no_grad()
def capacity_mask(
    experts_TK: Tensor, weights_TK: Tensor | None, token_T: Tensor, limit: int, experts: int
) -> Tensor:
    """Return bool [T, K]: the copies kept if each expert takes at most ``limit``.

    The largest weights are kept, ties by lowest global token id; without weights the lowest token
    ids. Copies for the sentinel ``experts`` are never kept.
    """
    top_k = experts_TK.shape[1]
    # Stable sorts from the least significant key to the most: token, weight, expert.
    row_T = token_T.argsort(stable=True)
    entry_K = torch.arange(top_k, device=row_T.device)
    copy_C = (row_T[:, None] * top_k + entry_K).flatten()
    if weights_TK is not None:
        weight_C = weights_TK.flatten().index_select(0, copy_C)
        copy_C = copy_C.index_select(0, weight_C.argsort(descending=True, stable=True))
    expert_C, order_C = experts_TK.flatten().index_select(0, copy_C).sort(stable=True)
    first_C = torch.searchsorted(expert_C, expert_C)
    rank_C = torch.arange(expert_C.shape[0], device=expert_C.device) - first_C
    stays_C = (rank_C < limit) & (expert_C < experts)
    copy_C = copy_C.index_select(0, order_C)
    kept_C = torch.zeros_like(stays_C).scatter_(0, copy_C, stays_C)
    return kept_C.view_as(experts_TK)


@torch.no_grad()
def count(experts_TK: Tensor, experts: int) -> Tensor:
    """Return int64 [E]: the number of copies for each expert, without those of the sentinel E.

    Integer sums are exact in any order, so atomics on a device are deterministic.
    """
    if uses_triton(experts_TK) and experts <= kernels.MAX_BUCKETS:
        return kernels.count(experts_TK, experts)
    expert_C = experts_TK.flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=expert_C.device)
    return counts.scatter_add_(0, expert_C, torch.ones_like(expert_C))[:experts].clone()


def require_places(router: str, experts_TK: Tensor, record: Router, training: bool) -> None:
    """Require that a choice [T, K] in training has as many columns as the record's ``places``.

    Raises:
        ValueError: if not, since dispatch relies on it. Outside training K may differ.
    """
    chosen = experts_TK.shape[1]
    places = record.places
    if training and chosen != places:
        raise ValueError(
            f"{router}.choose returns {chosen} experts per token, but its record's places is "
            f"{places}: make them equal, and set partial = True if some may be empty"
        )
