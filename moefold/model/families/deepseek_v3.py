"""DeepSeek-V3 (arXiv 2412.19437): latent attention, sigmoid router in groups, a shared expert.

The two norms on latents keep their epsilon of 1e-6 whatever ``rms_norm_eps`` says, as in
transformers. Layers for multi-token prediction are not part of the description.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from moefold.config.errors import Violation
from moefold.layers.config import Rope, Size
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.mla import Mla
from moefold.model.config import MODEL, Block, Decoder
from moefold.model.families.base import Balance, Family, FamilySizes, first_moe
from moefold.model.families.hub import ConfigReader, read_rope
from moefold.model.families.names import entry, expert_names, llama_names
from moefold.moe.config import Aux, Bias, Groups, Router, Shared

_AT = "model.layers.{i}.self_attn"
_MLP = "model.layers.{i}.mlp"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_ALPHA = 1e-4
_RATE = 1e-3
_ATTENTION = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "o": "o_proj",
}


class DeepseekV3Shape(FamilySizes):
    """Sizes of a DeepSeek-V3."""

    dense_layers: Annotated[int, Field(ge=0)] = 0
    """How many of the first layers have a dense feed-forward."""
    dense_width: Size | None = None
    """Width of those; None is as wide as the experts a token sees, together."""
    shared_width: Size | None = None
    """Width of the shared expert; None is that of one routed expert."""
    q_rank: Size | None = None
    """Rank of the query's latent; None projects queries directly."""
    kv_rank: Size = 512
    nope_dim: Size = 128
    """Dims per head without position."""
    rope_dim: Annotated[int, Field(ge=2)] = 64
    """Dims per head with rotary position."""
    v_dim: Size = 128

    @property
    def width_of_shared(self) -> int:
        """``shared_width``, or what it follows from."""
        return self.shared_width or self.expert_width

    @property
    def width_of_dense(self) -> int:
        """``dense_width``, or what it follows from."""
        return self.dense_width or self.top_k * self.expert_width + self.width_of_shared

    def rules(self) -> Iterator[Violation]:
        """A layer keeps experts, the shared expert is some experts wide, rotary dims are even."""
        if self.dense_layers >= self.layers:
            rule = f"must be less than layers ({self.layers}): a layer keeps experts"
            yield Violation(("dense_layers",), self.dense_layers, rule, self.layers - 1)
        if self.width_of_shared % self.expert_width:
            nearest = max(1, round(self.width_of_shared / self.expert_width)) * self.expert_width
            rule = f"must be a multiple of expert_width ({self.expert_width})"
            yield Violation(("shared_width",), self.shared_width, rule, nearest)
        if self.rope_dim % 2:
            rule = "must be even, for rotary pairs"
            yield Violation(("rope_dim",), self.rope_dim, rule, self.rope_dim + 1)


