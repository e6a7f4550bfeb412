"""What each way of sending rows sends, by formula: bytes of one rank, there and back and backward.

Rows are of D elements of ``width`` bytes, weights of as many bytes, ids and counts of 8. A forward
exchange of n rows is followed, in backward, by one of n rows the other way, so that the sums below
are over what leaves (``out``) and what arrives (``come``): either leaves the rank once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Entries = Sequence[Sequence[int]]
"""Experts of each of a rank's tokens; E or more for none."""
COUNT = ID = 8


@dataclass(frozen=True)
class Setting:
    """Sizes, and the routing of every rank that shares experts, by (ep, etp)."""

    ep: int
    etp: int
    experts: int
    hidden: int
    top_k: int
    width: int
    routing: dict[tuple[int, int], Entries]

    def needs(self, source: tuple[int, int], target: int, each: int, once: bool) -> int:
        """Return rows that a rank has for another: its copies, or its tokens where ``once``.

        ``each`` is the number of experts of the target.
        """
        mine = range(target * each, target * each + each)
        hits = [sum(expert in mine for expert in token) for token in self.routing[source]]
        return sum(map(bool, hits)) if once else sum(hits)


def alltoall(s: Setting, p: int, i: int, once: bool = False) -> int:
    """Copies, or with ``once`` tokens, to the ranks of their experts."""
    each = s.experts // s.ep
    row = s.hidden * s.width
    weights = s.top_k * s.width if once else s.width
    ids = s.top_k * ID if once else 0
    out = sum(s.needs((p, i), q, each, once) for q in range(s.ep) if q != p)
    come = sum(s.needs((q, i), p, each, once) for q in range(s.ep) if q != p)
    slices = [sum(s.needs((q, j), p, each, once) for q in range(s.ep)) for j in range(s.etp)]
    told = (2 * s.ep if once else s.experts) * COUNT * (s.ep * s.etp - 1)
    there = out * (row + weights + ids) + slices[i] * (s.etp - 1) * (row + weights + ids)
    back = come * row + (sum(slices) - slices[i]) * row
    backward = out * row + slices[i] * (s.etp - 1) * row
    backward += (come + sum(slices) - slices[i]) * (row + weights)
    return told + there + back + backward


def alltoall_once(s: Setting, p: int, i: int) -> int:
    """Tokens once to each rank: as many rows as the sum over tokens of their distinct ranks."""
    return alltoall(s, p, i, once=True)


def two_level(s: Setting, p: int, i: int, node: int = 2) -> int:
    """Tokens once to each node, and from there once to each rank."""
    each, nodes = s.experts // s.ep, s.ep // node
    here, place = divmod(p, node)
    row, weights, ids = s.hidden * s.width, s.top_k * s.width, s.top_k * ID

    def across(source: int, to: int) -> int:
        return s.needs((source, i), to, each * node, True)

    def inside(relay: int, rank: int, slice_: int) -> int:
        """Rows that a rank of this node hands on: those of its place on all nodes."""
        sources = [n * node + relay for n in range(nodes)]
        return sum(s.needs((q, slice_), here * node + rank, each, True) for q in sources)

    out = sum(across(p, n) for n in range(nodes) if n != here)
    out += sum(inside(place, rank, i) for rank in range(node) if rank != place)
    come = sum(across(n * node + place, here) for n in range(nodes) if n != here)
    come += sum(inside(rank, place, i) for rank in range(node) if rank != place)
    slices = [sum(inside(rank, place, j) for rank in range(node)) for j in range(s.etp)]
    told = (nodes + 2 * s.ep) * COUNT * (s.ep * s.etp - 1)
    there = (out + slices[i] * (s.etp - 1)) * (row + weights + ids)
    back = (come + sum(slices) - slices[i]) * row
    backward = (out + slices[i] * (s.etp - 1)) * row
    backward += (come + sum(slices) - slices[i]) * (row + weights)
    return told + there + back + backward


def allgather(s: Setting, p: int, i: int) -> int:
    """All rows to all ranks, and scattered sums back."""
    ranks, row, weights = s.ep * s.etp, s.hidden * s.width, s.top_k * s.width
    mine = len(s.routing[p, i])
    others = sum(len(tokens) for tokens in s.routing.values()) - mine
    told = (1 + s.ep) * COUNT * (ranks - 1)
    there = mine * (ranks - 1) * (row + weights + s.top_k * ID)
    return told + there + others * row + mine * (ranks - 1) * row + others * (row + weights)


def padded(s: Setting, p: int, i: int, room: int) -> int:
    """Copies in equal splits; what is sent does not depend on the routing."""
    row, n = s.hidden * s.width, room * (s.ep - 1) + room * s.ep * (s.etp - 1)
    told = s.experts * COUNT * (s.ep * s.etp - 1)
    return told + n * (4 * row + 2 * s.width)


def spread(s: Setting, p: int, i: int, room: int) -> int:
    """Copies in equal splits to ranks that send them on in equal splits."""
    dealt = -(-room // s.ep)
    row, first = s.hidden * s.width, dealt * (s.ep - 1)
    told = s.experts * COUNT * (s.ep * s.etp - 1)
    return told + first * (4 * row + 2 * s.width) + padded(s, p, i, dealt + s.ep)
