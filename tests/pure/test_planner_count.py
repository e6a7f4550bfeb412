"""Counts without torch, against what Megatron-LM and transformers count for published models."""

from typing import Any

import pytest

from moefold.config.base import Record
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block, Decoder, Stack
from moefold.model.families.deepseek_v3 import DeepseekV3
from moefold.model.families.mixtral import Mixtral
from moefold.moe.config import Idle, IdleRouter, Moe, Router, Shared
from moefold.planner.count import Counts, count
from moefold.run import load_run
from moefold.spec.layer import Attention
from tests.published import FAMILIES, decoder, latents, qk_norms, reference

MODELS = reference()["models"]
EXACT = [n for n in MODELS if MODELS[n]["hf_params_exact"]]
ROUTER_BIASES = {"gpt-oss-20b": 24 * 32}
"""Biases that a description cannot hold and that Megatron counts as well."""
BIASES = {"qwen2-57b-a14b": 129024, "glm-4.5-air": 659456, "gpt-oss-20b": 6829056 + 24 * 32}
"""All biases and sinks that a description cannot hold: see the file's quirks."""
GROUPS = {
    "embed": "embedding",
    "attn": "attention",
    "norm": "norms",
    "other": "ffn",
    "experts": "experts",
    "router": "router",
    "shared": "shared",
    "lm_head": "head",
}
RECIPES = {
    "mixtral_8x7b": "mixtral-8x7b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "olmoe_1b_7b": "olmoe-1b-7b",
    "deepseek_v3": "deepseek-v3",
}


def test_the_six_models_of_our_families_are_there() -> None:
    assert set(FAMILIES) < set(MODELS)
    assert all(len(MODELS[name]["flops"]) == 4 for name in MODELS)


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_those_of_transformers(name: str) -> None:
    want = MODELS[name]["hf_params_exact"]
    assert count(decoder(name)).parameters == want["total"] - BIASES.get(name, 0)


@pytest.mark.parametrize("name", [n for n in EXACT if n not in BIASES])
def test_each_group_of_parameters_is_that_of_transformers(name: str) -> None:
    parts = {n: p.parameters for n, p in count(decoder(name)).parts.items() if p.parameters}
    groups = MODELS[name]["hf_params_exact"]["groups"]
    assert parts == {GROUPS[group]: size for group, size in groups.items()}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_megatron_and_norms_on_queries(name: str) -> None:
    counts, want = count(decoder(name)), MODELS[name]["megatron_params"]
    apart = ROUTER_BIASES.get(name, 0) - qk_norms(name)
    assert counts.parameters + apart == want["total"]
    assert counts.active_parameters + apart == want["active"]


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_megatron(name: str) -> None:
    """At every length, to the last unit. Plant: count all experts, or the dense width."""
    counts = count(decoder(name))
    for length, (per_sequence, per_token) in MODELS[name]["flops"].items():
        assert counts.flops([int(length)]) == per_sequence
        assert counts.flops_per_token(int(length)) == per_token


@pytest.mark.parametrize("case", reference()["flops_of_packed"], ids=lambda c: c["model"])
def test_flops_of_packed_sequences(case: dict[str, Any]) -> None:
    counts, lengths = count(decoder(case["model"])), case["lengths"] * case["repeat"]
    assert counts.flops(lengths) == case["flops"]


def attended(counts: Counts) -> int:
    """Return the multiply-adds of attention per token and token that it attends to."""
    return sum(n * core.query_width for core, n in counts.cores if isinstance(core, Attention))


@pytest.mark.parametrize("name", FAMILIES)
def test_full_attention_adds_the_half_that_the_mask_leaves_out(name: str) -> None:
    counts = count(decoder(name))
    core = 6 * attended(counts) * 4096
    assert counts.flops_per_token(4096, causal=False) - counts.flops_per_token(4096) == core / 2


def published(sizes: dict[str, Any]) -> Decoder:
    """Return a published shape that Mixtral's or DeepSeek-V3's family can hold."""
    shape = {
        "vocab": sizes["vocab"],
        "hidden": sizes["hidden"],
        "layers": sizes["layers"],
        "heads": sizes["heads"],
        "experts": sizes["experts"],
        "top_k": sizes["topk"],
        "expert_width": sizes["moe_ffn"],
    }
    if sizes["attention"] == "MLA":
        mla = sizes["mla"]
        shape |= latents(
            mla
            | {
                "qk_head_dim": mla["qk_nope_head_dim"],
                "qk_pos_emb_head_dim": mla["qk_rope_head_dim"],
            }
        )
        shape |= {"dense_layers": sizes["dense_layers"], "dense_width": sizes["dense_ffn"]}
        shape |= {"shared_width": sizes["shared_ffn"]}
        return DeepseekV3.model_validate({"shape": shape}).describe(2)
    shape |= {"kv_heads": sizes["kv_heads"], "head_dim": sizes["head_dim"]}
    return Mixtral.model_validate({"shape": shape}).describe(2)


