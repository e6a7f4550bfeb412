"""Records that layers share: slots, rotary positions, context, recompute, precision."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.fields import OnDisk
from moefold.config.slot import Slot
from moefold.mesh.config import Sizes

ATTENTION = Slot("attention", folder="moefold.layers.kinds")
FFN = Slot("feed-forward", folder="moefold.layers.kinds")
CONTEXT = Slot("context parallelism")
RECOMPUTE = Slot("recompute policy")

Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Yarn(Record):
    """YaRN extension of rotary frequencies (arXiv 2309.00071)."""

    factor: Annotated[float, Field(ge=1.0)]
    """How many times longer than ``original_length`` the context becomes."""
    original_length: Size
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Annotated[float, Field(ge=0)] = 1.0
    mscale_all_dim: Annotated[float, Field(ge=0)] = 0.0
    """Above zero, also scales the softmax (DeepSeek's variant)."""
    attention_factor: Positive | None = None
    """Factor on sine and cosine; derived from ``factor`` and the mscales where absent."""
    truncate: bool = True
    """Whether the correction range is rounded to whole dimensions."""

    @property
    def magnitude(self) -> float:
        """The factor on sine and cosine: as given, or the mscales' ratio at this ``factor``."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self._gain(self.mscale) / self._gain(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """The further factor on the softmax's scale; 1 without ``mscale_all_dim``."""
        return self._gain(self.mscale_all_dim) ** 2

    def _gain(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def rules(self) -> Iterator[Violation]:
        """The fast boundary does not lie below the slow one."""
        if self.beta_fast < self.beta_slow:
            rule = f"must be at least beta_slow ({self.beta_slow})"
            yield Violation(("beta_fast",), self.beta_fast, rule, self.beta_slow * 32)


class Bands(Record):
    """Rotary frequencies scaled by band, as Llama 3.1 extends its context: slow ones are
    divided."""

    factor: Annotated[float, Field(ge=1.0)]
    """Divisor of frequencies whose turn takes more than ``original_length / slow`` tokens."""
    original_length: Size
    slow: Positive = 1.0
    fast: Positive = 4.0
    """Frequencies whose turn takes fewer than ``original_length / fast`` tokens stay; those between
    both boundaries are blended."""

    def rules(self) -> Iterator[Violation]:
        """The fast boundary lies at the slow one, where nothing blends, or above."""
        if self.fast < self.slow:
            yield Violation(
                ("fast",), self.fast, f"must not be below slow ({self.slow})", self.slow * 4
            )


class Rope(Record):
    """Rotary position embedding (arXiv 2104.09864)."""

    theta: Positive = 10000.0
    yarn: Yarn | None = None
    bands: Bands | None = None
    """Scaling by band, as of Llama 3.1; not beside ``yarn``."""
    layout: Literal["half", "interleaved"] = "half"
    """Which dims form a pair: i and i + d/2, or 2i and 2i + 1."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's dims, its first ones, that are rotated; latent attention states its own."""

    @property
    def softmax_factor(self) -> float:
        """The factor on the softmax's scale that goes with a stretched context."""
        return 1.0 if self.yarn is None else self.yarn.softmax_factor

    def rules(self) -> Iterator[Violation]:
        """A context is stretched one way, and YaRN divides by the logarithm of theta."""
        if self.yarn is not None and self.bands is not None:
            yield Violation(("bands",), self.bands, "must be left out beside yarn", None)
        if self.yarn is not None and self.theta <= 1:
            yield Violation(("theta",), self.theta, "must be above 1 beside yarn", 10000.0)

    def dims(self, head_dim: int) -> int:
        """Return how many dims of a head turn."""
        return int(head_dim * self.fraction)

    def fits(self, head_dim: int) -> Iterator[Violation]:
        """Yield a violation where pairs of a head's dims do not turn whole; seen from outside."""
        if self.dims(head_dim) % 2 or not self.dims(head_dim):
            rule = f"must turn an even number of the {head_dim} dims of a head"
            yield Violation(("rope", "fraction"), self.fraction, rule, 1.0)


class Activation(Record):
    """``(up + offset) * gate * sigmoid(alpha * gate)`` of clamped inputs (gpt-oss)."""

    alpha: Positive = 1.0
    limit: Positive | None = None
    """Bound of ``gate`` from above and of ``up`` from both sides; None is none."""
    offset: float = 0.0


class Temperature(Record):
    """Factor on queries at a position p (Llama 4).

    It is ``1 + scale * log(1 + floor((p + 1) / every))``.
    """

    every: Size
    scale: Positive


class Context(Record):
    """How attention sees the rows of other context ranks; base of every kind."""

    gathers: ClassVar[bool] = False
    """Whether each context rank has all keys and values while it attends."""

    def sharing_heads(self, cp: int) -> int:
        """Return how many neighbouring context ranks exchange heads for rows; one is none."""
        return 1

    def splits(self, sizes: Sizes) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that it cuts in two levels, and how many go together."""
        return ()

    def violations(self, sizes: Sizes, heads: Collection[int]) -> Iterator[Violation]:
        """Yield what of the record does not fit sizes and the model's numbers of heads."""
        yield from ()


@CONTEXT.register
class Ring(Context):
    """Keys and values visit the ranks that see them; softmax statistics are merged as they come.

    Ring attention (arXiv 2310.01889).
    """

    kind: Literal["ring"] = "ring"

    owner = "moefold.layers.context.ring:attend"


@CONTEXT.register
class Gathered(Context):
    """Every context rank has all keys and values while it attends (arXiv 2407.21783, 3.3.2)."""

    kind: Literal["all_gather"] = "all_gather"

    gathers = True

    owner = "moefold.layers.context.attend:gathered"


@CONTEXT.register
class Ulysses(Context):
    """Each context rank attends with a share of the heads over all rows (arXiv 2309.14509)."""

    kind: Literal["all_to_all"] = "all_to_all"

    owner = "moefold.layers.context.attend:ulysses"

    def sharing_heads(self, cp: int) -> int:
        """All context ranks share the heads."""
        return cp

    def violations(self, sizes: Sizes, heads: Collection[int]) -> Iterator[Violation]:
        """All context ranks share the heads; fewer can by ``mixed``."""
        most = _most_over_heads(sizes, heads)
        if most < sizes.cp:
            rule = f"tp * cp ({sizes.tp * sizes.cp}) divides {_counts(heads)}"
            fewer = {"kind": "mixed", "heads": most} if most > 1 else {"kind": "ring"}
            yield Violation((), self.kind, rule, fewer)


@CONTEXT.register
class Mixed(Context):
    """Neighbouring context ranks share heads, and a ring runs between them (arXiv 2405.07719)."""

    kind: Literal["mixed"] = "mixed"
    heads: Size
    """How many neighbours share heads; best those that are linked fastest."""

    owner = "moefold.layers.context.attend:mixed"

    def sharing_heads(self, cp: int) -> int:
        """Neighbours share heads."""
        return min(self.heads, cp)

    def splits(self, sizes: Sizes) -> tuple[tuple[str, int], ...]:
        """Return the context ranks by neighbours."""
        return (("cp", self.heads),) if sizes.cp > 1 else ()

    def violations(self, sizes: Sizes, heads: Collection[int]) -> Iterator[Violation]:
        """Neighbours are of equal number and share the heads evenly."""
        most = _most_over_heads(sizes, heads, self.heads)
        if sizes.cp > 1 and most < self.heads:
            rule = f"divides cp ({sizes.cp}), and tp * heads divides {_counts(heads)}"
            yield Violation(("heads",), self.heads, rule, most)


def _most_over_heads(sizes: Sizes, heads: Collection[int], at_most: int | None = None) -> int:
    """Return the most context ranks, at most so many, that can share heads cut over tp already."""
    among = math.gcd(*heads) // sizes.tp
    bound = min(at_most or sizes.cp, sizes.cp)
    return max(n for n in range(1, bound + 1) if sizes.cp % n == among % n == 0)


def _counts(heads: Collection[int]) -> str:
    counts = ", ".join(str(count) for count in sorted(set(heads)))
    return f"the numbers of heads and of key-value heads ({counts})"


Kind = Literal["norms", "attention", "mla_up", "ffn", "shared", "experts", "permute", "gather"]
"""Kinds of module that can be recomputed on their own; ``permute`` is the experts' copies of rows,
where one rank has all experts, ``gather`` the rows of the tensor group."""


@RECOMPUTE.register
class Full(Record):
    """Keeps only each block's input and its routing; the block runs again in backward."""

    kind: Literal["full"] = "full"


@RECOMPUTE.register
class Selective(Record):
    """Recomputes modules of the given kinds and keeps the rest."""

    kind: Literal["selective"] = "selective"
    modules: Annotated[tuple[Kind, ...], Field(min_length=1)]

    def violations(self, known: Collection[str], tp: int) -> Iterator[Violation]:
        """Yield kinds that are not ``known``: the model's, where tensor ranks share it."""
        there = [kind for kind in self.modules if kind in known]
        rest = [kind for kind in there if kind != "gather" or tp > 1]
        if absent := [kind for kind in self.modules if kind not in known]:
            rule = f"the model has no {', '.join(absent)}"
            yield Violation(("modules",), list(self.modules), rule, rest or ["norms"])
        if len(there) > len(rest):
            rule = "there are no tensor ranks to gather rows from"
            yield Violation(("modules",), list(self.modules), rule, rest or ["norms"])


@RECOMPUTE.register
class Auto(Record):
    """Recomputes the kinds that take the least time and leave the fullest rank within a limit.

    It is settled when a run begins, by the plan of its step. With a place for what is kept, the
    plan sends kinds there too where that takes less.
    """

    kind: Literal["auto"] = "auto"
    limit: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)? ?[MG]B$")] | None = None
    """Memory of a device, such as ``76 GB`` of 10^9 bytes; None is what it has, less a
    twentieth."""
    host: bool = False
    """Whether kinds may go to the host's memory between forward and backward."""
    disk: Annotated[str, Field(min_length=1, examples=["./scratch"]), OnDisk()] | None = None
    """A folder of this machine's disk in whose files kinds may lie instead."""

    def rules(self) -> Iterator[Violation]:
        """What leaves goes to one place."""
        if self.host and self.disk is not None:
            rule = "the plan sends kinds to the host or to a disk: one of them is a place for all"
            yield Violation(("disk",), self.disk, rule, None)

    def violations(self, offload: "Offload | None") -> Iterator[Violation]:
        """Yield a place where the layout sends kinds itself."""
        for name in ("host", "disk") if offload is not None else ():
            if getattr(self, name):
                rule = "layout.offload says what leaves; leave it out for the plan to say it"
                yield Violation(
                    (name,), getattr(self, name), rule, None if name == "disk" else False
                )

    @property
    def bytes(self) -> float | None:
        """The limit as a number."""
        if self.limit is None:
            return None
        return float(self.limit[:-2]) * (1e9 if self.limit.endswith("GB") else 1e6)


Offloaded = Literal["block", "norms", "attention", "ffn", "shared", "experts"]
"""Kinds of module whose activations can leave the device; ``block`` is the residual rows."""
Share = Annotated[float, Field(ge=0, le=1)]


def leaving(share: float, layers: int, ends: bool) -> int:
    """Return how many of a chunk's layers, its first ones, a share is.

    Where the chunk ``ends`` in the loss, whose backward comes next, the last layer stays.
    """
    return round(share * max(layers - ends, 0))


class OffloadToPages(Record):
    """Experts' rows kept in pages on the device between forward and backward: those that arrived,
    not the whole room that a dispatch of fixed shapes states."""

    page: Size = 64
    """Rows of a page."""
    load: Annotated[float, Field(ge=1)] = 1.1
    """Rows that there are pages for, over the mean of all ranks, counted over all layers and
    micro-batches that a rank has in flight. A step with more is repeated, or ends the run."""
    spill: Share = 0.0
    """Share of a chunk's layers, its first ones, whose rows move on to pages in host memory and
    return before their backward. The layer before the loss does not count."""

    modules: ClassVar[tuple[str, ...]] = ("experts",)
    share: ClassVar[float] = 1.0


class OffloadToHost(Record):
    """Activations that lie in the host's memory between forward and backward."""

    modules: Annotated[tuple[Offloaded, ...], Field(min_length=1)]
    share: Share = 1.0
    """Share of a chunk's layers, its first ones, that are offloaded. The layer before the loss does
    not count, since its backward comes at once."""


class OffloadToDisk(OffloadToHost):
    """Activations that lie in a file between forward and backward; it is gone when a run ends."""

    folder: Annotated[str, Field(min_length=1, examples=["./scratch"]), OnDisk()]
    """Folder on a disk of each machine; each rank has a file there."""


class Offload(Record):
    """Where activations lie between forward and backward, if not where they were made."""

    pages: OffloadToPages | None = None
    host: OffloadToHost | None = None
    disk: OffloadToDisk | None = None
    in_flight: Size = 2
    """Layers whose activations are copied at once, out and back."""

    def rules(self) -> Iterator[Violation]:
        """Something goes somewhere, and to one place."""
        if not self.stated:
            rule = "a place is stated; to keep all where it is made leave layout.offload out"
            yield Violation(("host",), None, rule, {"modules": ["experts"]})
        gone = dict[str, str]()
        for place, to in self.stated.items():
            twice = [name for name in to.modules if name in gone]
            if twice:
                there = ", ".join(f"{name} to {gone[name]}" for name in twice)
                rest = [name for name in to.modules if name not in twice]
                free = [name for name in get_args(Offloaded) if name not in gone]
                rule = f"a kind goes to one place, and {there} already"
                nearest = rest or free[:1] or None
                path = (place, "modules") if nearest else (place,)
                yield Violation(path, list(to.modules), rule, nearest)
            gone |= dict.fromkeys(to.modules, place)

    @property
    def stated(self) -> dict[str, OffloadToPages | OffloadToHost]:
        """What goes where, by the name of the place."""
        places = ("pages", self.pages), ("host", self.host), ("disk", self.disk)
        return {name: to for name, to in places if to}

    def violations(self, present: Collection[str], again: Record | None) -> Iterator[Violation]:
        """Yield kinds that a model does not have, or that are made ``again`` by recompute."""
        for name, to in self.stated.items():
            absent = [kind for kind in to.modules if kind not in present]
            if absent:
                rule = f"the model has no {', '.join(absent)}"
                yield self._without(name, absent, rule, "attention")
            chosen = again.modules if isinstance(again, Selective) else ()
            gone = ["norms"] if isinstance(again, Auto) or "norms" in chosen else []
            if isinstance(again, Full):
                gone = [kind for kind in get_args(Offloaded) if kind != "block"]
            gone = [kind for kind in to.modules if kind in gone]
            if gone:
                may = "may make" if isinstance(again, Auto) else "makes"
                rule = f"layout.recompute {may} {', '.join(gone)} again, so that nothing is kept"
                yield self._without(name, gone, rule, "block")

    def _without(self, place: str, kinds: Collection[str], rule: str, other: str) -> Violation:
        """Return the violation of what cannot go to a place; its nearest value does without."""
        if place == "pages":
            return Violation((place,), self.pages, rule, None)
        modules = self.stated[place].modules
        rest = [kind for kind in modules if kind not in kinds] or [other]
        return Violation((place, "modules"), list(modules), rule, rest)


Precision = Literal["bf16", "fp32", "fp64"]
"""``bf16`` computes in bfloat16 from fp32 master weights; ``fp64`` is for proofs."""
Asked = Literal["auto", "bf16", "fp32", "fp64"]
"""What a run may ask for. ``auto``: the faster of bf16 and fp32, settled when the run begins."""
PAYS = 1.2
"""How much faster bf16's products must be: a step casts, too, and does more than multiply."""
SLOW = 2.0
"""How much slower than another format one is warned of."""


def faster(rates: Mapping[str, float]) -> Precision:
    """Return what ``auto`` stands for where products of bf16 and fp32 have these rates."""
    return "bf16" if rates["bf16"] > PAYS * rates["fp32"] else "fp32"


def slowness(precision: str, rates: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the fastest format and by how much it is faster; None where that is below twice."""
    best = max(rates, key=lambda name: rates[name])
    factor = rates[best] / rates[precision]
    return (best, factor) if factor >= SLOW else None
