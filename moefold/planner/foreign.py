"""Kinds of layers that can be planned though training cannot execute them yet.

They stand in a description like any other kind; :func:`block` puts them there.
"""

from typing import Annotated

from pydantic import Field

from moefold.config.base import Record
from moefold.layers.config import Gqa, Size
from moefold.model.config import Block
from moefold.moe.config import Moe


class Windowed(Gqa):
    """Grouped-query attention to the last ``window`` tokens."""

    window: Size


class Mamba2(Record):
    """A state-space mixer in Mamba-2's form (arXiv 2405.21060)."""

    heads: Size
    head_dim: Size
    state: Size = 128
    groups: Size = 8
    """Heads of one group share their input and output maps of the state."""
    chunk: Size = 128
    """Tokens between which products are quadratic."""

    @property
    def width(self) -> int:
        """Width of what the state reads."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> int:
        """Width of the projection in: gate, input, both maps of the state, and time steps."""
        return 2 * self.width + 2 * self.groups * self.state + self.heads


class DeltaNet(Record):
    """Gated linear attention by the delta rule, as Qwen3-Next has it (arXiv 2412.06464)."""

    key_heads: Size
    value_heads: Size
    key_dim: Size = 128
    value_dim: Size = 128
    chunk: Size = 64


class Nothing(Record):
    """No layer in this half of a block."""


class PlainMoe(Moe):
    """Experts of two matrices without a gate, which may work in a narrower space."""

    latent: Annotated[int, Field(ge=1)] | None = None
    """Width of the space that routed experts work in; None is the model's."""


class BiasedMoe(Moe):
    """Gated experts with biases: probabilities are then applied after the second product."""


def block(attention: Record, ffn: Record) -> Block:
    """Return a block of any two kinds, those of this file too."""
    return Block.model_construct(attention=attention, ffn=ffn)
