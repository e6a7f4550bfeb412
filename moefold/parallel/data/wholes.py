"""Whole matrices for an update that cannot be made from pieces.

Ranks that share a parameter hold runs of its elements; ranks of its tensor axis hold slices of
each matrix. Every matrix has one owner among the first, who gets it whole: runs go to the owner,
slices are gathered, and of the result each rank gets back what it updates. Owners are balanced
over all matrices at once, and the same on all ranks.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all_plain, gather
from moefold.comm.group import Group
from moefold.mesh.share import share_out


@dataclass(frozen=True)
class Source:
    """A parameter with matrices, as the ranks hold it."""

    name: str
    shape: tuple[int, ...]
    """Of what this rank and those that share it with it compute with."""
    whole: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    """The elements of ``shape`` that each rank of ``inside`` updates."""
    inside: Group
    slices: Group | None
    """Ranks that hold the other slices of each matrix."""
    dim: int = 0
    """The dim of the matrix that is cut, -2 or -1."""


class Matrix(NamedTuple):
    """One matrix of a stack."""

    source: Source
    start: int
    """Its first element in the parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slice."""
        return self.source.shape[-2:]

    @property
    def size(self) -> int:
        """Elements of the slice."""
        return self.shape[0] * self.shape[1]

    def overlap(self, rank: int) -> tuple[int, int]:
        """Return which of its elements a rank updates, counted from the rank's first."""
        first, last = self.source.runs[rank]
        low, high = max(first, self.start), min(last, self.start + self.size)
        return (low - first, max(low, high) - first)


class Wholes:
    """Brings matrices together and takes them apart; see ``moefold.optim.base.Wholes``."""

    def __init__(
        self, sources: Sequence[Source], shapes: Mapping[str, tuple[int, ...]], nothing: Tensor
    ) -> None:
        """Choose the owners.

        Args:
            sources: parameters whose update needs whole matrices, the same on ranks that share.
            shapes: whole shape of every parameter that this rank updates.
            nothing: an empty tensor of the pieces' dtype and device.
        """
        self.shapes = shapes
        self._exchanges: list[_Exchange] = []
        alike: dict[tuple[int, ...], list[Source]] = defaultdict(list)
        for source in sources:
            alike[source.inside.ranks].append(source)
        for shared in alike.values():
            self._exchanges.append(_Exchange(shared, nothing))

    def gather(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the matrices that this rank works on, made of all ranks' pieces."""
        return [whole for exchange in self._exchanges for whole in exchange.gather(pieces)]

    def scatter(self, matrices: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's pieces of all ranks' matrices, in the shapes of ``like``."""
        left, found = list(matrices), dict[str, Tensor]()
        for exchange in self._exchanges:
            count = len(exchange.mine)
            found |= exchange.scatter(left[:count], like)
            left = left[count:]
        return found


class _Exchange:
    """The matrices that the same ranks share."""

    def __init__(self, sources: Sequence[Source], nothing: Tensor) -> None:
        self._inside = inside = sources[0].inside
        self._nothing = nothing
        matrices = [
            Matrix(source, start)
            for source in sources
            for start in range(0, math.prod(source.shape), math.prod(source.shape[-2:]))
        ]
        owners = share_out([matrix.size for matrix in matrices], inside.size)
        self._owned = [
            [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == rank]
            for rank in range(inside.size)
        ]
        self.mine = self._owned[inside.index]
        self._given = [self._count(owned, inside.index) for owned in self._owned]
        self._taken = [self._count(self.mine, rank) for rank in range(inside.size)]

    def gather(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        parts = [
            pieces[matrix.source.name].view(-1)[low:high]
            for matrix, (low, high) in self._overlaps(self._owned, self._inside.index)
        ]
        received = self._exchange(torch.cat([self._nothing, *parts]), self._given, self._taken)
        found: list[list[Tensor]] = [[] for _ in self.mine]
        at = 0
        for rank in range(self._inside.size):
            for number, matrix in enumerate(self.mine):
                low, high = matrix.overlap(rank)
                found[number].append(received[at : at + high - low])
                at += high - low
        slices = [
            torch.cat(parts).view(matrix.shape)
            for parts, matrix in zip(found, self.mine, strict=True)
        ]
        return self._completed(slices)

    def scatter(self, matrices: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = [
            _slice(whole, matrix.source).reshape(-1)
            for whole, matrix in zip(matrices, self.mine, strict=True)
        ]
        parts = []
        for rank in range(self._inside.size):
            for matrix, slice_ in zip(self.mine, flat, strict=True):
                low, high = matrix.overlap(rank)
                first = matrix.source.runs[rank][0] - matrix.start
                parts.append(slice_[low + first : high + first])
        received = self._exchange(torch.cat([self._nothing, *parts]), self._taken, self._given)
        names = dict.fromkeys(m.source.name for owned in self._owned for m in owned)
        found = {name: torch.empty_like(like[name]) for name in names if name in like}
        at = 0
        for matrix, (low, high) in self._overlaps(self._owned, self._inside.index):
            found[matrix.source.name].view(-1)[low:high] = received[at : at + high - low]
            at += high - low
        return found

    def _exchange(self, sent: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        with self._inside.recorder.module("optimizer"):
            return all_to_all_plain(sent, self._inside, given, taken)

    def _completed(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole matrices of slices, gathered in one operation for each group."""
        done = list(slices)
        groups = {m.source.slices.ranks: m.source.slices for m in self.mine if m.source.slices}
        for group in groups.values():
            cut = [i for i, m in enumerate(self.mine) if m.source.slices is group]
            with group.recorder.module("optimizer"):
                rows = gather(torch.cat([slices[i].reshape(-1) for i in cut]), group)
            columns = rows.split([slices[i].numel() for i in cut], 1)
            for i, parts in zip(cut, columns, strict=True):
                matrix = self.mine[i]
                done[i] = torch.cat([p.view(matrix.shape) for p in parts], matrix.source.dim)
        return done

    @staticmethod
    def _overlaps(
        owned: Iterable[Iterable[Matrix]], rank: int
    ) -> Iterable[tuple[Matrix, tuple[int, int]]]:
        """Yield what a rank updates of each owner's matrices, where there is any."""
        for matrices in owned:
            for matrix in matrices:
                low, high = matrix.overlap(rank)
                if low < high:
                    yield matrix, (low, high)

    @staticmethod
    def _count(matrices: Iterable[Matrix], rank: int) -> int:
        return sum(high - low for low, high in (matrix.overlap(rank) for matrix in matrices))


def _slice(whole: Tensor, source: Source) -> Tensor:
    if source.slices is None:
        return whole
    return whole.chunk(source.slices.size, source.dim)[source.slices.index]
