"""The declarative description of a decoder: what is computed, nothing of where it runs.

A family (``model/families``) turns a few sizes into this description; the model, the planner
and the checkpoint converters all read the description and never the family.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.slot import Slot
from moefold.kernels.quantise.config import QUANTISE
from moefold.layers.config import ATTENTION, FFN, Positive, Size
from moefold.spec.layer import LayerSpec

MODEL = Slot("model family", tag="family", folder="moefold.model.families")
MODEL.implied["from"] = "folder"
MAX_LAYERS = 10_000
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
"""A number of layers; each one is written out, so that the memory bounds it."""


class LowRank(Record):
    """A low-rank adapter: a weight's product adds ``scale * B (A x)`` (LoRA, arXiv 2106.09685)."""

    weight: str
    """The weight's name, as ``frozen`` has it."""
    rank: Size
    scale: float
    dropout: float = 0.0
    """Share of the features of ``x`` that a training step hides from A."""


class MultiToken(Record):
    """The loss of a block that predicts one token more (arXiv 2412.19437, section 2.2).

    It reads the rows before it beside the embedding of the token that they predict.
    """

    weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of its loss, a mean over its own labels, and of its router's terms."""
    reads: Literal["normed", "residual"] = "normed"
    """Whether it reads the rows before it after or before the norm in front of the head."""


class Block(Record):
    """One layer: attention, then a dense or mixture-of-experts feed-forward."""

    attention: Annotated[Record, ATTENTION]
    ffn: Annotated[Record, FFN]
    norms: Literal["before", "after", "both", "shared"] = "before"
    """Where norms stand: before each half, after it, both, or one before both halves, which then
    read the same rows."""
    residual_scale: Positive = 1.0
    """Factor on what each half adds to the residual."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained, by their names within the block."""
    adapters: tuple[LowRank, ...] = ()
    multi_token: MultiToken | None = None
    """Makes the block predict a further token; such blocks come last and share embedding and
    head."""

    def rules(self) -> Iterator[Violation]:
        """Experts that compute nothing add to the residual, which no norm after the half sees."""
        idle = getattr(getattr(self.ffn, "router", None), "unsent", None)
        if idle is not None and self.norms in ("after", "both"):
            rule = "must not come after a half with experts that compute nothing"
            yield Violation(("norms",), self.norms, rule, "before")

    def normed(self, half: str) -> tuple[bool, bool]:
        """Return whether ``attention`` or ``ffn`` has a norm of its own before it, and after it."""
        before = self.norms in ("before", "both") or (self.norms, half) == ("shared", "attention")
        return before, self.norms in ("after", "both")


class Stack(Record):
    """A pattern of blocks, repeated."""

    repeat: Layers = 1
    blocks: Annotated[tuple[Block, ...], Field(min_length=1)]


def patterns(blocks: Iterable[Block]) -> tuple[Stack, ...]:
    """Write equal blocks in a row as one stack with a count."""
    runs = [(block, len(list(run))) for block, run in groupby(blocks)]
    return tuple(Stack(repeat=count, blocks=(block,)) for block, count in runs)


class Decoder(Record):
    """A decoder-only transformer."""

    vocab: Annotated[int, Field(ge=2)]
    hidden: Size
    stacks: Annotated[tuple[Stack, ...], Field(min_length=1)]
    """Patterns of blocks, in order."""
    norm: Literal["rms", "layer", "zero_centred"] = "rms"
    """Kind of the norms of rows; ``layer`` subtracts the mean first and has no bias;
    ``zero_centred`` multiplies by its weight plus one."""
    norm_epsilon: Positive = 1e-6
    tied: bool = False
    """Whether the head is the embedding."""
    init_std: Positive = 0.02
    init_out_scale: Positive | None = None
    """Factor on the std of weights that write to the residual; None is 1 / sqrt(2 * layers)."""
    embed_scale: Positive = 1.0
    """Factor on the embedding's rows."""
    logits_divisor: Positive = 1.0
    """What logits are divided by."""
    context: Size | None = None
    """Longest sequence it is meant for, in tokens; exported, and changes no maths."""
    frozen: tuple[str, ...] = ()
    """Parameters outside the blocks that are not trained."""
    quantise: Annotated[Record, QUANTISE] | None = None
    """Number format of weight products, as training sets it."""
    adapters: tuple[LowRank, ...] = ()
    """Of weights outside the blocks."""
    family: str | None = None
    """``model_type`` that it is written as where several families have its description."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block in order, patterns written out."""
        return tuple(b for s in self.stacks for _ in range(s.repeat) for b in s.blocks)

    @property
    def multi_token(self) -> tuple[MultiToken, ...]:
        """The losses of further tokens, one for each of the last blocks."""
        return tuple(b.multi_token for b in self.blocks if b.multi_token is not None)

    @property
    def layers(self) -> int:
        """Number of blocks without those of further tokens."""
        return len(self.blocks) - len(self.multi_token)

    def rules(self) -> Iterator[Violation]:
        """Layers fit the width; blocks of further tokens come last, and not alone."""
        for place, stack in enumerate(self.stacks):
            for number, block in enumerate(stack.blocks):
                for half, spec in (("attention", block.attention), ("ffn", block.ffn)):
                    found = spec.violations(self.hidden) if isinstance(spec, LayerSpec) else ()
                    yield from (v.under("stacks", place, "blocks", number, half) for v in found)
        first, said = self.blocks[: self.layers], [block.multi_token for block in self.blocks]
        if not first or any(block.multi_token for block in first):
            rule = "blocks with multi_token come last, after one without"
            yield Violation(("stacks",), said, rule)
