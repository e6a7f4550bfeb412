"""What families with grouped-query attention share: sizes, their rules, their fields on disk."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from moefold.config.errors import Violation
from moefold.layers.config import Rope, Size
from moefold.layers.kinds.gqa import Gqa
from moefold.model.config import Decoder
from moefold.model.families.base import Family, FamilySizes
from moefold.model.families.hub import ConfigReader

HF_SIZES = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_experts_per_tok": "top_k",
}


class GqaSizes(FamilySizes):
    """Sizes of a family with grouped-query attention, heads together as wide as ``hidden``."""

    kv_heads: Size

    @property
    def dims_per_head(self) -> int:
        """Dims of one head."""
        return self.hidden // self.heads

    def rules(self) -> Iterator[Violation]:
        """Heads fit the hidden size, and key-value heads the heads."""
        if self.dims_per_head * self.heads != self.hidden or self.dims_per_head % 2:
            nearest = max(1, round(self.hidden / (2 * self.heads))) * 2 * self.heads
            rule = f"hidden / heads ({self.heads}) must be a whole, even number of dims per head"
            yield Violation(("hidden",), self.hidden, rule, nearest)
        yield from self._kv_rules()

    def _kv_rules(self) -> Iterator[Violation]:
        if self.heads % self.kv_heads:
            below = range(1, min(self.heads, self.kv_heads) + 1)
            nearest = max(d for d in below if self.heads % d == 0)
            yield Violation(
                ("kv_heads",), self.kv_heads, f"must divide heads ({self.heads})", nearest
            )


class FreeGqaSizes(GqaSizes):
    """Sizes of a family whose heads may be of any width."""

    head_dim: Annotated[int, Field(ge=2)] | None = None
    """Dims per head; None is hidden / heads."""

    @property
    def dims_per_head(self) -> int:
        """Dims of one head."""
        return self.head_dim or self.hidden // self.heads

    def rules(self) -> Iterator[Violation]:
        """Heads are even, and key-value heads divide them; without ``head_dim`` hidden fits."""
        if self.head_dim is None:
            yield from super().rules()
            return
        if self.head_dim % 2:
            rule = "must be even, for rotary pairs"
            yield Violation(("head_dim",), self.head_dim, rule, self.head_dim + 1)
        yield from self._kv_rules()


def gqa(sizes: GqaSizes, rope: Rope, **own: Any) -> Gqa:
    """Return the attention of a family, ``own`` being its kind of q/k norm."""
    return Gqa(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.dims_per_head,
        rope=rope,
        **own,
    )


def read_kv_heads(config: ConfigReader) -> dict[str, int]:
    """Take key-value heads where the field is null: as many as heads."""
    if not config.null("num_key_value_heads"):
        return {}
    return {"kv_heads": config.take("num_attention_heads", int)}


def read_heads(config: ConfigReader) -> dict[str, int]:
    """Take what ``HF_SIZES`` leaves open: null key-value heads, and dims per head."""
    head_dim = config.take("head_dim", int, None)
    return read_kv_heads(config) | ({} if head_dim is None else {"head_dim": head_dim})


class GqaFamily(Family):
    """A family whose layers have grouped-query attention."""

    shape: GqaSizes

    @classmethod
    def shape_of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, dims per head where they are not natural."""
        attention: Any = decoder.blocks[0].attention
        natural = attention.head_dim * attention.heads == decoder.hidden
        sizes = {} if natural else {"head_dim": attention.head_dim}
        return super().shape_of(decoder) | sizes | {"kv_heads": attention.kv_heads}
