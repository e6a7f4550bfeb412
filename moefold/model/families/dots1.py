"""dots.llm1 (arXiv 2506.05767): norms per head, DeepSeek-V3's router, optional windows."""

from typing import Literal

from moefold.layers.config import Positive
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.hub import ConfigReader
from moefold.model.families.layer_kinds import WindowKinds
from moefold.model.families.sigmoid import SigmoidFamily
from moefold.model.families.sizes import DenseFirst, SharedSizes, WindowSizes


def _full(config: ConfigReader, layer: int) -> bool:
    last = config.get("max_window_layers", int, 62)
    return layer < last or not config.is_set("sliding_window")


class Dots1Shape(WindowSizes, SharedSizes, DenseFirst):
    """Sizes of a dots.llm1."""


@MODEL.register
class Dots1(SigmoidFamily):
    """A dots.llm1."""

    family: Literal["dots1"] = "dots1"
    shape: Dots1Shape
    renormalise: bool = False
    scale: Positive = 1.0

    architecture = "Dots1ForCausalLM"
    field_defaults = {"norm_topk_prob": False}
    attention_fixed = {"qk_norm": "head"}
    hf_sizes = names.gqa_sizes(
        "n_routed_experts", "moe_intermediate_size", first_k_dense_replace="dense_layers"
    )
    fields = (
        *hf.deepseek_fields(1.0),
        *hf.head_fields(),
        WindowKinds(_full),
        hf.Ignored(("max_window_layers",)),  # read by WindowKinds
        hf.Fixed("moe_layer_freq", 1),
        hf.Fixed("scoring_func", "sigmoid", ("noaux_tc",)),
        hf.Fixed("topk_method", "noaux_tc"),
    )
    tensors = (*names.deepseek_names(), *names.gqa_names(qk_norm=True))