@pytest.mark.parametrize("name", reference()["published"])
def test_published_sizes_give_the_published_totals(name: str) -> None:
    """To the two decimals that were printed; Qwen's norms on heads are below them."""
    sizes = reference()["published"][name]
    counts, want = count(published(sizes)), sizes["derived_check"]
    found = {
        "total_params_b": counts.parameters / 1e9,
        "active_params_b_incl_embeddings": counts.active_parameters / 1e9,
        "train_gflop_per_token_seq4096_causal_no_mtp": counts.flops_per_token(4096) / 1e9,
    }
    assert found == pytest.approx(want, abs=0.00501)


@pytest.mark.parametrize(("recipe", "name"), RECIPES.items())
def test_recipes_have_the_published_sizes(recipe: str, name: str) -> None:
    ours, theirs = load_run(recipe).decoder, decoder(name)
    assert count(ours).parameters == MODELS[name]["hf_params_exact"]["total"]
    assert count(ours) == count(theirs)


def test_what_a_token_does_not_pass_through_is_idle() -> None:
    """Uneven widths, one layer without experts, a gate: written out by hand."""
    gqa = Gqa(heads=3, kv_heads=1, head_dim=4, qk_norm="projection")
    mla = Mla(heads=2, q_rank=None, kv_rank=5, nope_dim=4, rope_dim=2, v_dim=3)
    moe = Moe(width=7, router=Router(experts=5, top_k=3), shared=Shared(width=11, gate=True))
    blocks = (Block(attention=gqa, ffn=Dense(width=13)), Block(attention=mla, ffn=moe))
    counts = count(Decoder(vocab=17, hidden=8, stacks=(Stack(repeat=2, blocks=blocks),), tied=True))
    assert {name: part.parameters for name, part in counts.parts.items()} == {
        "embedding": 17 * 8,
        "head": 0,
        "attention": 2 * (8 * (12 + 4 + 4 + 12) + 8 * (12 + 7) + 5 * 14 + 6 * 8),
        "norms": 8 + 2 * (4 * 8 + 12 + 4 + 5),
        "ffn": 2 * 3 * 8 * 13,
        "experts": 2 * 5 * 3 * 8 * 7,
        "router": 2 * 5 * 8,
        "shared": 2 * (3 * 8 * 11 + 8),
    }
    assert counts.parameters - counts.active_parameters == 2 * 2 * 3 * 8 * 7
    assert attended(counts) == 2 * (3 * (4 + 4) + 2 * (6 + 3))


def test_a_token_passes_through_no_more_experts_than_there_are() -> None:
    """More choices than experts compute something: all of their weights were counted twice."""
    router = IdleRouter(experts=2, top_k=4, idle=Idle(identity=3))
    gqa, moe = Gqa(heads=2, kv_heads=1, head_dim=4), Moe(width=7, router=router)
    stack = Stack(blocks=(Block(attention=gqa, ffn=moe),))
    counts = count(Decoder(vocab=17, hidden=8, stacks=(stack,)))
    assert counts.active_parameters == counts.parameters
    assert counts.parts["experts"].multiplied == 2 * 3 * 8 * 7


class Widened(Dense):
    """A kind from outside that another is the base of."""


class Foreign(Record):
    """A kind from outside that nobody said how to count."""


def test_a_kind_from_outside_is_counted_as_what_it_inherits_from() -> None:
    """Or its name is asked for."""
    found = {}
    for ffn in (Dense(width=7), Widened(width=7), Foreign()):
        gqa = Gqa(heads=2, kv_heads=1, head_dim=2)
        block: Any = Block.model_construct(attention=gqa, ffn=ffn)
        stacks = (Stack.model_construct(repeat=1, blocks=(block,)),)
        described = Decoder.model_construct(vocab=8, hidden=4, tied=False, stacks=stacks)
        if isinstance(ffn, Foreign):
            with pytest.raises(ValueError, match="Foreign is not described"):
                count(described)
        else:
            found[type(ffn)] = count(described)
    assert found[Dense] == found[Widened] and found[Dense].parts["ffn"].parameters == 3 * 4 * 7


def test_attention_within_a_window_counts_the_pairs_that_it_sees() -> None:
    """Of a sequence of seven and a window of three, a row sees 3 - 9 / 14 on average."""
    core = Attention(heads=2, kv_heads=1, qk_dim=4, v_dim=6, window=3)
    counts = Counts(cores=((core, 2),))
    pairs = 7 * (3 - 9 / 14)
    assert counts.flops([7]) == round(6 * 2 * 2 * 10 * pairs)
    assert counts.flops([7], causal=False) == 6 * 2 * 2 * 10 * 49
    assert counts.flops([2]) == 6 * 2 * 2 * 10 * 2
