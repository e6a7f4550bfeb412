"""Gathers sharded matrices to one owner each, for updates that need whole ones (Muon).

Data ranks hold runs of a parameter's elements, tensor ranks slices of each matrix. Every matrix has
one owner among the data ranks: runs are sent to the owner, slices are gathered, and each rank
receives back the elements that it updates. Owners are balanced over all matrices at once, and
computed alike on all ranks.
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
    """How ranks hold a parameter made of matrices."""

    name: str
    shape: tuple[int, ...]
    """Shape of this rank's shard, as a stack of matrices in the last two dims."""
    runs: tuple[tuple[int, int], ...]
    """Range of elements of ``shape`` that each rank of ``inside`` updates."""
    inside: Group
    slices: Group | None
    """Tensor ranks that hold the slices of each matrix; None where matrices are whole."""
    dim: int = 0
    """The matrix dim that is cut, -2 or -1."""


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
        """Return the range of its elements that a rank updates, as offsets in the parameter."""
        first, last = self.source.runs[rank]
        low = max(first, self.start)
        return low, max(low, min(last, self.start + math.prod(self.shape)))


class ShardedMatrices:
    """Implements :class:`moefold.optim.base.Wholes` for parameters that ranks share.

    ``sources`` are the parameters whose update needs whole matrices, the same on all ranks that
    share them; ``nothing`` is an empty tensor of the pieces' dtype and device.
    """

    def __init__(
        self,
        sources: Sequence[MatrixSource],
        shapes: Mapping[str, tuple[int, ...]],
        nothing: Tensor,
    ) -> None:
        """Assign matrices to owners."""
        self.shapes = shapes
        alike: dict[tuple[int, ...], list[MatrixSource]] = defaultdict(list)
        for source in sources:
            alike[source.inside.ranks].append(source)
        self._shared = [_Shared(shared, nothing) for shared in alike.values()]

    def gather(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the whole matrices that this rank owns, assembled from all ranks' pieces."""
        return [whole for shared in self._shared for whole in shared.gather(pieces)]

    def scatter(self, matrices: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's pieces of all owners' matrices, in the shapes of ``like``."""
        left, found = iter(matrices), dict[str, Tensor]()
        for shared in self._shared:
            found |= shared.scatter([next(left) for _ in shared.mine], like)
        return found


class _Shared:
    """The matrices whose runs are on one group of ranks."""

    def __init__(self, sources: Sequence[MatrixSource], nothing: Tensor) -> None:
        self._inside, self._nothing = sources[0].inside, nothing
        me, ranks = self._inside.index, range(self._inside.size)
        matrices = [
            Matrix(source, start)
            for source in sources
            for start in range(0, math.prod(source.shape), math.prod(source.shape[-2:]))
        ]
        owners = assign_owners([math.prod(matrix.shape) for matrix in matrices], len(ranks))
        owned = [[m for m, o in zip(matrices, owners, strict=True) if o == rank] for rank in ranks]
        self.mine = owned[me]
        self._given = [[(m, *m.overlap(me)) for m in owned[rank]] for rank in ranks]
        """By owner: parts of its matrices that this rank updates."""
        self._taken = [[(n, *m.overlap(rank)) for n, m in enumerate(self.mine)] for rank in ranks]
        """By rank: parts of this owner's matrices that the rank updates."""

    def gather(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        sent = [
            self._own(pieces, matrix, low, high)
            for given in self._given
            for matrix, low, high in given
        ]
        found = [self._nothing.new_empty(matrix.shape) for matrix in self.mine]
        received = iter(self._exchange(sent, self._given, self._taken))
        for taken in self._taken:
            for number, low, high in taken:
                start = self.mine[number].start
                found[number].view(-1)[low - start : high - start] = next(received)
        # Complete slices to whole matrices, in one all-gather for each group.
        groups = {m.source.slices.ranks: m.source.slices for m in self.mine if m.source.slices}
        for group in groups.values():
            cut = [i for i, m in enumerate(self.mine) if m.source.slices is group]
            with group.recorder.module("optimizer"):
                rows = gather(torch.cat([found[i].reshape(-1) for i in cut]), group)
            columns = rows.split([found[i].numel() for i in cut], 1)
            for i, parts in zip(cut, columns, strict=True):
                matrix = self.mine[i]
                found[i] = torch.cat([p.view(matrix.shape) for p in parts], matrix.source.dim)
        return found

    def scatter(self, matrices: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = []
        for whole, (source, _) in zip(matrices, self.mine, strict=True):
            if source.slices is not None:
                whole = whole.chunk(source.slices.size, source.dim)[source.slices.index]
            flat.append(whole.reshape(-1))
        sent = [
            flat[number][low - self.mine[number].start : high - self.mine[number].start]
            for taken in self._taken
            for number, low, high in taken
        ]
        names = dict.fromkeys(m.source.name for given in self._given for m, *_ in given)
        found = {name: torch.empty_like(like[name]) for name in names if name in like}
        received = iter(self._exchange(sent, self._taken, self._given))
        for given in self._given:
            for matrix, low, high in given:
                part = next(received)
                if low < high:
                    self._own(found, matrix, low, high).copy_(part)
        return found

    def _own(self, pieces: Mapping[str, Tensor], matrix: Matrix, low: int, high: int) -> Tensor:
        """Return elements of a parameter as a view of this rank's piece; empty for no elements."""
        if low == high:
            return self._nothing
        first = matrix.source.runs[self._inside.index][0]
        return pieces[matrix.source.name].view(-1)[low - first : high - first]

    def _exchange(
        self,
        sent: Sequence[Tensor],
        given: Sequence[Sequence[tuple[object, int, int]]],
        taken: Sequence[Sequence[tuple[object, int, int]]],
    ) -> Sequence[Tensor]:
        """Exchange parts: send in the order of ``given``, return in the order of ``taken``."""
        counts, expected = (
            [sum(high - low for _, low, high in parts) for parts in way] for way in (given, taken)
        )
        with self._inside.recorder.module("optimizer"):
            row = exchange(torch.cat([self._nothing, *sent]), self._inside, counts, expected)
        return row.split([high - low for parts in taken for _, low, high in parts])
