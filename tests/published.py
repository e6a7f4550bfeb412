"""Published models: their sizes as our descriptions, beside counts made by others.

The numbers stand in ``tests/data/reference_models.json`` with where they come from.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block, Decoder, Stack
from moefold.model.families.base import Family
from moefold.model.families.deepseek_v3 import DeepseekV3
from moefold.model.families.mixtral import Mixtral
from moefold.model.families.olmoe import Olmoe
from moefold.model.families.qwen3_moe import Qwen3Moe
from moefold.moe.config import Moe, Router, Shared

FILE = Path(__file__).parent / "data" / "reference_models.json"
FAMILIES: dict[str, type[Family]] = {
    "mixtral-8x7b": Mixtral,
    "mixtral-8x22b": Mixtral,
    "qwen3-30b-a3b": Qwen3Moe,
    "qwen3-235b-a22b": Qwen3Moe,
    "olmoe-1b-7b": Olmoe,
    "deepseek-v3": DeepseekV3,
}
"""The models that a family of ours describes; the others are written out part by part."""


@cache
def reference() -> dict[str, Any]:
    """Return the whole file."""
    return json.loads(FILE.read_text("utf-8"))


def decoder(name: str) -> Decoder:
    """Return a model of the file as a description."""
    sizes = reference()["models"][name]["args"]
    return by_family(name, sizes) if name in FAMILIES else part_by_part(sizes)


def by_family(name: str, sizes: dict[str, Any]) -> Decoder:
    """Return the description that the model's family makes of its few sizes."""
    family = FAMILIES[name]
    shape = {
        "vocab": sizes["padded_vocab_size"],
        "hidden": sizes["hidden_size"],
        "layers": sizes["num_layers"],
        "heads": sizes["num_attention_heads"],
        "experts": sizes["num_experts"],
        "top_k": sizes["moe_router_topk"],
        "expert_width": sizes["moe_ffn_hidden_size"],
    }
    if family is DeepseekV3:
        shape |= latents(sizes) | {
            "dense_layers": sizes["dense_layers"],
            "dense_width": sizes["ffn_hidden_size"],
            "shared_width": sizes["moe_shared_expert_intermediate_size"],
        }
    else:
        shape |= {"kv_heads": sizes["num_query_groups"]}
        if family is not Olmoe:
            shape |= {"head_dim": sizes["kv_channels"]}
    return family.model_validate({"shape": shape}).describe(2)


def latents(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of latent attention."""
    return {
        "q_rank": sizes.get("q_lora_rank"),
        "kv_rank": sizes["kv_lora_rank"],
        "nope_dim": sizes["qk_head_dim"],
        "rope_dim": sizes["qk_pos_emb_head_dim"],
        "v_dim": sizes["v_head_dim"],
    }


def part_by_part(sizes: dict[str, Any]) -> Decoder:
    """Return a description without a family: dense layers first, biases left out."""
    heads = sizes["num_attention_heads"]
    attention = (
        Mla(heads=heads, **latents(sizes))
        if sizes["multi_latent_attention"]
        else Gqa(heads=heads, kv_heads=sizes["num_query_groups"], head_dim=sizes["kv_channels"])
    )
    dense, layers = sizes["dense_layers"], sizes["num_layers"]
    stacks = []
    if dense:
        ffn = Dense(width=sizes["ffn_hidden_size"])
        stacks.append(Stack(repeat=dense, blocks=(Block(attention=attention, ffn=ffn),)))
    if layers > dense:
        block = Block(attention=attention, ffn=mixture(sizes))
        stacks.append(Stack(repeat=layers - dense, blocks=(block,)))
    return Decoder(
        vocab=sizes["padded_vocab_size"], hidden=sizes["hidden_size"], stacks=tuple(stacks)
    )


def mixture(sizes: dict[str, Any]) -> Moe:
    """Return the feed-forward with experts."""
    width = sizes.get("moe_shared_expert_intermediate_size")
    return Moe(
        width=sizes["moe_ffn_hidden_size"],
        router=Router(experts=sizes["num_experts"], top_k=sizes["moe_router_topk"]),
        shared=Shared(width=width, gate=sizes["moe_shared_expert_gate"]) if width else None,
    )


def qk_norms(name: str) -> int:
    """Return the parameters of norms on queries and keys, which Megatron's count leaves out."""
    sizes = reference()["models"][name]["args"]
    if name.startswith("qwen3"):
        return sizes["num_layers"] * 2 * sizes["kv_channels"]
    if name.startswith("olmoe"):
        heads = sizes["num_attention_heads"] + sizes["num_query_groups"]
        return sizes["num_layers"] * heads * sizes["kv_channels"]
    return 0
