"""Descriptions of published models, with dimensions from ``published_models.json``.

Dimensions that sources do not state are taken from ``assumed_models.json`` and reported.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from moefold.config.base import Record
from moefold.layers.kinds.delta import DeltaNet
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa, Windowed
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block, Decoder, to_stacks
from moefold.moe.config import Groups, Moe, Router, Shared
from moefold.planner.untrained import AbsentLayer, BiasedMoe, Mamba2, UngatedMoe, make_block

WINDOW_TOKENS = 128


class UndescribedModel(ValueError):
    """Error: a model is unknown, or some of its dimensions are."""


@dataclass(frozen=True)
class PublishedModel:
    """A published model."""

    name: str
    decoder: Decoder
    num_multi_token: int
    """Number of multi-token prediction layers in training."""
    assumed: str = ""
    """Which dimensions are assumed; empty if sources state all."""


@cache
def published_entries() -> dict[str, dict[str, Any]]:
    """Return every model's dimensions by name; ``assumed`` describes those that are assumed."""
    folder = files("moefold.planner")
    models = json.loads(folder.joinpath("published_models.json").read_text("utf-8"))
    assumed = json.loads(folder.joinpath("assumed_models.json").read_text("utf-8"))["models"]
    for name, entry in assumed.items():
        stated = {key: value for key, value in models.get(name, {}).items() if value is not None}
        similar = models[entry["like"]] if "like" in entry else {}
        models[name] = {**similar, **stated, **entry, "assumed": entry["why"]}
    return models


def find_model(name: str) -> str | None:
    """Return the full name of a model, ignoring case and punctuation, or None."""

    def normalise(text: str) -> str:
        return "".join(filter(str.isalnum, text.lower()))

    key = normalise(name)
    return next((model for model in published_entries() if normalise(model) == key), None)


@cache
def published_model(name: str) -> PublishedModel:
    """Return a published model by its full name.

    Raises:
        UndescribedModel: there is no such model, or a dimension is missing.
    """
    entry = published_entries().get(name)
    if entry is None:
        known = ", ".join(published_entries())
        raise UndescribedModel(f"{name} is not a published model; known are {known}")
    try:
        blocks = _hybrid_blocks(entry) if "hybrid_pattern" in entry else _blocks(name, entry)
        decoder = Decoder(
            vocab=entry["vocab"],
            hidden=entry["hidden"],
            stacks=to_stacks(blocks),
            tied=bool(entry.get("tied_embeddings")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UndescribedModel(f"{name}: dimensions are incomplete ({error})") from None
    return PublishedModel(name, decoder, entry.get("mtp_layers") or 0, entry.get("assumed", ""))


def _blocks(name: str, entry: dict[str, Any]) -> list[Block]:
    """Return the blocks of a transformer, dense ones first or alternating."""
    moe = _moe(entry, biased=name.startswith("GPT-OSS"))
    num_dense = entry.get("dense_layers", 0)
    num_moe = entry["moe_layers"]
    pattern = [make_block(attention, moe) for attention in _attention_pattern(name, entry)]
    blocks = [pattern[i % len(pattern)] for i in range(num_dense + num_moe)]
    if num_dense:
        dense = make_block(pattern[0].attention, Dense(width=entry["dense_ffn"]))
        step = 2 if num_dense == num_moe else 1
        for i in range(0, num_dense * step, step):
            blocks[i] = dense
    return blocks


def _attention_pattern(name: str, entry: dict[str, Any]) -> list[Record]:
    """Return the attention of each layer of the repeating pattern."""
    kind = entry["attention"]
    if kind.startswith("MLA"):
        mla = entry["mla"]
        return [
            Mla(
                heads=entry["heads"],
                q_rank=mla["q_lora_rank"],
                kv_rank=mla["kv_lora_rank"],
                nope_dim=mla["qk_nope_head_dim"],
                rope_dim=mla["qk_rope_head_dim"],
                v_dim=mla["v_head_dim"],
            )
        ]
    sizes = {key: entry[key] for key in ("heads", "kv_heads", "head_dim")}
    full = Gqa(**sizes, qk_norm="head" if name.startswith("Qwen3") else "none")
    if "delta net" in kind:
        linear = DeltaNet(**entry.get("delta", {"key_heads": 16, "value_heads": 32}))
        return [linear, linear, linear, full]
    if not kind.startswith("GQA"):
        raise ValueError(kind)
    # Sinks are left out: their cost is not visible in published figures.
    windowed = Windowed(**sizes, window=WINDOW_TOKENS, sinks=False)
    return [windowed, full] if "sliding window" in kind else [full]


def _moe(entry: dict[str, Any], biased: bool = False) -> Moe:
    """Return the MoE feed-forward."""
    grouped = "8 groups, top-4" in entry.get("router", "")
    top_k = entry["topk"]
    groups = Groups(count=8, keep=4) if grouped else None
    router = Router(experts=entry["experts"], top_k=top_k, renormalise=top_k > 1, groups=groups)
    shared = Shared(width=entry["shared_ffn"]) if entry.get("shared_experts") else None
    if entry.get("gated_mlp", True):
        record = BiasedMoe if biased else Moe
        return record(width=entry["moe_ffn"], router=router, shared=shared)
    return UngatedMoe(
        width=entry["moe_ffn"], router=router, shared=shared, latent=entry.get("moe_latent")
    )


def _hybrid_blocks(entry: dict[str, Any]) -> list[Block]:
    """Return the blocks of a pattern of letters: M state space, * attention, E experts."""
    attention = Gqa(**{key: entry[key] for key in ("heads", "kv_heads", "head_dim")})
    mixers = {"M": Mamba2(**entry["mamba"]), "*": attention}
    letters = entry["hybrid_pattern"]
    moe = _moe(entry)
    no_layer = AbsentLayer()
    blocks = []
    for letter, after in zip(letters, letters[1:] + "-", strict=True):
        if letter != "E":  # which belongs to the mixer before it
            blocks.append(make_block(mixers[letter], moe if after == "E" else no_layer))
    return blocks
