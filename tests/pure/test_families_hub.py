"""A Hugging Face ``config.json`` is read to the last field, or refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moefold.files import read_json
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.model.families.folder import read_config
from moefold.model.families.hub import export_notes
from moefold.model.families.registry import MISSING_PARTS, families, family_of, from_hf
from moefold.moe.config import Aux, Capacity, Moe
from moefold.planner.count import count
from moefold.run import load_run
from tests.families_page import table

# What the released models' files hold (sizes and switches are facts of the models).
RELEASED: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "OLMoE-1B-7B-0924": {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.0.dev0",
        "use_cache": True,
        "vocab_size": 50304,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
MIXTRAL, QWEN, OLMOE, DEEPSEEK = RELEASED.values()
RELEASED["Kimi-K2-Instruct"] = DEEPSEEK | {
    "aux_loss_alpha": 0.001,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}


def moe_of(config: dict[str, Any]) -> Moe:
    ffn = from_hf(config).decoder.blocks[-1].ffn
    assert isinstance(ffn, Moe)
    return ffn


@pytest.mark.parametrize("config", RELEASED.values(), ids=RELEASED)
def test_released_models_are_read_and_written_back(config: dict[str, Any]) -> None:
    reading = from_hf(config)
    written = family_of(reading.decoder).to_hf(reading.decoder)
    assert from_hf(json.loads(json.dumps(written))).decoder == reading.decoder
    named = {"rope_scaling", "num_nextn_predict_layers", "model_type"}
    same = config.keys() & written.keys() - named
    assert {k: written[k] for k in same} == {k: config[k] for k in same}
    for name in ("num_hidden_layers", "num_experts_per_tok", "rms_norm_eps", "vocab_size"):
        assert name in same


def test_released_sizes_are_where_they_belong() -> None:
    mixtral = from_hf(MIXTRAL).decoder
    assert (mixtral.vocab, mixtral.hidden, len(mixtral.blocks)) == (32000, 4096, 32)
    attention = mixtral.blocks[0].attention
    assert isinstance(attention, Gqa)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (32, 8, 128)
    assert attention.rope.theta == 1e6
    assert moe_of(MIXTRAL).balance == (Aux(coefficient=0.02),)

    qwen = from_hf(QWEN).decoder.blocks[0].attention
    assert isinstance(qwen, Gqa)
    assert (qwen.head_dim, qwen.qk_norm) == (128, "head")

    deepseek = from_hf(DEEPSEEK)
    assert deepseek.fp8_block == (128, 128)
    assert [s.repeat for s in deepseek.decoder.stacks] == [3, 58, 1]
    assert count(deepseek.decoder).parameters == 682_636_472_320
    mla = deepseek.decoder.blocks[0].attention
    assert isinstance(mla, Mla)
    assert (mla.q_rank, mla.kv_rank, mla.latent_epsilon) == (1536, 512, 1e-6)
    assert mla.rope.yarn is not None
    assert mla.rope.yarn.magnitude == 1.0
    assert mla.rope.yarn.softmax_factor == (0.1 * math.log(40) + 1) ** 2
    router = moe_of(DEEPSEEK).router
    assert router.groups is not None
    assert (router.groups.count, router.groups.keep, router.groups.score) == (8, 4, "sum_best")
    assert (router.scale, router.epsilon, router.renormalise) == (2.5, 1e-20, True)
    assert any("auto_map" in n and "never run" in n for n in deepseek.notes)
    assert deepseek.special_tokens == {"bos_token_id": 0, "eos_token_id": 1}


UNSUPPORTED = [
    (MIXTRAL, {"sliding_window": 4096}),
    (MIXTRAL, {"router_jitter_noise": 0.1}),
    (MIXTRAL, {"hidden_act": "gelu"}),
    (MIXTRAL, {"architectures": ["MixtralForSequenceClassification"]}),
    (MIXTRAL, {"attention_dropout": 0.1}),
    (MIXTRAL, {"partial_rotary_factor": 0.5}),
    (MIXTRAL, {"quantization_config": {"quant_method": "gptq"}}),
    (QWEN, {"attention_bias": True}),
    (QWEN, {"use_sliding_window": True}),
    (QWEN, {"decoder_sparse_step": 0}),
    (QWEN, {"num_local_experts": 64}),
    (OLMOE, {"clip_qkv": 8.0}),
    (OLMOE, {"head_dim": 64}),
    (DEEPSEEK, {"scoring_func": "softmax"}),
    (DEEPSEEK, {"topk_method": "group_limited_greedy"}),
    (DEEPSEEK, {"moe_layer_freq": 2}),
    (DEEPSEEK, {"num_key_value_heads": 8}),
    (DEEPSEEK, {"qk_head_dim": 64}),
    (MIXTRAL, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    (MIXTRAL, {"rope_scaling": {"type": "yarn", "factor": 2.0, "surprise": 1}}),
]


@pytest.mark.parametrize(("config", "change"), UNSUPPORTED, ids=lambda c: next(iter(c)))
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any]
) -> None:
    (name,) = change
    if name == "rope_scaling":
        name = "rotary positions"
    if name == "num_local_experts":
        name = "num_experts"
    with pytest.raises(ValueError, match=rf"config\.json: .*{name}"):
        from_hf(config | change)


@pytest.mark.parametrize("config", RELEASED.values(), ids=RELEASED)
def test_a_field_nobody_reads_is_refused(config: dict[str, Any]) -> None:
    """So is a new switch of a later release, which may change what is computed."""
    with pytest.raises(ValueError, match=r"unknown fields.*: attention_sink, residual_multiplier"):
        from_hf(config | {"residual_multiplier": 0.5, "attention_sink": True})


@pytest.mark.parametrize("config", RELEASED.values(), ids=RELEASED)
def test_every_size_is_asked_for_and_checked(config: dict[str, Any]) -> None:
    family = family_of(from_hf(config).decoder)
    for usual in (*family.hf_sizes, "rms_norm_eps"):
        name = family.renamed_fields.get(usual, usual)
        rest = {k: v for k, v in config.items() if k != name}
        with pytest.raises(ValueError, match=f"{name} is missing"):
            from_hf(rest)
        for junk in ("8", True, [1]):
            with pytest.raises(ValueError, match=f"{name} is .* not of type"):
                from_hf(config | {name: junk})


def test_all_problems_are_said_at_once() -> None:
    wrong = MIXTRAL | {"hidden_size": "many", "hidden_act": "relu", "new": 1}
    with pytest.raises(ValueError, match="hidden_size") as caught:
        from_hf(wrong)
    assert "hidden_act" in str(caught.value)
    assert "unknown fields, which may change what the model computes: new" in str(caught.value)


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape\.kv_heads is 5.*divide heads"):
        from_hf(MIXTRAL | {"num_key_value_heads": 5})
    with pytest.raises(ValueError, match=r"shape\.top_k is 9.*at most experts"):
        from_hf(MIXTRAL | {"num_experts_per_tok": 9})


@pytest.mark.parametrize(
    ("config", "default"),
    [(MIXTRAL, 0.001), (QWEN, 0.001), (OLMOE, 0.01)],
    ids=lambda c: str(c)[:0],
)
def test_a_missing_coefficient_is_the_documented_default_and_said(
    config: dict[str, Any], default: float
) -> None:
    name = "router_aux_loss_coef"
    reading = from_hf({k: v for k, v in config.items() if k != name})
    moe = reading.decoder.blocks[0].ffn
    assert isinstance(moe, Moe)
    assert moe.balance == (Aux(coefficient=default),)
    assert [n for n in reading.notes if name in n and str(default) in n]
    assert not [n for n in from_hf(config).notes if name in n]
    assert moe_of(config | {name: 0.0}).balance == ()
    assert moe_of(config | {name: 0.5}).balance == (Aux(coefficient=0.5),)


def test_deepseek_says_its_balance_too() -> None:
    notes = from_hf(DEEPSEEK).notes
    assert [n for n in notes if "aux_loss_alpha" in n and "0.0001" in n]
    assert [n for n in notes if "of the selection bias is 0.001" in n]
    given = DEEPSEEK | {"aux_loss_alpha": 0.003, "seq_aux": False}
    assert moe_of(given).balance[1] == Aux(over="micro_batch", coefficient=0.003)
    assert len(moe_of(DEEPSEEK | {"aux_loss_alpha": 0.0}).balance) == 1


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
GAIN = 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("config", "more", "magnitude", "softmax"),
    [
        (QWEN, {}, GAIN, 1.0),
        (QWEN, {"attention_factor": 1.7}, 1.7, 1.0),
        (QWEN, {"mscale": 0.5}, GAIN, 1.0),
        (QWEN, {"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / GAIN, 1.0),
        (DEEPSEEK, {}, GAIN, 1.0),
        (DEEPSEEK, {"mscale": 0.5}, GAIN, 1.0),
        (DEEPSEEK, {"mscale_all_dim": 1.0}, GAIN, GAIN**2),
        (DEEPSEEK, {"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / GAIN, GAIN**2),
    ],
)
def test_yarn_means_what_it_means_in_transformers(
    config: dict[str, Any], more: dict[str, float], magnitude: float, softmax: float
) -> None:
    """A lone mscale is not read there; only DeepSeek's attention scales its softmax."""
    reading = from_hf(config | {"rope_scaling": YARN | more})
    written = family_of(reading.decoder).to_hf(reading.decoder)
    for decoder in (reading.decoder, from_hf(written).decoder):
        attention = decoder.blocks[0].attention
        assert isinstance(attention, Gqa | Mla)
        yarn = attention.rope.yarn
        assert yarn is not None
        assert yarn.magnitude == pytest.approx(magnitude, rel=1e-15)
        assert yarn.softmax_factor == pytest.approx(softmax, rel=1e-15)


