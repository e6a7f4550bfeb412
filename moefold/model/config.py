"""The declarative description of a decoder: what is computed, not where it runs.

A family (``model/families``) expands a few sizes into this description; model, planner and
checkpoint converters read only the description, never the family.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.slot import Slot
from moefold.kernels.quantise.config import QUANTISE
from moefold.layers.config import ATTENTION, FFN, Positive, Size, Vocab
from moefold.spec.layer import LayerSpec

MODEL = Slot("model family", tag="family", package="moefold.model.families")
MODEL.implied["from"] = "folder"
MAX_LAYERS = 10_000
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
"""A number of layers, bounded because each layer is expanded into a record."""


class LowRank(Record):
    """A low-rank adapter: a weight's product adds ``scale * B (A x)`` (LoRA, arXiv 2106.09685)."""

    weight: str
    """Name of the weight within its block, or in the decoder outside blocks, as in ``frozen``."""
    rank: Size
    scale: float
    dropout: float = 0.0
    """Fraction of the features of ``x`` that are zeroed before A in training."""


class MultiToken(Record):
    """Multi-token prediction in a block, with its own loss (arXiv 2412.19437, section 2.2).

    Its input is the rows of the preceding block and the embedding of the token that they predict.
    """

    weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the loss, a mean over the block's own labels, and of the router's terms."""
    reads: Literal["normed", "residual"] = "normed"
    """Whether the block reads the preceding rows after or before the norm of the head."""


class Block(Record):
    """One layer: attention, then a dense or mixture-of-experts feed-forward."""

    attention: Annotated[Record, ATTENTION]
    ffn: Annotated[Record, FFN]
    norms: Literal["before", "after", "both", "shared"] = "before"
    """Position of norms: before each sublayer, after it, both, or one norm whose output both
    sublayers read (parallel blocks)."""
    ffn_norms: Literal["before", "after", "both"] | None = None
    """Position of the feed-forward's norms; None: as ``norms`` says."""
    residual_scale: Positive = 1.0
    """Factor on the output of each sublayer before it is added to the residual."""
    frozen: tuple[str, ...] = ()
    """Names, within the block, of the parameters that are not trained."""
    adapters: tuple[LowRank, ...] = ()
    multi_token: MultiToken | None = None
    """Multi-token prediction; such blocks come last, and share embedding and head."""

    def rules(self) -> Iterator[Violation]:
        """Refuse norms after zero-computation experts, which bypass them, and two kinds at once."""
        idle = getattr(getattr(self.ffn, "router", None), "idle_experts", None)
        if self.shares_norm and self.ffn_norms is not None:
            rule = "must be left out: with norms shared both sublayers have one norm"
            yield Violation(("ffn_norms",), self.ffn_norms, rule, None)
        elif idle is not None and self.norm_positions("ffn")[1]:
            field = "norms" if self.ffn_norms is None else "ffn_norms"
            rule = "must be before or shared: zero-computation experts bypass a norm after them"
            yield Violation((field,), getattr(self, field), rule, "before")

    @property
    def shares_norm(self) -> bool:
        """Whether both sublayers read the output of one norm."""
        return self.norms == "shared"

    def norm_positions(self, name: str) -> tuple[bool, bool]:
        """Return whether ``attention`` or ``ffn`` has a norm before it, and one after it."""
        norms = self.ffn_norms if name == "ffn" and self.ffn_norms else self.norms
        before = norms in ("before", "both") or (norms, name) == ("shared", "attention")
        return before, norms in ("after", "both")


class Stack(Record):
    """A pattern of blocks, repeated."""

    repeat: Layers = 1
    blocks: Annotated[tuple[Block, ...], Field(min_length=1)]


def to_stacks(blocks: Iterable[Block]) -> tuple[Stack, ...]:
    """Group consecutive equal blocks into stacks with a repeat count."""
    runs = [(block, len(list(run))) for block, run in groupby(blocks)]
    return tuple(Stack(repeat=count, blocks=(block,)) for block, count in runs)


class Decoder(Record):
    """A decoder-only transformer."""

    vocab: Vocab
    hidden: Size
    stacks: Annotated[tuple[Stack, ...], Field(min_length=1)]
    """Stacks of blocks, in order."""
    norm: Literal["rms", "layer", "zero_centred"] = "rms"
    """Norm of the residual rows: ``rms`` is RMSNorm, ``layer`` a LayerNorm without bias, and
    ``zero_centred`` an RMSNorm that multiplies by its weight plus one."""
    norm_epsilon: Positive = 1e-6
    tied: bool = False
    """Whether the head shares the embedding's matrix."""
    init_std: Positive = 0.02
    init_out_scale: Positive | None = None
    """Factor on the std of weights that write to the residual; None is 1 / sqrt(2 * layers)."""
    embed_scale: Positive = 1.0
    """Factor on the embedded rows."""
    logits_divisor: Positive = 1.0
    """Divisor of the logits."""
    context: Size | None = None
    """Longest intended sequence in tokens; written to exports, without effect on training."""
    frozen: tuple[str, ...] = ()
    """Parameters outside the blocks that are not trained."""
    quantise: Annotated[Record, QUANTISE] | None = None
    """Quantisation of products with weights, set by ``train.quantise``."""
    adapters: tuple[LowRank, ...] = ()
    """Adapters of weights outside the blocks."""
    family: str | None = None
    """``model_type`` of an export, if several families have this description."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in order, with the repeats of stacks expanded."""
        return tuple(b for s in self.stacks for _ in range(s.repeat) for b in s.blocks)

    @property
    def multi_token(self) -> tuple[MultiToken, ...]:
        """The multi-token prediction records, one for each of the last blocks that have one."""
        return tuple(b.multi_token for b in self.blocks if b.multi_token is not None)

    @property
    def layers(self) -> int:
        """Number of blocks, without those of multi-token prediction."""
        return len(self.blocks) - len(self.multi_token)

    def rules(self) -> Iterator[Violation]:
        """Check layers against ``hidden``; multi-token blocks come last, after any other."""
        for i, stack in enumerate(self.stacks):
            for j, block in enumerate(stack.blocks):
                for name, spec in (("attention", block.attention), ("ffn", block.ffn)):
                    violations = spec.violations(self.hidden) if isinstance(spec, LayerSpec) else ()
                    yield from (v.under("stacks", i, "blocks", j, name) for v in violations)
        main = self.blocks[: self.layers]
        values = [block.multi_token for block in self.blocks]
        if not main or any(block.multi_token for block in main):
            rule = "blocks with multi_token must come last, after at least one without"
            yield Violation(("stacks",), values, rule)
