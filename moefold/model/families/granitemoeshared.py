"""Granite MoE with an optional shared expert of any width."""

from typing import Literal

from moefold.model.config import MODEL
from moefold.model.families.fields import FieldValue
from moefold.model.families.granitemoe import Granitemoe
from moefold.model.families.sizes import AnySharedSizes, GqaSizes

WIDTH = FieldValue(
    "shared_intermediate_size", "shape.shared_width", int, 0, lambda n: n or None, lambda n: n or 0
)


class GranitemoesharedShape(GqaSizes, AnySharedSizes):
    """Sizes of a Granite MoE with a shared expert."""


@MODEL.register
class Granitemoeshared(Granitemoe):
    """A Granite MoE with a shared expert."""

    family: Literal["granitemoeshared"] = "granitemoeshared"
    shape: GranitemoesharedShape

    architecture = "GraniteMoeSharedForCausalLM"
    fields = (*Granitemoe.fields, WIDTH)
