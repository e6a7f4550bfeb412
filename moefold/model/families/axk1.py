"""A.X K1 (arXiv 2601.09200): DeepSeek-V3 with a norm after the experts, and no selection bias."""

import re
from typing import Any, Literal

from moefold.config.base import Record
from moefold.layers.config import Rope, Size
from moefold.model.config import MODEL, Block
from moefold.model.families import fields as hf
from moefold.model.families import names
from moefold.model.families.base import Balance
from moefold.model.families.layer_kinds import DenseKinds
from moefold.model.families.sigmoid import LATENT_SIZES, SigmoidFamily
from moefold.model.families.sizes import DenseListed, LatentSizes, SharedSizes
from moefold.moe.config import Aux, Moe

_ALPHA = 1e-4
_NORM = "model.layers.{i}.post_mlp_layernorm.weight"
_LOADED = "model.layers.{i}.mlp.post_mlp_layernorm.weight"
_OUT_NORM = re.compile(r"model\.layers\.(\d+)\.(mlp\.)?post_mlp_layernorm\.weight")


class AxK1Shape(LatentSizes, SharedSizes, DenseListed):
    """Sizes of an A.X K1."""

    # Required, although the base has a default, which pyright reports as an error.
    q_rank: Size  # type: ignore[reportGeneralTypeIssues]


@MODEL.register
class AxK1(SigmoidFamily):
    """An A.X K1."""

    family: Literal["axk1"] = "axk1"
    shape: AxK1Shape
    balance: Balance = (Aux(over="sequence", coefficient=_ALPHA),)
    rope: Rope = Rope(layout="interleaved")

    aliases = ("AXK1",)
    architecture = "AXK1ForCausalLM"
    field_defaults = {"n_group": 8, "topk_group": 4}
    fixed_rope = None
    scales_softmax = True
    extra_layers = "layers for multi-token prediction"
    hf_sizes = LATENT_SIZES
    fields = (
        *hf.LATENT_FIELDS,
        *hf.ROUTER_FIELDS,
        hf.Rotary(1e4, "interleaved", "rope_interleave", scales_softmax=True),
        hf.SequenceBalance(_ALPHA, with_bias=False),
        hf.SharedExpertCount(),
        DenseKinds(count_field="first_k_dense_replace"),
        hf.DenseWidthField(),
        hf.FieldValue("routed_scaling_factor", "scale", float, 2.5),
        *hf.fixed(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc"),
        hf.Ignored(("first_k_dense_replace",)),  # read for kinds of layers
        hf.MULTI_TOKEN,
        hf.NULL_TOKENS,
    )
    tensors = (
        *names.llama_names(),
        names.param("layers.{i}.ffn_out_norm.weight", _NORM, packed=_LOADED),
        *names.latent_names(),
        *names.expert_names(),
        *names.bias_names(optional=True),
        *names.shared_names(),
    )

    def block(self, attention: Record, ffn: Record, **own: Any) -> Block:
        """Return a block, with a norm after its experts too."""
        norms = "both" if isinstance(ffn, Moe) else None
        return super().block(attention, ffn, ffn_norms=norms, **own)

    def ignore_reason(self, name: str) -> str | None:
        """Return why a tensor on disk may be ignored: as a norm of a dense layer, among others."""
        norm = _OUT_NORM.fullmatch(name)
        if norm and int(norm[1]) in self.shape.dense:
            return "norms after dense layers, which do not use them"
        return super().ignore_reason(name)
