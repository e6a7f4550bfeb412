"""Published models as descriptions, from ``bench/data/published_models.json``."""

import json
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from moefold.config.base import Record
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.layers.kinds.windowed import Windowed
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Groups, Moe, Router, Shared
from moefold.planner.foreign import BiasedMoe, DeltaNet, Mamba2, Nothing, PlainMoe, block

FILE = Path(__file__).parents[1] / "data" / "published_models.json"
NEMOTRON_VOCAB = 131072
"""Of the two larger Nemotron-3 models, whose own is not printed: as Nano's."""


class Undescribed(ValueError):
    """A model whose dimensions the sources do not give in full."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return every entry by the model's name."""
    return json.loads(FILE.read_text("utf-8"))


@cache
def decoder(name: str) -> Decoder:
    """Return a published model.

    Raises:
        Undescribed: where a dimension is missing.
    """
    entry = published().get(name)
    if entry is None:
        raise Undescribed(f"{name} is no published model that the file has")
    try:
        blocks = _hybrid(entry) if "hybrid_pattern" in entry else _blocks(name, entry)
        vocab = entry.get("vocab") or (NEMOTRON_VOCAB if "hybrid_pattern" in entry else None)
        if vocab is None:
            raise KeyError("vocab")
    except (KeyError, TypeError, ValueError) as error:
        raise Undescribed(f"{name}: dimensions are not complete ({error})") from None
    stacks = []
    for _, same in groupby(blocks, key=id):
        group = list(same)
        stacks.append(Stack(repeat=len(group), blocks=(group[0],)))
    return Decoder(
        vocab=vocab,
        hidden=entry["hidden"],
        stacks=tuple(stacks),
        tied=bool(entry.get("tied_embeddings")),
    )


def _blocks(name: str, entry: dict[str, Any]) -> list[Block]:
    """Return the blocks of a transformer, dense ones first unless they alternate."""
    mixture = _moe(entry, biased=name.startswith("GPT-OSS"))
    dense = entry.get("dense_layers", 0)
    total = dense + entry["moe_layers"]
    kinds = [block(attention, mixture) for attention in _attentions(name, entry)]
    found = [kinds[i % len(kinds)] for i in range(total)]
    if dense:
        plain = block(kinds[0].attention, Dense(width=entry["dense_ffn"]))
        step = 2 if dense == entry["moe_layers"] else 1
        for i in range(0, dense * step, step):
            found[i] = plain
    return found


def _attentions(name: str, entry: dict[str, Any]) -> list[Record]:
    """Return the attention of each layer of the pattern that repeats."""
    if entry["attention"] == "MLA":
        mla = entry["mla"]
        record = Mla(
            heads=entry["heads"],
            q_rank=mla["q_lora_rank"],
            kv_rank=mla["kv_lora_rank"],
            nope_dim=mla["qk_nope_head_dim"],
            rope_dim=mla["qk_rope_head_dim"],
            v_dim=mla["v_head_dim"],
        )
        return [record]
    sizes = {name: entry[name] for name in ("heads", "kv_heads", "head_dim")}
    norm = "head" if name.startswith("Qwen3") else "none"
    full = Gqa(**sizes, qk_norm=norm)
    if "sliding window 128" in entry["attention"] and entry["attention"].startswith("GQA"):
        return [Windowed(**sizes, window=128, sinks=False), full]
    if "delta net" in entry["attention"]:
        linear = DeltaNet(key_heads=16, value_heads=32)
        return [linear, linear, linear, full]
    if not entry["attention"].startswith("GQA"):
        raise ValueError(entry["attention"])
    return [full]


def _moe(entry: dict[str, Any], biased: bool = False) -> Moe:
    """Return the feed-forward with experts."""
    grouped = "8 groups, top-4" in entry.get("router", "")
    router = Router(
        experts=entry["experts"],
        top_k=entry["topk"],
        renormalise=entry["topk"] > 1,
        groups=Groups(count=8, keep=4) if grouped else None,
    )
    shared = Shared(width=entry["shared_ffn"]) if entry.get("shared_experts") else None
    if entry.get("gated_mlp", True):
        kind = BiasedMoe if biased else Moe
        return kind(width=entry["moe_ffn"], router=router, shared=shared)
    return PlainMoe(
        width=entry["moe_ffn"], router=router, shared=shared, latent=entry.get("moe_latent")
    )


def _hybrid(entry: dict[str, Any]) -> list[Block]:
    """Return the blocks of a pattern of letters: M a state space, * attention, E experts."""
    mamba = Mamba2(**entry["mamba"])
    attention = Gqa(**{name: entry[name] for name in ("heads", "kv_heads", "head_dim")})
    mixture = _moe(entry)
    pairs = {
        (mixer, ffn): block(mixers, ffns)
        for mixer, mixers in (("M", mamba), ("*", attention), ("-", Nothing()))
        for ffn, ffns in (("E", mixture), ("-", Nothing()))
    }
    found, letters = [], entry["hybrid_pattern"]
    for i, letter in enumerate(letters):
        if letter == "E":
            continue
        found.append(pairs[letter, "E" if letters[i + 1 : i + 2] == "E" else "-"])
    return found
