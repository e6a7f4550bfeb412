"""Moments of an optimizer in fewer bits than its arithmetic has: bf16, or E4M3 in groups.

They are rounded stochastically. To nearest, a moment that decays by less than half a unit of its
format would stay what it is: in bf16 a second moment times 0.999 is the number before.

A group is so many elements of one row of a parameter, a row being its last dim; the last one of a
row may be shorter. Of a parameter that ranks share, a rank may hold part of a group: its scale is
of the whole, by one maximum over those ranks (:class:`MomentGroups`).

G groups here, N elements of a group.
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
"""Elements whose moments are wide at once."""
FACTORS = 3
"""Numbers beside the codes of a group."""
GAMMA, MIXERS = -0x61C8864680B583EB, ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
"""Of SplitMix64 (Steele et al., OOPSLA 2014), as signed numbers."""


class ElementRun(NamedTuple):
    """Consecutive elements of a row-major tensor, and the groups of them."""

    first: int
    """Place of the first one in the tensor."""
    elements: int
    row: int
    """Elements of the tensor's last dim, no axis of a layout cuts a group there."""
    size: int
    """Elements of a group."""

    @property
    def end(self) -> int:
        """The place after the last element."""
        return self.first + self.elements

    def group(self, place: int) -> int:
        """Return the number of the group, in the tensor, that an element is of."""
        return place // self.row * -(-self.row // self.size) + place % self.row // self.size

    @property
    def groups(self) -> range:
        """The numbers of the groups that have elements here."""
        if not self.elements:
            return range(0)
        return range(self.group(self.first), self.group(self.end - 1) + 1)

    @property
    def cut(self) -> list[int]:
        """Those of them that have other elements elsewhere."""
        ends = zip((self.first, self.end), (self.groups[:1], self.groups[-1:]), strict=True)
        return sorted({g for place, at in ends if place % self.row % self.size for g in at})

    def part(self, start: int, stop: int) -> "ElementRun":
        """Return some of its elements, counted from its first one."""
        return self._replace(first=self.first + start, elements=stop - start)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield parts of limited size that cut no group."""
        row = self.size if self.row % self.size == 0 else self.row
        step = max(1, CHUNK // row) * row
        places = range(self.first - self.first % row, self.end, step)
        for place in places:
            yield max(0, place - self.first), min(self.elements, place + step - self.first)

    def split(self, x: Tensor) -> Tensor:
        """Return ``[G, N]`` of this run's elements; zeros stand for those that are not here."""
        per_row, lead = -(-self.row // self.size), self.first % self.row
        rows = -(-(lead + self.elements) // self.row)
        x = F.pad(x, (lead, rows * self.row - lead - self.elements)).view(rows, self.row)
        x = F.pad(x, (0, per_row * self.size - self.row)).view(-1, self.size)
        start = lead // self.size
        return x[start : start + len(self.groups)]

    def join(self, x_GN: Tensor) -> Tensor:
        """Return the elements that :meth:`split` made groups of."""
        per_row, lead = -(-self.row // self.size), self.first % self.row
        rows = -(-(lead + self.elements) // self.row)
        start = lead // self.size
        x_GN = F.pad(x_GN, (0, 0, start, rows * per_row - start - len(x_GN)))
        return x_GN.view(rows, -1)[:, : self.row].flatten()[lead : lead + self.elements]


class MomentPlace(NamedTuple):
    """Where a rank's elements of a parameter stand: in its piece, and the piece in the whole."""

    name: str
    first: int
    """Place in the piece of the first element that this rank updates."""
    box: tuple[tuple[int, int], ...]
    """The piece, in the whole parameter."""
    shape: tuple[int, ...]
    """Of the whole."""
    seed: int = 0
    """The run's, which stochastic rounding draws by."""

    @property
    def row(self) -> int:
        """Last dim of the piece."""
        start, stop = self.box[-1]
        return max(1, stop - start)

    def chance(self, run: ElementRun, device: torch.device, step: int) -> tuple[Tensor, Tensor]:
        """Return for elements of the piece multiples of 2^-16 in [0, 1), for either moment.

        They depend on seed, name, step and each element's place in the whole alone. Of one mix of
        64 bits, as Philox of plain operations would take several times as long as the update.
        """
        row_N = torch.arange(run.first // run.row, -(-run.end // run.row), device=device)
        place_N, stride = torch.zeros_like(row_N), self.shape[-1]
        for (start, stop), size in zip(self.box[-2::-1], self.shape[-2::-1], strict=True):
            place_N += (row_N % (stop - start) + start) * stride
            row_N, stride = row_N // (stop - start), stride * size
        lead, columns = run.first % run.row, torch.arange(*self.box[-1], device=device)
        if len(row_N) == 1:
            columns, lead = columns[lead : lead + run.elements], 0
        place = (place_N[:, None] + columns).flatten()[lead : lead + run.elements]
        said = sha256(f"{self.seed}/{self.name}/{step}".encode()).digest()[:8]
        mixed = place.mul_(GAMMA).add_(int.from_bytes(said, "little", signed=True))
        for shift, factor in MIXERS:
            # The sign's copies that come with a shift are no bits of the number.
            high = (mixed >> shift).bitwise_and_((1 << 64 - shift) - 1)
            mixed.bitwise_xor_(high).mul_(factor)
        parts = ((mixed >> at).bitwise_and_(0xFFFF) for at in (32, 48))
        first, second = (part.float().mul_(2.0**-16) for part in parts)
        return first, second


class MomentGroups(Protocol):
    """Where elements stand in their tensors, and maxima over ranks that hold parts of groups."""

    def place(self, name: str) -> MomentPlace:
        """Return where a parameter's elements here stand."""
        ...

    def largest(self, parts: Mapping[tuple[str, int], Tensor]) -> Mapping[tuple[str, int], Tensor]:
        """Return for each cut group the maximum over ranks; each rank that shares any calls it."""
        ...


class Bf16Moment:
    """A moment that is kept in bf16."""

    def __init__(self, param: Tensor) -> None:
        self.values = torch.zeros_like(param, dtype=torch.bfloat16, requires_grad=False)

    def states(self, what: str) -> dict[str, Tensor]:
        """Return the tensors by their names."""
        return {what: self.values}

    def read(self, start: int, stop: int) -> Tensor:
        """Return some of its elements in fp32."""
        return self.values.view(-1)[start:stop].float()

    def write(self, start: int, stop: int, values: Tensor, drawn: Tensor) -> None:
        """Take new values for them, rounded by what was drawn."""
        wide = values.float()
        added = drawn.mul(1 << 16).int().add_(wide.view(torch.int32)).bitwise_and_(-(1 << 16))
        self.values.view(-1)[start:stop] = torch.where(wide.isnan(), wide, added.view(wide.dtype))


class Fp8Moment:
    """A moment that is kept as E4M3 codes with an expanded range, and three numbers a group."""

    def __init__(self, param: Tensor, run: ElementRun) -> None:
        self.run = run
        nothing = torch.zeros_like(param, dtype=torch.uint8, requires_grad=False)
        self.codes = nothing.view(E4M3)
        shape = len(run.groups), FACTORS
        self.factors_G3 = torch.ones(shape, dtype=torch.float32, device=param.device)
        self.ends: dict[int, Tensor] = {}
        """Elements of cut groups, and what was drawn for them, which wait for other ranks'."""

    def states(self, what: str) -> dict[str, Tensor]:
        """Return the tensors by their names."""
        return {what: self.codes, f"{what}_groups": self.factors_G3}

    def read(self, start: int, stop: int) -> Tensor:
        """Return some of its elements in fp32; both ends cut no group that goes on here."""
        part = self.run.part(start, stop)
        codes_GN = part.split(self._bytes[start:stop]).view(E4M3)
        return part.join(decode(codes_GN, self.factors_G3[self._of(part)]))

    def write(self, start: int, stop: int, values: Tensor, drawn: Tensor) -> None:
        """Take new values for them; groups that ranks share are settled later."""
        part = self.run.part(start, stop)
        values_GN, drawn_GN = part.split(values.float()), part.split(drawn)
        found_G3 = factors(extremes(values_GN))
        self.factors_G3[self._of(part)] = found_G3
        self._bytes[start:stop] = part.join(encode(values_GN, found_G3, drawn_GN).view(torch.uint8))
        for group in self.run.cut:
            if group in part.groups:
                at = group - part.groups[0]
                self.ends[group] = torch.stack((values_GN[at], drawn_GN[at]))

    def settle(self, group: int, extremes_2: Tensor) -> None:
        """Make the codes of a cut group by the extremes of all of it."""
        found_G3, ends_2N = factors(extremes_2[None]), self.ends.pop(group)
        self.factors_G3[group - self.run.groups[0]] = found_G3[0]
        run, per_row = self.run, -(-self.run.row // self.run.size)
        first = group // per_row * run.row + group % per_row * run.size
        last = min(first + run.size, (group // per_row + 1) * run.row)
        start, stop = max(first, run.first), min(last, run.end)
        codes_N = encode(ends_2N[:1], found_G3, ends_2N[1:]).view(torch.uint8)[0]
        self._bytes[start - run.first : stop - run.first] = codes_N[start - first : stop - first]

    @property
    def _bytes(self) -> Tensor:
        return self.codes.view(torch.uint8).view(-1)

    def _of(self, part: ElementRun) -> slice:
        at = part.groups[0] - self.run.groups[0]
        return slice(at, at + len(part.groups))


def settle(moments: Mapping[str, Sequence[Fp8Moment]], groups: MomentGroups) -> None:
    """Give the groups that ranks share one scale each; all ranks that share parameters call it."""
    parts: dict[tuple[str, int], Tensor] = {}
    for name, each in moments.items():
        for group in each[0].run.cut:
            parts[name, group] = torch.cat([extremes(one.ends[group][:1]) for one in each])
    for (name, group), found in groups.largest(parts).items():
        for one, extremes_2 in zip(moments[name], found, strict=True):
            one.settle(group, extremes_2)
