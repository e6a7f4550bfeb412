"""Gathers each sharded matrix on one owner rank, for updates that need full ones (Muon).

Data ranks have runs of a parameter's elements, tensor ranks slices of each matrix. Every matrix has
one owner among the data ranks: runs are sent to the owner, slices are gathered, and each rank
receives back the elements that it updates. All ranks compute the same owners, balanced over all
matrices at once.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import exchange, gather
from moefold.comm.group import Group
from moefold.mesh.partition import assign_owners


@dataclass(frozen=True)
class MatrixSource:
    """How a parameter made of matrices is sharded over ranks."""

    name: str
    shape: tuple[int, ...]
    """Shape of this rank's shard, as a stack of matrices in the last two dims."""
    element_ranges: tuple[tuple[int, int], ...]
    """Range of elements of ``shape`` that each rank of ``shard_group`` updates."""
    shard_group: Group
    slice_group: Group | None
    """Tensor ranks that have the slices of each matrix; None if matrices are not sliced."""
    dim: int = 0
    """The matrix dim that is sliced, -2 or -1."""


class Matrix(NamedTuple):
    """One matrix of a parameter, or this rank's slice of it."""

    source: MatrixSource
    start: int
    """Offset in the parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.source.shape[-2:]

    def overlap(self, rank: int) -> tuple[int, int]:
        """Return the range of the matrix's elements that a rank updates, in the parameter."""
        first, last = self.source.element_ranges[rank]
        low = max(first, self.start)
        return low, max(low, min(last, self.start + math.prod(self.shape)))


class ShardedMatrices:
    """Implements :class:`moefold.optim.base.FullMatrices` for parameters that ranks share.

    ``sources`` are the parameters whose update needs full matrices, the same on all ranks that
    share them; ``empty`` is an empty tensor of the pieces' dtype and device.
    """

    def __init__(
        self,
        sources: Sequence[MatrixSource],
        shapes: Mapping[str, tuple[int, ...]],
        empty: Tensor,
    ) -> None:
        """Assign matrices to owners."""
        self.shapes = shapes
        by_ranks: dict[tuple[int, ...], list[MatrixSource]] = defaultdict(list)
        for source in sources:
            by_ranks[source.shard_group.ranks].append(source)
        self._groups = [_MatrixGroup(group, empty) for group in by_ranks.values()]

    def gather(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the full matrices that this rank owns, assembled from all ranks' pieces."""
        return [matrix for group in self._groups for matrix in group.gather(pieces)]

    def scatter(self, matrices: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's pieces of all owners' matrices, in the shapes of ``like``."""
        remaining = iter(matrices)
        pieces = dict[str, Tensor]()
        for group in self._groups:
            pieces |= group.scatter([next(remaining) for _ in group.owned], like)
        return pieces


class _MatrixGroup:
    """The matrices that one group of ranks shards."""

    def __init__(self, sources: Sequence[MatrixSource], empty: Tensor) -> None:
        self._ranks = sources[0].shard_group
        self._empty = empty
        me = self._ranks.index
        ranks = range(self._ranks.size)
        matrices = [
            Matrix(source, start)
            for source in sources
            for start in range(0, math.prod(source.shape), math.prod(source.shape[-2:]))
        ]
        owners = assign_owners([math.prod(matrix.shape) for matrix in matrices], len(ranks))
        owned = [[m for m, o in zip(matrices, owners, strict=True) if o == rank] for rank in ranks]
        self.owned = owned[me]
        self._updated_parts = [[(m, *m.overlap(me)) for m in owned[rank]] for rank in ranks]
        """By owner: parts of its matrices that this rank updates."""
        self._owned_parts = [
            [(n, *m.overlap(rank)) for n, m in enumerate(self.owned)] for rank in ranks
        ]
        """By rank: parts of this owner's matrices that the rank updates."""

    def gather(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        sent = [
            self._local_view(pieces, matrix, low, high)
            for parts in self._updated_parts
            for matrix, low, high in parts
        ]
        matrices = [self._empty.new_empty(matrix.shape) for matrix in self.owned]
        received = iter(self._exchange(sent, self._updated_parts, self._owned_parts))
        for parts in self._owned_parts:
            for number, low, high in parts:
                start = self.owned[number].start
                matrices[number].view(-1)[low - start : high - start] = next(received)
        # Gather slices to full matrices, in one all-gather for each group.
        slice_groups = [m.source.slice_group for m in self.owned if m.source.slice_group]
        for group in {group.ranks: group for group in slice_groups}.values():
            sliced = [i for i, m in enumerate(self.owned) if m.source.slice_group is group]
            with group.recorder.module("optimizer"):
                rows = gather(torch.cat([matrices[i].reshape(-1) for i in sliced]), group)
            columns = rows.split([matrices[i].numel() for i in sliced], 1)
            for i, slices in zip(sliced, columns, strict=True):
                matrix = self.owned[i]
                matrices[i] = torch.cat([p.view(matrix.shape) for p in slices], matrix.source.dim)
        return matrices

    def scatter(self, matrices: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = []
        for full, (source, _) in zip(matrices, self.owned, strict=True):
            if source.slice_group is not None:
                full = full.chunk(source.slice_group.size, source.dim)[source.slice_group.index]
            flat.append(full.reshape(-1))
        sent = [
            flat[number][low - self.owned[number].start : high - self.owned[number].start]
            for parts in self._owned_parts
            for number, low, high in parts
        ]
        names = dict.fromkeys(m.source.name for parts in self._updated_parts for m, *_ in parts)
        pieces = {name: torch.empty_like(like[name]) for name in names if name in like}
        received = iter(self._exchange(sent, self._owned_parts, self._updated_parts))
        for parts in self._updated_parts:
            for matrix, low, high in parts:
                values = next(received)
                if low < high:
                    self._local_view(pieces, matrix, low, high).copy_(values)
        return pieces

    def _local_view(
        self, pieces: Mapping[str, Tensor], matrix: Matrix, low: int, high: int
    ) -> Tensor:
        """Return elements of a parameter as a view of this rank's piece; may be empty."""
        if low == high:
            return self._empty
        first = matrix.source.element_ranges[self._ranks.index][0]
        return pieces[matrix.source.name].view(-1)[low - first : high - first]

    def _exchange(
        self,
        sent: Sequence[Tensor],
        send_parts: Sequence[Sequence[tuple[object, int, int]]],
        receive_parts: Sequence[Sequence[tuple[object, int, int]]],
    ) -> Sequence[Tensor]:
        """Send parts in the order of ``send_parts``; return those of ``receive_parts`` in order."""
        counts, expected = (
            [sum(high - low for _, low, high in parts) for parts in by_rank]
            for by_rank in (send_parts, receive_parts)
        )
        with self._ranks.recorder.module("optimizer"):
            row = exchange(torch.cat([self._empty, *sent]), self._ranks, counts, expected)
        return row.split([high - low for parts in receive_parts for _, low, high in parts])
