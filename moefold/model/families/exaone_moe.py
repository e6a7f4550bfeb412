"""K-EXAONE: windows in three of four layers, no positions in the others, DeepSeek-V3's router."""

from typing import Literal

from moefold.layers.config import Positive, Size
from moefold.model.config import MODEL
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.layer_kinds import DenseKinds, WindowKinds, every_nth_full
from moefold.model.families.sigmoid import SigmoidFamily
from moefold.model.families.sizes import DenseListed, SharedSizes, WindowSizes

_KINDS = "first_k_dense_replace first_last_k_dense_replace sliding_window_pattern"
"""Fields from which ``layer_types`` and ``mlp_layer_types`` are derived."""


class ExaoneMoeShape(WindowSizes, SharedSizes, DenseListed):
    """Sizes of a K-EXAONE; full layers have no positions."""

    # Required, although the base has a default, which pyright reports as an error.
    window: Size  # type: ignore[reportGeneralTypeIssues]
    full_rope = False


@MODEL.register
class ExaoneMoe(SigmoidFamily):
    """A K-EXAONE."""

    family: Literal["exaone_moe"] = "exaone_moe"
    shape: ExaoneMoeShape
    norm_epsilon: Positive = 1e-5

    architecture = "ExaoneMoeForCausalLM"
    other_architectures = ("ExaoneMoEForCausalLM",)
    attention_fixed = {"qk_norm": "head"}
    hf_sizes = names.gqa_sizes("num_experts", "moe_intermediate_size")
    fields = (
        *hf.ROUTER_FIELDS,
        *hf.head_fields(),
        hf.BiasBalance(),
        hf.SharedExpertCount("num_shared_experts"),
        DenseKinds(count_field="first_k_dense_replace"),
        hf.DenseWidthField(),
        WindowKinds(every_nth_full("sliding_window_pattern"), refuse_unused=True),
        hf.FieldValue("routed_scaling_factor", "scale", float, 2.5),
        hf.Ignored(tuple(_KINDS.split())),
        hf.Derived("is_moe_layer", hf.sparse_layers),
        *hf.fixed(scoring_func="sigmoid", topk_method="noaux_tc"),
        hf.MULTI_TOKEN,
    )
    tensors = (
        *names.llama_names(),
        *names.gqa_names(qk_norm=True),
        *names.expert_names(),
        *names.bias_names("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        *names.shared_names(),
    )
