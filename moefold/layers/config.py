"""Records of a decoder's layers: rotary positions, attention, dense FFN, recompute, precision."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.problems import Violation
from moefold.config.slot import Slot
from moefold.mesh.config import Sizes

ATTENTION = Slot("attention")
FFN = Slot("feed-forward")
CONTEXT = Slot("context parallelism")
RECOMPUTE = Slot("recompute policy")

Size = Annotated[int, Field(ge=1)]


class Yarn(Record):
    """YaRN extension of rotary frequencies (arXiv 2309.00071)."""

    factor: Annotated[float, Field(ge=1.0)]
    """How many times longer than ``original_length`` the context becomes."""
    original_length: Size
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    mscale: Annotated[float, Field(ge=0)] = 1.0
    mscale_all_dim: Annotated[float, Field(ge=0)] = 0.0
    """Above zero, also scales the softmax (DeepSeek's variant)."""
    attention_factor: Annotated[float, Field(gt=0)] | None = None
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
        """The fast boundary lies above the slow one."""
        if self.beta_fast <= self.beta_slow:
            yield Violation(
                ("beta_fast",),
                self.beta_fast,
                f"must be above beta_slow ({self.beta_slow})",
                self.beta_slow * 32,
            )


class Rope(Record):
    """Rotary position embedding (arXiv 2104.09864)."""

    theta: Annotated[float, Field(gt=0)] = 10000.0
    yarn: Yarn | None = None
    layout: Literal["half", "interleaved"] = "half"
    """Which dims form a pair: i and i + d/2, or 2i and 2i + 1."""


@ATTENTION.register
class Gqa(Record):
    """Grouped-query attention; ``kv_heads`` equal to ``heads`` is plain multi-head attention."""

    kind: Literal["gqa"] = "gqa"
    heads: Size
    kv_heads: Size
    head_dim: Annotated[int, Field(ge=2)]
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMSNorm on queries and keys: per head, or over the whole projection."""
    rope: Rope = Rope()

    owner = "moefold.layers.attention:GroupedQueryAttention"

    def rules(self) -> Iterator[Violation]:
        """Key-value heads divide the heads; rotary pairs need an even head."""
        if self.heads % self.kv_heads:
            nearest = max(d for d in range(1, self.kv_heads + 1) if self.heads % d == 0)
            yield Violation(
                ("kv_heads",), self.kv_heads, f"must divide heads ({self.heads})", nearest
            )
        if self.head_dim % 2:
            yield Violation(
                ("head_dim",), self.head_dim, "must be even, for rotary pairs", self.head_dim + 1
            )


@ATTENTION.register
class Mla(Record):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    kind: Literal["mla"] = "mla"
    heads: Size
    q_rank: Size | None = None
    """Rank of the query's latent; None projects queries directly."""
    kv_rank: Size = 512
    nope_dim: Size = 128
    """Dims per head without position."""
    rope_dim: Annotated[int, Field(ge=2)] = 64
    """Dims per head with rotary position; the key's are shared by all heads."""
    v_dim: Size = 128
    latent_epsilon: Annotated[float, Field(gt=0)] = 1e-6
    """Epsilon of the norms on the latents, apart from the decoder's ``norm_epsilon``."""
    rope: Rope = Rope(layout="interleaved")

    owner = "moefold.layers.attention:LatentAttention"

    def rules(self) -> Iterator[Violation]:
        """Rotary pairs need an even dim."""
        if self.rope_dim % 2:
            yield Violation(
                ("rope_dim",), self.rope_dim, "must be even, for rotary pairs", self.rope_dim + 1
            )


@FFN.register
class Dense(Record):
    """A dense SwiGLU feed-forward of ``width``."""

    kind: Literal["dense"] = "dense"
    width: Size

    owner = "moefold.layers.ffn:dense_ffn"


class Context(Record):
    """How attention sees the rows of other context ranks; base of every kind."""

    def splits(self, sizes: Sizes) -> tuple[tuple[str, int], ...]:
        """Return the kinds of groups that it cuts in two levels, and how many go together."""
        return ()

    def misfits(self, sizes: Sizes, heads: Collection[int]) -> Iterator[Violation]:
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

    owner = "moefold.layers.context.gathered:attend"


@CONTEXT.register
class Ulysses(Context):
    """Each context rank attends with a share of the heads over all rows (arXiv 2309.14509)."""

    kind: Literal["all_to_all"] = "all_to_all"

    owner = "moefold.layers.context.ulysses:attend"

    def misfits(self, sizes: Sizes, heads: Collection[int]) -> Iterator[Violation]:
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

    owner = "moefold.layers.context.mixed:attend"

    def splits(self, sizes: Sizes) -> tuple[tuple[str, int], ...]:
        """Return the context ranks by neighbours."""
        return (("cp", self.heads),) if sizes.cp > 1 else ()

    def misfits(self, sizes: Sizes, heads: Collection[int]) -> Iterator[Violation]:
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


Kind = Literal["norms", "attention", "mla_up", "ffn", "shared", "experts"]
"""Kinds of module that can be recomputed on their own."""


@RECOMPUTE.register
class Full(Record):
    """Keeps only each block's input and its routing; the block runs again in backward."""

    kind: Literal["full"] = "full"


@RECOMPUTE.register
class Selective(Record):
    """Recomputes modules of the given kinds and keeps the rest."""

    kind: Literal["selective"] = "selective"
    modules: Annotated[tuple[Kind, ...], Field(min_length=1)]


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
