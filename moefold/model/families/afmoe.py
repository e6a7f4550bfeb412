"""AFMoE (Trinity): norms before and after each sublayer, gated attention, windows."""

from typing import Literal

from moefold.layers.config import Positive, Size
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.layer_kinds import WindowKinds, every_nth_full
from moefold.model.families.sigmoid import SigmoidFamily
from moefold.model.families.sizes import DenseFirst, SharedSizes, WindowSizes
from moefold.model.families.special_fields import MupScale


class AfmoeShape(WindowSizes, SharedSizes, DenseFirst):
    """Sizes of an AFMoE; full layers have no positions."""

    # Required, although the base has a default, which pyright reports as an error.
    window: Size  # type: ignore[reportGeneralTypeIssues]
    full_rope = False


@MODEL.register
class Afmoe(SigmoidFamily):
    """An AFMoE."""

    family: Literal["afmoe"] = "afmoe"
    shape: AfmoeShape
    scale: Positive = 1.0
    bias: Literal["none", "all"] = "none"
    """Whether projections of attention have biases."""
    embed_scale: Positive = 1.0
    """Factor on the embedded rows: 1, or ``sqrt(hidden)``."""
    norm_epsilon: Positive = 1e-5

    architecture = "AfmoeForCausalLM"
    attention_fixed = {"qk_norm": "head", "gate": True}
    attention_fields = ("bias",)
    block_fixed = {"norms": "both"}
    decoder_fields = ("embed_scale",)
    router_fields = ("scale",)
    hf_sizes = names.gqa_sizes(
        "num_experts", "moe_intermediate_size", num_dense_layers="dense_layers"
    )
    fields = (
        *hf.head_fields(128),
        hf.BiasBalance(),
        hf.SharedExpertCount("num_shared_experts"),
        hf.DenseWidthField(),
        WindowKinds(every_nth_full("global_attn_every_n_layers"), refuse_unused=True),
        hf.FieldValue("route_scale", "scale", float, 1.0),
        hf.bias_field("attention_bias", False, "all"),
        MupScale(),
        hf.Ignored(("global_attn_every_n_layers",)),  # read by WindowKinds
        *hf.fixed(n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1),
        *hf.fixed(route_norm=True, score_func="sigmoid"),
        hf.Ignored(("load_balance_coeff", "use_grouped_mm")),
    )
    tensors = (
        *names.llama_names(
            "input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"
        ),
        *names.gqa_names(qk_norm=True),
        *names.attention_names({"out_gate": "gate_proj"}),
        *names.projection_bias_names("qkvo"),
        *names.expert_names("router.gate.weight", "router.gate.weight"),
        *names.bias_names("mlp.expert_bias"),
        *names.shared_names(),
    )
