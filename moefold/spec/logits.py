"""What the logits of attention's heads grow with, and where they cannot be clipped by that."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.model.config import Decoder
from moefold.spec.decoder import known_weights
from moefold.spec.layer import Attention, LayerSpec

Side = Literal["query", "key", "alone"]
"""What rows of a weight make: part of a query or key, or of a query whose key all heads share."""


class LogitRows(NamedTuple):
    """A weight or bias whose rows scale logits, head by head."""

    weight: str
    """Named within the layer."""
    heads: int
    parts: tuple[tuple[int, Side | None], ...]
    """Of each head so many rows of a side, one part after the other; None leaves logits alone."""


def rows_of_heads(decoder: Decoder) -> dict[str, int]:
    """Return the number of heads of each weight that tensor ranks cut by its heads' rows."""
    found = dict[str, int]()
    for weight in known_weights(decoder):
        by_rows = [units for dim, units in weight.cuts if dim == 0 and units.heads]
        found |= {weight.name: by_rows[0].number} if by_rows else {}
    return found


def clip_violations(decoder: Decoder, given: Record) -> Iterator[Violation]:
    """Yield why the logits of a decoder do not follow weights that are trained."""
    for number, block in enumerate(decoder.blocks):
        spec = block.attention
        if not isinstance(spec, LayerSpec):
            continue
        if not any(isinstance(one.core, Attention) for one in spec.operations(decoder.hidden)):
            continue
        names = [f"attention.{rows.weight}" for rows in spec.logits]
        adapted = {adapter.weight for adapter in block.adapters}
        if not names:
            rule = f"must be off: layer {number} norms queries and keys, whatever their weights"
        elif any(name in block.frozen or name in adapted for name in names):
            rule = f"must be off: queries or keys of layer {number} are frozen"
        else:
            continue
        yield Violation(("qk_clip",), given, rule, None)
        return
