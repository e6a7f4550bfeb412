"""Dense Hugging Face models from which an MoE model is grown (upcycling)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.layers.kinds.dense import Dense
from moefold.model.config import to_stacks
from moefold.model.families.base import ParsedConfig
from moefold.model.families.registry import from_hf

MOE_FAMILY = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""The MoE family that differs only in its experts, by ``model_type`` of a dense family."""
DEFAULTS = {"mistral": {"sliding_window": 4096}, "qwen3": {"head_dim": 128}}
"""Defaults of the dense families' classes that differ from those of the MoE families."""


def read_dense(
    config: Mapping[str, Any],
    experts: int | None,
    top_k: int | None,
    shards: int,
    renormalise: bool = True,
) -> tuple[ParsedConfig, ParsedConfig]:
    """Read a dense model's ``config.json``; return its description and that of the MoE model.

    ``shards`` is the number of experts into which a copy of a feed-forward is split (granularity);
    ``renormalise``: whether the weights of a token's experts are divided by their sum.

    Raises:
        ValueError: if the numbers do not fit, with the nearest ones that do.
    """
    top_k = top_k or 2 * shards
    near = max(1, (experts or 8) // shards) * shards
    dense = MOE_FAMILY[config["model_type"]]
    width = config.get("intermediate_size") or 0
    valid = {
        "experts": experts is not None and experts % shards == 0,
        "top-k": top_k % shards == 0 and top_k <= (experts or top_k),
        "granularity": width % shards == 0,
    }
    rules = {
        "experts": f"must be given for a dense model, as a multiple of --granularity ({shards}), "
        f"such as {near}",
        "top-k": f"must be at most --experts, and a multiple of --granularity ({shards}): a token "
        f"takes all shards of a copy; nearest: "
        f"{min(max(1, round(top_k / shards)) * shards, near)}",
        "granularity": f"must divide the width of the feed-forward ({width}); nearest: "
        f"{max(n for n in range(1, shards + 1) if width % n == 0)}",
    }
    if wrong := [f"--{name}: {rules[name]}" for name, fits in valid.items() if not fits]:
        raise ValueError("; ".join(wrong))
    if dense == "mixtral" and not renormalise:
        raise ValueError(
            f"--routing: pre_softmax is not what {dense} computes, which this "
            f"{config['model_type']} becomes; give a qwen3, or leave --routing out"
        )
    changed = {"model_type": dense, "num_experts_per_tok": top_k, "architectures": None}
    changed |= {"router_aux_loss_coef": 1e-3}
    if dense == "mixtral":
        changed |= {"num_local_experts": experts, "intermediate_size": width // shards}
    else:
        changed |= {"num_experts": experts, "moe_intermediate_size": width // shards}
        changed |= {"norm_topk_prob": renormalise, "mlp_only_layers": [], "decoder_sparse_step": 1}
    defaults = {"rope_theta": 1e4, **DEFAULTS.get(config["model_type"], {})}
    fields = defaults | {name: value for name, value in config.items() if name != "layer_types"}
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        fields["layer_types"] = config["layer_types"]
    if fields["rope_theta"] is None:
        fields["rope_theta"] = defaults["rope_theta"]
    mixture = from_hf({**fields, **changed})
    ffn = Dense(width=width)
    blocks = (block.model_copy(update={"ffn": ffn}) for block in mixture.decoder.blocks)
    decoder = mixture.decoder.model_copy(update={"stacks": to_stacks(blocks)})
    return replace(mixture, decoder=decoder), mixture
