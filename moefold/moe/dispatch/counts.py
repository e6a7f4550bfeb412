"""How many rows go where: what ranks tell each other before they send them.

P ranks of ``ep``, S of ``etp``, C counts, X senders, E experts here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all, gather, gather_rows, scatter_rows
from moefold.comm.group import Group
from moefold.comm.world import World


def everyone(counts_C: Tensor, world: World) -> Tensor:
    """Return int64 [P, S, C]: the counts of every rank that shares this rank's experts."""
    sizes = world.folding.sizes
    return gather(counts_C, world.group("tp_ep")).view(sizes.ep, sizes.etp, -1)


def host_counts(counts: Tensor) -> list[int]:
    """Return counts as numbers: the one host read of an exact dispatch."""
    return counts.tolist()


def slots_of(counts_XE: Tensor, rows: int) -> Tensor:
    """Return int64 [rows]: the expert of each row, where rows lie by sender and then by expert."""
    senders, experts = counts_XE.shape
    ids_X = torch.arange(experts, device=counts_XE.device).repeat(senders)
    return ids_X.repeat_interleave(counts_XE.flatten(), output_size=rows)


class Plan(NamedTuple):
    """How rows go to the ranks of experts and, where these are sliced, to all slices."""

    send: list[int]
    """Rows for each rank of the group."""
    receive: list[int]
    """Rows from each."""
    slices: list[int]
    """Rows that come to each rank of ``etp``, all of which each of them needs."""

    @classmethod
    def of(cls, send: list[int], coming: list[int], slice_: int) -> "Plan":
        """Read a plan from counts: ``coming`` holds, slice by slice, the rows from each rank."""
        ranks = len(send)
        slices = [coming[i : i + ranks] for i in range(0, len(coming), ranks)]
        return cls(send, slices[slice_], [sum(rows) for rows in slices])

    def out(self, x_ND: Tensor, group: Group, etp: Group) -> Tensor:
        """Send rows, differentiable; returns the rows that come to any slice of the experts."""
        return gather_rows(all_to_all(x_ND, group, self.send, self.receive), etp, self.slices)

    def back(self, y_RD: Tensor, group: Group, etp: Group) -> Tensor:
        """Add up the slices' shares of each row, and send the rows back."""
        return all_to_all(scatter_rows(y_RD, etp, self.slices), group, self.receive, self.send)
