"""Records of memory policies: what is recomputed in backward instead of kept."""

from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.slot import Slot

RECOMPUTE = Slot("recompute policy")

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
