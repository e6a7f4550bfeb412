"""Low-precision storage of optimizer moments: bf16, or E4M3 in groups.

Rounding is stochastic. Rounded to nearest, a moment that decays by less than half a unit in the
last place would not change: in bf16, 0.999 times a second moment rounds to that moment.

A group is a number of consecutive elements of one row (last dim) of a parameter; the last group of
a row may be shorter. Where ranks share a parameter, a rank may hold part of a group; the scale then
comes from a maximum over these ranks (:class:`MomentGroups`).

G groups on this rank, N elements of a group.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise.elements import E4M3
from moefold.kernels.quantise.expanded import decode, encode, extremes, factors

CHUNK = 1 << 20
"""Most elements whose moments are expanded to fp32 at once."""
FACTORS = 3
"""Numbers stored per group besides its codes."""
GAMMA = -0x61C8864680B583EB
MIXERS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
"""Constants of SplitMix64 (Steele et al., OOPSLA 2014), as signed numbers."""


class ElementRun(NamedTuple):
    """Consecutive elements of a row-major tensor, and their groups."""

    first: int
    """Offset of the first element in the tensor."""
    elements: int
    row: int
    """Size of the tensor's last dim; no axis of a layout cuts a group there."""
    size: int
    """Elements per group."""

    @property
    def end(self) -> int:
        """Offset after the last element."""
        return self.first + self.elements

    def group_of(self, offset: int) -> int:
        """Return the index in the tensor of an element's group."""
        groups_per_row = -(-self.row // self.size)
        row, column = divmod(offset, self.row)
        return row * groups_per_row + column // self.size

    @property
    def groups(self) -> range:
        """Indices of the groups with elements in the run."""
        if not self.elements:
            return range(0)
        return range(self.group_of(self.first), self.group_of(self.end - 1) + 1)

    @property
    def partial_groups(self) -> list[int]:
        """Indices of the groups that are only partly in the run."""
        ends = zip((self.first, self.end), (self.groups[:1], self.groups[-1:]), strict=True)
        return sorted({g for offset, near in ends if offset % self.row % self.size for g in near})

    def subrun(self, start: int, stop: int) -> "ElementRun":
        """Return elements ``start`` to ``stop`` of the run, as a run of the tensor."""
        return self._replace(first=self.first + start, elements=stop - start)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of the run of limited size that cut no group."""
        row = self.size if self.row % self.size == 0 else self.row
        step = max(1, CHUNK // row) * row
        for offset in range(self.first - self.first % row, self.end, step):
            start = offset - self.first
            yield max(0, start), min(self.elements, start + step)

    def split(self, x: Tensor) -> Tensor:
        """Return the run's elements as ``[G, N]``, padded with zeros."""
        per_row = -(-self.row // self.size)
        lead = self.first % self.row
        rows = -(-(lead + self.elements) // self.row)
        trail = rows * self.row - lead - self.elements
        x = F.pad(x, (lead, trail)).view(rows, self.row)
        missing = per_row * self.size - self.row
        x = F.pad(x, (0, missing)).view(-1, self.size)
        start = lead // self.size
        return x[start : start + len(self.groups)]

    def join(self, x_GN: Tensor) -> Tensor:
        """Return the run's elements from groups: the inverse of :meth:`split`."""
        per_row = -(-self.row // self.size)
        lead = self.first % self.row
        rows = -(-(lead + self.elements) // self.row)
        start = lead // self.size
        after = rows * per_row - start - len(x_GN)
        x_GN = F.pad(x_GN, (0, 0, start, after))
        elements = x_GN.view(rows, -1)[:, : self.row].flatten()
        return elements[lead : lead + self.elements]


class MomentPosition(NamedTuple):
    """Position of a rank's elements in its shard, and of the shard in the full parameter."""

    name: str
    first: int
    """Offset in the shard of the first element that this rank updates."""
    box: tuple[tuple[int, int], ...]
    """Box of the shard in the full parameter."""
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    seed: int = 0
    """Seed of the run, for stochastic rounding."""

    @property
    def row(self) -> int:
        """Size of the shard's last dim, at least 1."""
        start, stop = self.box[-1]
        return max(1, stop - start)

    def uniform(self, run: ElementRun, device: torch.device, step: int) -> tuple[Tensor, Tensor]:
        """Return random multiples of 2^-16 in [0, 1) for elements of the shard, one per moment.

        They depend only on seed, name, step and each element's global position. One 64-bit mix
        yields them: Philox in plain operations would take several times as long as the update.
        """
        first_row = run.first // run.row
        end_row = -(-run.end // run.row)
        row_N = torch.arange(first_row, end_row, device=device)
        place_N = torch.zeros_like(row_N)
        stride = self.shape[-1]
        for (start, stop), size in zip(self.box[-2::-1], self.shape[-2::-1], strict=True):
            length = stop - start
            place_N += (row_N % length + start) * stride
            row_N = row_N // length
            stride = stride * size
        lead = run.first % run.row
        columns = torch.arange(*self.box[-1], device=device)
        if len(row_N) == 1:
            columns = columns[lead : lead + run.elements]
            lead = 0
        offset = (place_N[:, None] + columns).flatten()[lead : lead + run.elements]
        digest = sha256(f"{self.seed}/{self.name}/{step}".encode()).digest()
        key = int.from_bytes(digest[:8], "little", signed=True)
        mixed = offset.mul_(GAMMA).add_(key)
        for shift, factor in MIXERS:
            # The shift is arithmetic: mask the copies of the sign bit.
            high = (mixed >> shift).bitwise_and_((1 << 64 - shift) - 1)
            mixed.bitwise_xor_(high).mul_(factor)
        parts = ((mixed >> at).bitwise_and_(0xFFFF) for at in (32, 48))
        first, second = (part.float().mul_(2.0**-16) for part in parts)
        return first, second


class MomentGroups(Protocol):
    """Positions of elements in parameters, and maxima over ranks that share a group."""

    def position(self, name: str) -> MomentPosition:
        """Return the position of this rank's elements in a parameter."""
        ...

    def maxima(self, parts: Mapping[tuple[str, int], Tensor]) -> Mapping[tuple[str, int], Tensor]:
        """Return each cut group's maximum over ranks; a collective of the ranks that share it."""
        ...


class Bf16Moment:
    """A moment stored in bf16."""

    def __init__(self, param: Tensor) -> None:
        self.values = torch.zeros_like(param, dtype=torch.bfloat16, requires_grad=False)

    def states(self, what: str) -> dict[str, Tensor]:
        """Return the tensors by their names."""
        return {what: self.values}

    def read(self, start: int, stop: int) -> Tensor:
        """Return some elements in fp32."""
        return self.values.view(-1)[start:stop].float()

    def write(self, start: int, stop: int, values: Tensor, drawn: Tensor) -> None:
        """Store new values, rounded stochastically with the random numbers ``drawn``."""
        wide = values.float()
        added = drawn.mul(1 << 16).int().add_(wide.view(torch.int32))
        rounded = added.bitwise_and_(-(1 << 16)).view(wide.dtype)
        self.values.view(-1)[start:stop] = torch.where(wide.isnan(), wide, rounded)


class Fp8Moment:
    """A moment stored as E4M3 codes with an expanded range, and three numbers per group."""

    def __init__(self, param: Tensor, run: ElementRun) -> None:
        self.run = run
        nothing = torch.zeros_like(param, dtype=torch.uint8, requires_grad=False)
        self.codes = nothing.view(E4M3)
        shape = len(run.groups), FACTORS
        self.factors_G3 = torch.ones(shape, dtype=torch.float32, device=param.device)
        self.pending: dict[int, Tensor] = {}
        """Values and random numbers of cut groups, until other ranks' maxima are known."""

    def states(self, what: str) -> dict[str, Tensor]:
        """Return the tensors by their names."""
        return {what: self.codes, f"{what}_groups": self.factors_G3}

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements in fp32; neither end may cut a group on this rank."""
        part = self.run.subrun(start, stop)
        codes_GN = part.split(self._bytes[start:stop]).view(E4M3)
        return part.join(decode(codes_GN, self.factors_G3[self._group_slice(part)]))

    def write(self, start: int, stop: int, values: Tensor, drawn: Tensor) -> None:
        """Store new values, rounded stochastically; groups shared by ranks are encoded later."""
        part = self.run.subrun(start, stop)
        values_GN = part.split(values.float())
        drawn_GN = part.split(drawn)
        new_G3 = factors(extremes(values_GN))
        self.factors_G3[self._group_slice(part)] = new_G3
        self._bytes[start:stop] = part.join(encode(values_GN, new_G3, drawn_GN).view(torch.uint8))
        for group in self.run.partial_groups:
            if group in part.groups:
                i = group - part.groups[0]
                self.pending[group] = torch.stack((values_GN[i], drawn_GN[i]))

    def encode_group(self, group: int, extremes_2: Tensor) -> None:
        """Encode a cut group, given the extremes of the full group."""
        factors_13 = factors(extremes_2[None])
        ends_2N = self.pending.pop(group)
        self.factors_G3[group - self.run.groups[0]] = factors_13[0]
        run = self.run
        per_row = -(-self.run.row // self.run.size)
        row, place = divmod(group, per_row)
        first = row * run.row + place * run.size
        last = min(first + run.size, (row + 1) * run.row)
        start = max(first, run.first)
        stop = min(last, run.end)
        codes_N = encode(ends_2N[:1], factors_13, ends_2N[1:]).view(torch.uint8)[0]
        own_codes = codes_N[start - first : stop - first]
        self._bytes[start - run.first : stop - run.first] = own_codes

    @property
    def _bytes(self) -> Tensor:
        return self.codes.view(torch.uint8).view(-1)

    def _group_slice(self, part: ElementRun) -> slice:
        start = part.groups[0] - self.run.groups[0]
        return slice(start, start + len(part.groups))


def encode_shared_groups(moments: Mapping[str, Sequence[Fp8Moment]], groups: MomentGroups) -> None:
    """Encode groups shared by ranks with a common scale; a collective of these ranks."""
    parts: dict[tuple[str, int], Tensor] = {}
    for name, both in moments.items():
        for group in both[0].run.partial_groups:
            parts[name, group] = torch.cat([extremes(m.pending[group][:1]) for m in both])
    for (name, group), found in groups.maxima(parts).items():
        for moment, extremes_2 in zip(moments[name], found, strict=True):
            moment.encode_group(group, extremes_2)