def test_the_newer_form_of_rotary_fields_is_read_too() -> None:
    newer = {k: v for k, v in QWEN.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = YARN | {"rope_theta": 5e5}
    older = QWEN | {"rope_theta": 5e5, "rope_scaling": YARN}
    assert from_hf(newer).decoder == from_hf(older).decoder
    del newer["rope_parameters"]
    assert from_hf(newer).decoder.blocks[0].attention.rope.theta == 1e4


def test_layers_without_experts_follow_either_field() -> None:
    def dense(**change: Any) -> list[int]:
        blocks = from_hf(QWEN | {"num_hidden_layers": 6} | change).decoder.blocks
        return [n for n, b in enumerate(blocks) if not isinstance(b.ffn, Moe)]

    assert dense() == []
    assert dense(mlp_only_layers=[0, 5]) == [0, 5]
    assert dense(decoder_sparse_step=2) == [0, 2, 4]
    assert dense(decoder_sparse_step=3, mlp_only_layers=[2]) == [0, 1, 2, 3, 4]


def test_yarn_without_a_length_and_a_null_size_are_refused_by_name() -> None:
    bare = {k: v for k, v in QWEN.items() if k != "max_position_embeddings"}
    with pytest.raises(ValueError, match="original_max_position_embeddings is missing"):
        from_hf(bare | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(ValueError, match="num_experts is missing"):
        from_hf(QWEN | {"num_experts": None})


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.mtp.x", "model.mtp_block.0.x"])
def test_further_tokens_are_left_out_by_any_name(name: str) -> None:
    assert from_hf(QWEN).model.ignore_reason(name) == "layers for multi-token prediction"


def test_what_a_folder_cannot_hold_is_said() -> None:
    assert export_notes(from_hf(OLMOE).decoder) == []
    decoder = (
        families()["olmoe"]
        .of(from_hf(OLMOE).decoder)
        .model_copy(
            update={
                "capacity": Capacity(factor=1.5),
                "balance": (Aux(), Aux(over="sequence")),
            }
        )
        .describe(50304)
    )
    said = " ".join(export_notes(decoder))
    assert "capacity" in said
    assert "only the first aux loss" in said
    assert "bias" in " ".join(export_notes(from_hf(DEEPSEEK).decoder))


def test_a_family_that_is_not_here_is_refused_with_the_part_it_lacks() -> None:
    assert not MISSING_PARTS.keys() & families().keys()
    for model_type, part in MISSING_PARTS.items():
        with pytest.raises(ValueError, match=f"'{model_type}' is not supported: it needs {part}"):
            from_hf({"model_type": model_type})


def test_the_page_of_families_says_which_parts_each_uses() -> None:
    page = Path(__file__).parents[2] / "docs" / "families.md"
    assert table() in page.read_text("utf-8"), "write it anew: make golden"


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'kimi_lineer' is not known; nearest: 'kimi_linear'; "):
        from_hf({"model_type": "kimi_lineer"})
    with pytest.raises(ValueError, match=r"'any_vl' .*; nor is 'llama' of its text_config; "):
        from_hf({"model_type": "any_vl", "text_config": {"model_type": "llama"}})
    with pytest.raises(ValueError, match=r"'llama' is not known; known: .*deepseek_v3, dots1"):
        from_hf({"model_type": "llama"})
    with pytest.raises(ValueError, match="model_type is missing"):
        from_hf({})


def test_a_folder_of_an_unknown_model_is_one_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError) as error:
        load_run(tmp_path)
    known = ", ".join(sorted(families()))
    path = tmp_path / "config.json"
    assert str(error.value) == f"{path}: model_type 'llama' is not known; known: {known}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "a JSON object, not a list"),
        ("{", "not JSON"),
        ('{"a": NaN}', "NaN is not allowed"),
        ('{"a": ' * 100_000, "not JSON"),
        ('{"a": "' + "x" * 2000 + '"}', "larger than 1000 bytes"),
        ("\x80", "not UTF-8 text"),
    ],
)
def test_a_hostile_json_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=said):
        read_json(path, limit=10**6 if "larger" not in said else 1000)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", RELEASED)
def test_more_layers_than_memory_holds_are_refused_before_they_are_written_out(name: str) -> None:
    with pytest.raises(ValueError, match="num_hidden_layers is 2147483648; must be at most 10000"):
        from_hf({**RELEASED[name], "num_hidden_layers": 2**31})
    with pytest.raises(ValueError, match=r"model\.shape\.layers = 2147483648"):
        load_run("tiny", ["model.shape.layers=2147483648"])