@MODEL.register
class DeepseekV3(Family):
    """A DeepSeek-V3; balance and scale are those of its report."""

    family: Literal["deepseek_v3"] = "deepseek_v3"
    shape: DeepseekV3Shape
    renormalise: bool = True
    """Whether the chosen scores are divided by their sum."""
    scale: Annotated[float, Field(gt=0)] = 2.5
    """Factor on the weights of routed experts."""
    groups: Groups | None = None
    """Groups of experts that routing is limited to; None chooses among all."""
    balance: Balance = (Bias(rate=_RATE), Aux(over="sequence", coefficient=_ALPHA))
    rope: Rope = Rope(layout="interleaved")

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    fixed_rope = None
    router_fields = ("renormalise", "scale", "groups")
    hf_sizes = {
        "vocab_size": "vocab",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "n_routed_experts": "experts",
        "num_experts_per_tok": "top_k",
        "moe_intermediate_size": "expert_width",
        "first_k_dense_replace": "dense_layers",
        "intermediate_size": "dense_width",
        "q_lora_rank": "q_rank",
        "kv_lora_rank": "kv_rank",
        "qk_nope_head_dim": "nope_dim",
        "qk_rope_head_dim": "rope_dim",
        "v_head_dim": "v_dim",
    }
    tensors = (
        *llama_names(),
        *expert_names(),
        *(
            entry(f"layers.{{i}}.attention.{ours}.weight", f"{_AT}.{theirs}.weight")
            for ours, theirs in _ATTENTION.items()
        ),
        entry("layers.{i}.moe.router.selection_bias", f"{_MLP}.gate.e_score_correction_bias"),
        entry(
            "layers.{i}.moe.shared.w_in",
            f"{_MLP}.shared_experts.gate_proj.weight",
            f"{_MLP}.shared_experts.up_proj.weight",
        ),
        entry("layers.{i}.moe.shared.w_out", f"{_MLP}.shared_experts.down_proj.weight"),
    )

    def own_router(self) -> Router:
        """Sigmoid scores; the choice, in groups too, is by score plus bias, the weights without."""
        return Router(
            experts=self.shape.experts,
            top_k=self.shape.top_k,
            score="sigmoid",
            renormalise=self.renormalise,
            epsilon=1e-20,
            scale=self.scale,
            groups=self.groups,
            selection_bias=True,
        )

    def blocks(self) -> Sequence[Block]:
        """The dense blocks, then those with experts."""
        s = self.shape
        attention = Mla(
            heads=s.heads,
            q_rank=s.q_rank,
            kv_rank=s.kv_rank,
            nope_dim=s.nope_dim,
            rope_dim=s.rope_dim,
            v_dim=s.v_dim,
            rope=self.rope,
        )
        dense = Block(attention=attention, ffn=Dense(width=s.width_of_dense))
        shared = Shared(width=s.width_of_shared)
        sparse = Block(attention=attention, ffn=self.moe(shared=shared))
        return [dense] * s.dense_layers + [sparse] * (s.layers - s.dense_layers)

    def rules(self) -> Iterator[Violation]:
        """What all families share, and how this one scores a group."""
        yield from super().rules()
        if self.groups is not None and self.groups.score != "sum_best":
            rule = "this family scores a group by the sum of its best two"
            yield Violation(("groups", "score"), self.groups.score, rule, "sum_best")
        if self.groups is not None and self.groups.best != 2:
            rule = "this family scores a group by the sum of its best two"
            yield Violation(("groups", "best"), self.groups.best, rule, 2)

    @classmethod
    def read(cls, config: ConfigReader) -> dict[str, Any]:
        """Take DeepSeek-V3's own fields."""
        heads, nope, rotary = (
            config.take(n, int)
            for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        config.only("num_key_value_heads", heads, None)
        config.only("head_dim", rotary, None)
        config.only("qk_head_dim", nope + rotary, None)
        config.only("moe_layer_freq", 1)
        config.only("scoring_func", "sigmoid")
        config.only("topk_method", "noaux_tc")
        config.skip("num_nextn_predict_layers", "num_mtp_layers")  # `ignores` names their tensors
        count, keep = config.take("n_group", int, 1), config.take("topk_group", int, 1)
        rope = read_rope(config, 1e4, scales_softmax=True)
        interleaved = config.take("rope_interleave", bool, True)
        shared = config.take("n_shared_experts", int) * config.take("moe_intermediate_size", int)
        return {
            "shape": {"shared_width": shared},
            "renormalise": config.take("norm_topk_prob", bool, True),
            "scale": config.take("routed_scaling_factor", float, 2.5),
            "groups": Groups(count=count, keep=keep) if count > 1 else None,
            "balance": _read_balance(config),
            "rope": rope.model_copy(update={"layout": "interleaved" if interleaved else "half"}),
        }

    def write(self) -> dict[str, Any]:
        """Return DeepSeek-V3's own fields."""
        aux = next((t for t in self.balance if isinstance(t, Aux)), None)
        return {
            "num_key_value_heads": self.shape.heads,
            "intermediate_size": self.shape.width_of_dense,
            "n_shared_experts": self.shape.width_of_shared // self.shape.expert_width,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": self.renormalise,
            "routed_scaling_factor": self.scale,
            "n_group": self.groups.count if self.groups else 1,
            "topk_group": self.groups.keep if self.groups else 1,
            "rope_interleave": self.rope.layout == "interleaved",
            "num_nextn_predict_layers": 0,
            "aux_loss_alpha": aux.coefficient if aux else 0.0,
            "seq_aux": aux is not None and aux.over == "sequence",
        }

    def ignores(self, name: str) -> str | None:
        """Layers beyond the last are for multi-token prediction."""
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= self.shape.layers:
            return "layers for multi-token prediction"
        return super().ignores(name)

    @classmethod
    def shape_of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, those of its latents and dense layers too."""
        mla: Any = decoder.blocks[0].attention
        moe: Any = first_moe(decoder)
        dense = [b.ffn for b in decoder.blocks if isinstance(b.ffn, Dense)]
        latent = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")
        return super().shape_of(decoder) | {
            "dense_layers": len(dense),
            "dense_width": dense[0].width if dense else None,
            "shared_width": moe.shared.width,
            **{name: getattr(mla, name) for name in latent},
        }


def _read_balance(config: ConfigReader) -> Balance:
    if not config.present("aux_loss_alpha"):
        config.notes.append(
            "config.json has no aux_loss_alpha: the aux loss of each sequence takes the report's "
            f"coefficient, {_ALPHA}"
        )
    config.notes.append(f"the selection bias moves by {_RATE} a step, as in the report")
    coefficient = config.take("aux_loss_alpha", float, _ALPHA)
    over = "sequence" if config.take("seq_aux", bool, True) else "micro_batch"
    bias = Bias(rate=_RATE)
    return (bias, Aux(over=over, coefficient=coefficient)) if coefficient > 0 else (bias,)
