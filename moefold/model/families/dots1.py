"""dots.llm1 (arXiv 2506.05767): norms on each head, DeepSeek-V3's router, windows where asked."""

from typing import Annotated, Literal

from pydantic import Field

from moefold.layers.config import Rope
from moefold.model.config import MODEL
from moefold.model.families.fields import (
    BiasBalance,
    DenseSize,
    FieldValue,
    HeadDim,
    KvHeads,
    Rotary,
    SharedNumber,
)
from moefold.model.families.hub import ConfigReader
from moefold.model.families.layer_kinds import WindowKinds
from moefold.model.families.names import (
    ROUTED_SIZES,
    bias_names,
    expert_names,
    gqa_names,
    llama_names,
    shared_names,
)
from moefold.model.families.sigmoid import ROUTER_FIELDS, SigmoidFamily
from moefold.model.families.sizes import DenseFirst, SharedSizes, WindowSizes


def _full(config: ConfigReader, layer: int) -> bool:
    last = config.take("max_window_layers", int, 62)
    return layer < last or not config.present("sliding_window")


class Dots1Shape(WindowSizes, SharedSizes, DenseFirst):
    """Sizes of a dots.llm1."""


@MODEL.register
class Dots1(SigmoidFamily):
    """A dots.llm1."""

    family: Literal["dots1"] = "dots1"
    shape: Dots1Shape
    renormalise: bool = False
    scale: Annotated[float, Field(gt=0)] = 1.0
    rope: Rope = Rope()

    model_type = "dots1"
    architecture = "Dots1ForCausalLM"
    attention_own = {"qk_norm": "head"}
    hf_sizes = ROUTED_SIZES | {
        "first_k_dense_replace": "dense_layers",
    }
    fields = (
        *ROUTER_FIELDS,
        KvHeads(),
        HeadDim(),
        Rotary(1e4),
        BiasBalance(),
        SharedNumber(),
        DenseSize(),
        WindowKinds(_full),
        FieldValue("routed_scaling_factor", "scale", float, 1.0),
    )
    tensors = (
        *llama_names(),
        *gqa_names(qk_norm=True),
        *expert_names(),
        *bias_names(),
        *shared_names(),
    )
