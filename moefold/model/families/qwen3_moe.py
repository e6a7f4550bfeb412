"""Qwen3-MoE (arXiv 2505.09388): norms on each query and key head, and dense layers where asked."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from moefold.config.errors import Violation
from moefold.layers.config import Rope, Size
from moefold.layers.kinds.dense import Dense
from moefold.model.config import MODEL, Block, Decoder
from moefold.model.families.base import Balance
from moefold.model.families.gqa import HF_SIZES, FreeGqaSizes, GqaFamily, gqa, read_heads
from moefold.model.families.hub import ConfigReader, aux_coefficient, read_aux, read_rope
from moefold.model.families.names import expert_names, gqa_names, llama_names
from moefold.moe.config import Aux

_AUX = 1e-3  # the default of transformers' class


class Qwen3MoeShape(FreeGqaSizes):
    """Sizes of a Qwen3-MoE."""

    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0, whose feed-forward is dense."""
    dense_width: Size | None = None
    """Width of those; None is top_k * expert_width."""

    def rules(self) -> Iterator[Violation]:
        """Dense layers exist, stand once, and leave a layer with experts."""
        yield from super().rules()
        legal = sorted({n for n in self.dense_layers if 0 <= n < self.layers})
        if len(legal) == self.layers:
            legal = legal[:-1]
        if list(self.dense_layers) != legal:
            last = self.layers - 1
            rule = f"must be increasing numbers from 0 to {last}, not all: a layer keeps experts"
            yield Violation(("dense_layers",), self.dense_layers, rule, tuple(legal))

    @property
    def width_of_dense(self) -> int:
        """``dense_width``, or what it follows from."""
        return self.dense_width or self.top_k * self.expert_width


@MODEL.register
class Qwen3Moe(GqaFamily):
    """A Qwen3-MoE."""

    family: Literal["qwen3_moe"] = "qwen3_moe"
    shape: Qwen3MoeShape
    renormalise: bool = True
    """Whether the chosen probabilities are divided by their sum, as in the released models."""
    balance: Balance = (Aux(coefficient=_AUX),)
    rope: Rope = Rope(theta=1e6)

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    hf_sizes = {**HF_SIZES, "moe_intermediate_size": "expert_width"}
    tensors = (*llama_names(), *gqa_names(qk_norm=True), *expert_names())

    router_fields = ("renormalise",)

    def blocks(self) -> Sequence[Block]:
        """Blocks with experts, those named in ``dense_layers`` without."""
        attention = gqa(self.shape, self.rope, qk_norm="head")
        sparse = Block(attention=attention, ffn=self.moe())
        dense = Block(attention=attention, ffn=Dense(width=self.shape.width_of_dense))
        named = set(self.shape.dense_layers)
        return [dense if n in named else sparse for n in range(self.shape.layers)]

    @classmethod
    def read(cls, config: ConfigReader) -> dict[str, Any]:
        """Take Qwen3-MoE's own fields."""
        config.only("use_sliding_window", False)
        config.skip("sliding_window", "max_window_layers")  # read only with a sliding window
        # Older releases write num_experts, newer ones num_local_experts.
        local = config.take("num_local_experts", int, None)
        experts = local if local is not None else config.take("num_experts", int)
        config.only("num_experts", experts)
        step = config.take("decoder_sparse_step", int, 1)
        if step < 1:
            config.refuse(f"decoder_sparse_step is {step}, less than 1")
            step = 1
        named = config.take("mlp_only_layers", list, [])
        layers = range(config.take("num_hidden_layers", int))
        return {
            "shape": {
                **read_heads(config),
                "experts": experts,
                "dense_layers": tuple(n for n in layers if n in named or (n + 1) % step),
                "dense_width": config.take("intermediate_size", int, None),
            },
            "rope": read_rope(config, 1e4, scales_softmax=False),
            "renormalise": config.take("norm_topk_prob", bool, False),
            "balance": read_aux(config, cls.model_type, _AUX),
        }

    def write(self) -> dict[str, Any]:
        """Return Qwen3-MoE's own fields."""
        return {
            "num_experts": self.shape.experts,
            "head_dim": self.shape.dims_per_head,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(self.shape.dense_layers),
            "intermediate_size": self.shape.width_of_dense,
            "norm_topk_prob": self.renormalise,
            "use_sliding_window": False,
            "router_aux_loss_coef": aux_coefficient(self.balance),
        }

    @classmethod
    def shape_of(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes that a decoder shows, and which of its layers are dense."""
        dense = {n: b.ffn for n, b in enumerate(decoder.blocks) if isinstance(b.ffn, Dense)}
        width = next(iter(dense.values())).width if dense else None
        own = {"dense_layers": tuple(dense), "dense_width": width}
        return super().shape_of(decoder) | own
