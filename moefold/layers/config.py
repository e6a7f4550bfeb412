"""Records that layers share: rotary positions, context, recompute, offload, precision."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.fields import OnDisk
from moefold.config.slot import Slot
from moefold.mesh.config import Sizes

ATTENTION = Slot("attention", package="moefold.layers.kinds")
FFN = Slot("feed-forward", package="moefold.layers.kinds")
CONTEXT = Slot("context parallelism")
RECOMPUTE = Slot("recompute policy")

MAX_SIZE = 1 << 24
"""Bound of every size of a model or a batch, and of the vocabulary."""
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Vocab = Annotated[int, Field(ge=2, le=MAX_SIZE)]
"""Rows of an embedding."""
Positive = Annotated[float, Field(gt=0)]


class Yarn(Record):
    """YaRN extension of rotary frequencies (arXiv 2309.00071)."""

    factor: Annotated[float, Field(ge=1.0)]
    """Ratio of the extended context length to ``original_length``."""
    original_length: Size
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Annotated[float, Field(ge=0)] = 1.0
    mscale_all_dim: Annotated[float, Field(ge=0)] = 0.0
    """Above zero, also scales the softmax (DeepSeek's variant)."""
    attention_factor: Positive | None = None
    """Factor on sine and cosine; None derives it from ``factor`` and the mscales."""
    truncate: bool = True
    """Whether the correction range is rounded to whole dimensions."""

    @property
    def magnitude(self) -> float:
        """Factor on sine and cosine: ``attention_factor``, or the ratio of the mscales' gains."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self._gain(self.mscale) / self._gain(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Additional factor on the softmax scale; 1 without ``mscale_all_dim``."""
        return self._gain(self.mscale_all_dim) ** 2

    def _gain(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def rules(self) -> Iterator[Violation]:
        """Require that ``beta_fast`` is at least ``beta_slow``."""
        if self.beta_fast < self.beta_slow:
            rule = f"must be at least beta_slow ({self.beta_slow})"
            yield Violation(("beta_fast",), self.beta_fast, rule, self.beta_slow * 32)


class Bands(Record):
    """Scaling of rotary frequencies by band, with which Llama 3.1 extends its context."""

    factor: Annotated[float, Field(ge=1.0)]
    """Divisor of frequencies with a period of more than ``original_length / slow`` tokens."""
    original_length: Size
    slow: Positive = 1.0
    fast: Positive = 4.0
    """Frequencies with a period of fewer than ``original_length / fast`` tokens are unchanged;
    those between the two boundaries are interpolated."""

    def rules(self) -> Iterator[Violation]:
        """Require that ``fast`` is at least ``slow``; if equal, nothing is interpolated."""
        if self.fast < self.slow:
            rule = f"must be at least slow ({self.slow})"
            yield Violation(("fast",), self.fast, rule, self.slow * 4)


class Rope(Record):
    """Rotary position embedding (arXiv 2104.09864)."""

    theta: Positive = 10000.0
    yarn: Yarn | None = None
    bands: Bands | None = None
    """Scaling by band, as in Llama 3.1; excludes ``yarn``."""
    layout: Literal["half", "interleaved"] = "half"
    """Pairs of dims: i and i + d/2, or 2i and 2i + 1."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a head's dims that are rotated, its first ones; not for latent attention."""

    @property
    def softmax_factor(self) -> float:
        """Factor on the softmax scale due to context extension."""
        return 1.0 if self.yarn is None else self.yarn.softmax_factor

    def rules(self) -> Iterator[Violation]:
        """Refuse ``yarn`` with ``bands``, or with a theta whose logarithm is not positive."""
        if self.yarn is not None and self.bands is not None:
            yield Violation(("bands",), self.bands, "cannot be combined with yarn", None)
        if self.yarn is not None and self.theta <= 1:
            yield Violation(("theta",), self.theta, "must be above 1 with yarn", 10000.0)

    def dims(self, head_dim: int) -> int:
        """Return how many dims of a head are rotated."""
        return int(head_dim * self.fraction)

    def fits(self, head_dim: int) -> Iterator[Violation]:
        """Yield a violation, relative to the layer's record, if rotated dims do not form pairs."""
        if self.dims(head_dim) % 2 or not self.dims(head_dim):
            rule = f"must rotate an even number of the {head_dim} dims of a head, at least 2"
            yield Violation(("rope", "fraction"), self.fraction, rule, 1.0)


class Activation(Record):
    """``(up + offset) * gate * sigmoid(alpha * gate)`` of clamped inputs (gpt-oss)."""

    alpha: Positive = 1.0
    limit: Positive | None = None
    """Upper bound of ``gate`` and bound of ``|up|``; None is no clamp."""
    offset: float = 0.0


class Temperature(Record):
    """Factor ``1 + scale * log(1 + floor((p + 1) / every))`` on queries at position p (Llama 4)."""

    every: Size
    scale: Positive


class Context(Record):
    """Base of kinds of context parallelism: how attention reads rows of other context ranks."""

    gathers: ClassVar[bool] = False
    """Whether each context rank gathers all keys and values."""

    def sharing_heads(self, cp: int) -> int:
        """Return how many neighbouring context ranks exchange rows for heads; 1 if none do."""
        return 1

    def splits(self, sizes: Sizes) -> tuple[tuple[str, int], ...]:
        """Return kinds of groups to split in two levels, and the number of neighbours in a part."""
        return ()

    def violations(self, sizes: Sizes, heads: Collection[int]) -> Iterator[Violation]:
        """Yield values that do not fit the layout's sizes and the model's numbers of heads."""
        yield from ()


@CONTEXT.register
class Ring(Context):
    """Ring attention (arXiv 2310.01889): in each round a rank receives keys and values of another
    one, and merges softmax statistics.
    """

    kind: Literal["ring"] = "ring"

    owner = "moefold.layers.context.ring:attend"


@CONTEXT.register
class Gathered(Context):
    """Every context rank gathers all keys and values (Llama 3, arXiv 2407.21783, 3.3.2)."""

    kind: Literal["all_gather"] = "all_gather"

    gathers = True

    owner = "moefold.layers.context.attend:all_gather_attention"


@CONTEXT.register
class Ulysses(Context):
    """Ulysses: each context rank attends with some heads over all rows (arXiv 2309.14509)."""

    kind: Literal["all_to_all"] = "all_to_all"

    owner = "moefold.layers.context.attend:ulysses_attention"

    def sharing_heads(self, cp: int) -> int:
        """Return ``cp``: all context ranks divide the heads."""
        return cp

    def violations(self, sizes: Sizes, heads: Collection[int]) -> Iterator[Violation]:
        """Require that ``cp`` divides the heads of a tensor rank; else suggest mixed or ring."""
        most = _max_head_ranks(sizes, heads)
        if most < sizes.cp:
            ranks = sizes.tp * sizes.cp
            rule = f"all_to_all needs tp * cp ({ranks}) to divide {_head_counts(heads)}"
            fewer = {"kind": "mixed", "heads": most} if most > 1 else {"kind": "ring"}
            yield Violation((), self.kind, rule, fewer)


@CONTEXT.register
class Mixed(Context):
    """Ulysses among neighbouring context ranks, a ring between these (arXiv 2405.07719)."""

    kind: Literal["mixed"] = "mixed"
    heads: Size
    """Number of neighbours that divide heads; best are ranks with the fastest links."""

    owner = "moefold.layers.context.attend:mixed_attention"

    def sharing_heads(self, cp: int) -> int:
        """Return the number of neighbours that divide heads."""
        return min(self.heads, cp)

    def splits(self, sizes: Sizes) -> tuple[tuple[str, int], ...]:
        """Return the split of context ranks into groups of neighbours."""
        return (("cp", self.heads),) if sizes.cp > 1 else ()

    def violations(self, sizes: Sizes, heads: Collection[int]) -> Iterator[Violation]:
        """Require that ``heads`` divides ``cp`` and the heads of a tensor rank."""
        most = _max_head_ranks(sizes, heads, self.heads)
        if sizes.cp > 1 and most < self.heads:
            rule = f"must divide cp ({sizes.cp}), and tp * heads must divide {_head_counts(heads)}"
            yield Violation(("heads",), self.heads, rule, most)


def _max_head_ranks(sizes: Sizes, heads: Collection[int], at_most: int | None = None) -> int:
    """Return the most context ranks, up to ``at_most``, that can divide a tensor rank's heads."""
    among = math.gcd(*heads) // sizes.tp
    bound = min(at_most or sizes.cp, sizes.cp)
    return max(n for n in range(1, bound + 1) if sizes.cp % n == among % n == 0)


def _head_counts(heads: Collection[int]) -> str:
    counts = ", ".join(str(count) for count in sorted(set(heads)))
    return f"the numbers of attention and key-value heads ({counts})"


RecomputeKind = Literal[
    "norms", "attention", "mla_up", "ffn", "shared", "experts", "permute", "gather"
]
"""Kinds of module that can be recomputed separately; ``permute`` is the experts' copies of rows, if
one rank has all experts, and ``gather`` the rows gathered over tp."""
CHECKPOINTING = ("torch._dynamo",)
"""What the first ``torch.utils.checkpoint`` imports, in a second of processor time."""


class Recompute(Record):
    """Base of recompute policies: what backward recomputes instead of reading it."""

    preloads = CHECKPOINTING

    @property
    def recomputed(self) -> frozenset[str]:
        """Kinds of module that backward recomputes; ``block`` is a whole block."""
        raise NotImplementedError


@RECOMPUTE.register
class Full(Recompute):
    """Saves only each block's input and its routing; backward reruns the block."""

    kind: Literal["full"] = "full"

    @property
    def recomputed(self) -> frozenset[str]:
        """Whole blocks."""
        return frozenset(("block",))


@RECOMPUTE.register
class Selective(Recompute):
    """Recomputes modules of the given kinds and saves the rest."""

    kind: Literal["selective"] = "selective"
    modules: Annotated[tuple[RecomputeKind, ...], Field(min_length=1)]

    @property
    def recomputed(self) -> frozenset[str]:
        """The kinds of ``modules``."""
        return frozenset(self.modules)

    def violations(self, model_kinds: Collection[str], tp: int) -> Iterator[Violation]:
        """Yield kinds that the model does not have, and ``gather`` without tp."""
        present = [kind for kind in self.modules if kind in model_kinds]
        rest = [kind for kind in present if kind != "gather" or tp > 1]
        nearest = rest or ["norms"]
        if absent := [kind for kind in self.modules if kind not in model_kinds]:
            rule = f"the model has no modules of kind {', '.join(absent)}"
            yield Violation(("modules",), list(self.modules), rule, nearest)
        if len(present) > len(rest):
            rule = "gather needs tp2 or more: with tp1 no rows are gathered"
            yield Violation(("modules",), list(self.modules), rule, nearest)


@RECOMPUTE.register
class Auto(Recompute):
    """Recomputes the kinds with the least planned time that keep the fullest rank within a limit.

    It is resolved when a run begins, by the planner. With ``host`` or ``disk`` the planner also
    offloads kinds where that is faster.
    """

    kind: Literal["auto"] = "auto"
    limit: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)? ?[MG]B$")] | None = None
    """Memory per device, such as ``76 GB`` (10^9 bytes); None is the device's memory minus 5 %."""
    host: bool = False
    """Whether kinds may be offloaded to the host's memory."""
    disk: Annotated[str, Field(min_length=1, examples=["./scratch"]), OnDisk()] | None = None
    """Folder on a local disk, to which kinds may be offloaded instead."""

    @property
    def recomputed(self) -> frozenset[str]:
        """All kinds that the planner could choose."""
        return frozenset(get_args(RecomputeKind))

    def rules(self) -> Iterator[Violation]:
        """Refuse ``host`` together with ``disk``."""
        if self.host and self.disk is not None:
            rule = "cannot be combined with host: the planner offloads to one of the two"
            yield Violation(("disk",), self.disk, rule, None)

    def violations(self, offload: "Offload | None") -> Iterator[Violation]:
        """Yield ``host`` or ``disk`` if the layout has ``offload``, which states both."""
        for name in ("host", "disk") if offload is not None else ():
            if chosen := getattr(self, name):
                rule = "cannot be combined with layout.offload, which states what is offloaded"
                off = None if name == "disk" else False
                yield Violation((name,), chosen, rule, off)

    @property
    def bytes(self) -> float | None:
        """The limit in bytes; None if there is none."""
        if self.limit is None:
            return None
        unit = 1e9 if self.limit.endswith("GB") else 1e6
        return float(self.limit[:-2]) * unit


OffloadKind = Literal["block", "norms", "attention", "ffn", "shared", "experts"]
"""Kinds of module whose activations can be offloaded; ``block`` is the residual rows."""
Share = Annotated[float, Field(ge=0, le=1)]


def offloaded_layers(fraction: float, layers: int, computes_loss: bool) -> int:
    """Return how many of a chunk's layers, from the first on, are offloaded.

    If the chunk computes the loss, its last layer is excluded: its backward follows at once.
    """
    return round(fraction * max(layers - computes_loss, 0))


class OffloadToPages(Record):
    """Experts' rows saved in pages on the device: only rows that arrived, not the whole buffer of a
    dispatcher of fixed shapes."""

    page: Size = 64
    """Rows per page."""
    load: Annotated[float, Field(ge=1)] = 1.1
    """Rows that the pages hold, relative to the mean of ranks, over all layers and micro-batches
    that a rank has in flight. A step with more rows is repeated, or ends the run."""
    spill: Share = 0.0
    """Share of a chunk's layers, its first ones, whose rows move on to pages in host memory and
    return before their backward. The layer before the loss is excluded."""

    modules: ClassVar[tuple[str, ...]] = ("experts",)
    share: ClassVar[float] = 1.0


class OffloadToHost(Record):
    """Activations that are in host memory between forward and backward."""

    modules: Annotated[tuple[OffloadKind, ...], Field(min_length=1)]
    share: Share = 1.0
    """Share of a chunk's layers, its first ones, that are offloaded. The layer before the loss is
    excluded, since its backward comes at once."""


class OffloadToDisk(OffloadToHost):
    """Activations that are in a file between forward and backward, which the run's end deletes."""

    folder: Annotated[str, Field(min_length=1, examples=["./scratch"]), OnDisk()]
    """Folder on a local disk of each machine, where each rank has a file."""


class Offload(Record):
    """Where activations are stored between forward and backward."""

    pages: OffloadToPages | None = None
    host: OffloadToHost | None = None
    disk: OffloadToDisk | None = None
    in_flight: Size = 2
    """Number of layers whose activations are copied at once, in either direction."""

    @property
    def moves_layers(self) -> bool:
        """Whether activations leave the device, and not only move to pages on it."""
        return bool(self.host or self.disk or (self.pages and self.pages.spill))

    @property
    def tiers(self) -> tuple[tuple[frozenset[str], float], ...]:
        """Kinds of module on the host and on disk, each with the share of offloaded layers: no kind
        of all layers where none is stated.
        """
        nothing = frozenset[str]()
        places = (self.host, self.disk)
        return tuple(
            (nothing, 1.0) if place is None else (frozenset(place.modules), place.share)
            for place in places
        )

    def rules(self) -> Iterator[Violation]:
        """Require at least one place, and no kind in two places."""
        if not self.destinations:
            rule = "layout.offload needs pages, host or disk; to offload nothing, leave it out"
            yield Violation(("host",), None, rule, {"modules": ["experts"]})
        place_of = dict[str, str]()
        for place, record in self.destinations.items():
            duplicates = [name for name in record.modules if name in place_of]
            if duplicates:
                conflicts = ", ".join(f"{name} ({place_of[name]})" for name in duplicates)
                rest = [name for name in record.modules if name not in duplicates]
                unclaimed = [name for name in get_args(OffloadKind) if name not in place_of]
                rule = f"must leave out kinds that another place offloads: {conflicts}"
                nearest = rest or unclaimed[:1] or None
                path = (place, "modules") if nearest else (place,)
                yield Violation(path, list(record.modules), rule, nearest)
            place_of |= dict.fromkeys(record.modules, place)

    @property
    def destinations(self) -> dict[str, OffloadToPages | OffloadToHost]:
        """The records of the places in use, by name."""
        records = ("pages", self.pages), ("host", self.host), ("disk", self.disk)
        return {name: record for name, record in records if record}

    def violations(self, present: Collection[str], recompute: Record | None) -> Iterator[Violation]:
        """Yield kinds that the model does not have, or that ``recompute`` does not save."""
        for name, record in self.destinations.items():
            absent = [kind for kind in record.modules if kind not in present]
            if absent:
                rule = f"the model has no modules of kind {', '.join(absent)}"
                yield self._drop_kinds(name, absent, rule, "attention")
            chosen = recompute.modules if isinstance(recompute, Selective) else ()
            recomputed = ["norms"] if isinstance(recompute, Auto) or "norms" in chosen else []
            if isinstance(recompute, Full):
                recomputed = [kind for kind in get_args(OffloadKind) if kind != "block"]
            recomputed = [kind for kind in record.modules if kind in recomputed]
            if recomputed:
                verb = "may recompute" if isinstance(recompute, Auto) else "recomputes"
                names = ", ".join(recomputed)
                rule = f"layout.recompute {verb} {names}, so there is nothing to offload"
                yield self._drop_kinds(name, recomputed, rule, "block")

    def _drop_kinds(self, place: str, kinds: Collection[str], rule: str, default: str) -> Violation:
        """Return a violation of kinds that cannot be offloaded, and suggest the value without."""
        if place == "pages":
            return Violation((place,), self.pages, rule, None)
        modules = self.destinations[place].modules
        rest = [kind for kind in modules if kind not in kinds] or [default]
        return Violation((place, "modules"), list(modules), rule, rest)


Precision = Literal["bf16", "fp32", "fp64"]
"""``bf16`` computes in bfloat16 from fp32 master weights; ``fp64`` is for proofs."""
PrecisionSetting = Literal["auto", "bf16", "fp32", "fp64"]
"""Precision of a run file. ``auto``: the faster of bf16 and fp32, resolved when the run begins."""
MIN_BF16_SPEEDUP = 1.2
"""Least speed-up of products for which ``auto`` chooses bf16, which also has to cast."""
SLOW_RATIO = 2.0
"""Slow-down relative to another format from which on a run warns."""


def faster_precision(rates: Mapping[str, float]) -> Precision:
    """Return the precision that ``auto`` means, given matrix rates in bf16 and fp32."""
    return "bf16" if rates["bf16"] > MIN_BF16_SPEEDUP * rates["fp32"] else "fp32"


def slowdown(precision: str, rates: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the fastest format and its speed-up; None if that is below ``SLOW_RATIO``."""
    best = max(rates, key=lambda name: rates[name])
    factor = rates[best] / rates[precision]
    return (best, factor) if factor >= SLOW_RATIO else None
