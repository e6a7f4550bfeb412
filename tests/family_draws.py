"""All that tests know of a family: how to draw small configurations, and what is peculiar to it.

For each ``model_type`` one function of the choices returns the fields of ``config.json`` that are
the family's own; ``draw`` adds the rest. Released configurations are in ``tests/data/released``.
"""

from collections.abc import Callable
from random import Random
from typing import Any

Fields = dict[str, Any]
OWN: dict[str, Callable[[Random, Fields], Fields]] = {}
BANDS: Fields = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS, WIDTHS, WIDE = (4, 6, 8), (6, 10), (12, 20)


def of(*model_types: str) -> Callable[[Callable[[Random, Fields], Fields]], Any]:
    """Register a function for families whose fields have the same names."""

    def register(function: Callable[[Random, Fields], Fields]) -> Any:
        OWN.update(dict.fromkeys(model_types, function))
        return function

    return register


def draw(model_type: str, random: Random) -> Fields:
    """Draw the fields of a small configuration."""
    heads, dim = random.choice((2, 4)), random.choice((4, 8))
    config: Fields = {
        "vocab_size": random.choice((61, 64)),
        "hidden_size": heads * dim,
        "num_hidden_layers": random.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([d for d in (1, 2, heads) if heads % d == 0]),
        "num_experts_per_tok": random.randint(2, 3),
        "max_position_embeddings": 64,
        "rms_norm_eps": random.choice((1e-5, 1e-6, 1e-3)),
        "tie_word_embeddings": random.random() < 0.4,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": random.choice((1e4, 1e6))},
    }
    if random.random() < 0.5:
        config["rope_parameters"] |= {
            "rope_type": "yarn",
            "factor": random.choice((3.0, 40.0)),
            "original_max_position_embeddings": 16,
        }
        if random.random() < 0.5:
            config["rope_parameters"] |= {"mscale": 0.7, "mscale_all_dim": 0.9}
    return config | OWN[model_type](random, config)


def _coin(random: Random) -> bool:
    return random.random() < 0.5


@of("mixtral")
def _mixtral(random: Random, config: Fields) -> Fields:
    return {
        "num_local_experts": random.choice(EXPERTS),
        "intermediate_size": random.choice(WIDTHS),
        "head_dim": random.choice((6, 8)),
        "router_aux_loss_coef": 0.02,
    }


@of("olmoe")
def _olmoe(random: Random, config: Fields) -> Fields:
    return {
        "num_experts": random.choice(EXPERTS),
        "intermediate_size": random.choice(WIDTHS),
        "norm_topk_prob": _coin(random),
        "router_aux_loss_coef": 0.02,
    }


@of("qwen3_moe")
def _qwen(random: Random, config: Fields) -> Fields:
    step, last = random.choice((1, 1, 2)), config["num_hidden_layers"] - 1
    return {
        "num_experts": random.choice(EXPERTS),
        "moe_intermediate_size": random.choice(WIDTHS),
        "intermediate_size": random.choice(WIDE),
        "head_dim": random.choice((6, 8)),
        "norm_topk_prob": _coin(random),
        "mlp_only_layers": random.choice(([], [0], [] if step == 2 else [last])),
        "decoder_sparse_step": step,
        "router_aux_loss_coef": 0.02,
    }


def sigmoid(random: Random, config: Fields) -> Fields:
    """Draw what DeepSeek-V3's router and its experts have."""
    experts = random.choice((4, 8, 12))
    groups = random.choice([g for g in (1, 2, 4) if experts // g >= 2])
    least = -(-config["num_experts_per_tok"] // (experts // groups))
    return {
        "n_routed_experts": experts,
        "moe_intermediate_size": random.choice(WIDTHS),
        "n_shared_experts": random.choice((1, 2)),
        "n_group": groups,
        "topk_group": random.randint(least, groups),
        "norm_topk_prob": _coin(random),
        "routed_scaling_factor": random.choice((1.0, 2.5)),
    }


def latent(random: Random, config: Fields) -> Fields:
    """Draw the sizes of latent attention."""
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": random.choice((None, 12)),
        "kv_lora_rank": random.choice((8, 10)),
        "qk_nope_head_dim": random.choice((4, 6)),
        "qk_rope_head_dim": random.choice((4, 8)),
        "v_head_dim": random.choice((4, 6)),
        "rope_interleave": _coin(random),
    }


def dense_first(random: Random, config: Fields) -> Fields:
    """Draw how many of the first layers are dense."""
    number, width = random.choice((0, 1)), random.choice(WIDE)
    return {"first_k_dense_replace": number, "intermediate_size": width}


def dense_kinds(random: Random, config: Fields) -> Fields:
    """Draw which layers are dense."""
    kinds = [random.choice(("dense", "sparse")) for _ in range(config["num_hidden_layers"])]
    kinds[random.randrange(len(kinds))] = "sparse"
    return {"mlp_layer_types": kinds, "intermediate_size": random.choice(WIDE)}


def windows(random: Random, config: Fields) -> Fields:
    """Draw which layers see a window."""
    kinds = ("full_attention", "sliding_attention")
    drawn = [random.choice(kinds) for _ in range(config["num_hidden_layers"])]
    return {"sliding_window": random.choice((3, 7)), "layer_types": drawn}


@of("deepseek_v3")
def _deepseek_v3(random: Random, config: Fields) -> Fields:
    return sigmoid(random, config) | latent(random, config) | dense_first(random, config)


@of("glm4_moe_lite")
def _glm4_moe_lite(random: Random, config: Fields) -> Fields:
    return sigmoid(random, config) | latent(random, config) | dense_kinds(random, config)


@of("dots1")
def _dots1(random: Random, config: Fields) -> Fields:
    seen = random.choice((windows(random, config), {"sliding_window": None}))
    return sigmoid(random, config) | dense_first(random, config) | seen


@of("hy_v3")
def _hy_v3(random: Random, config: Fields) -> Fields:
    return dense_kinds(random, config) | {
        "num_experts": random.choice(EXPERTS),
        "moe_intermediate_size": random.choice(WIDTHS),
        "num_shared_experts": random.choice((1, 2)),
        "router_scaling_factor": random.choice((1.0, 2.5)),
        "enable_moe_fp32_combine": _coin(random),
        "head_dim": random.choice((6, 8)),
    }


@of("solar_open")
def _solar_open(random: Random, config: Fields) -> Fields:
    return sigmoid(random, config) | {"head_dim": random.choice((6, 8))}


@of("qwen2_moe")
def _qwen2_moe(random: Random, config: Fields) -> Fields:
    own = _qwen(random, config) | {
        "shared_expert_intermediate_size": random.choice((5, 12)),
        "qkv_bias": random.random() < 0.7,
    }
    if _coin(random):
        own |= windows(random, config) | {"use_sliding_window": True}
    return own


def mixers(random: Random, config: Fields) -> Fields:
    """Draw which layers have attention; one of each kind is there."""
    kinds = ["linear_attention", "full_attention"]
    random.shuffle(kinds)
    rest = random.choices(kinds, k=config["num_hidden_layers"] - 2)
    return {"layer_types": [*kinds, *rest]}


@of("qwen3_next")
def _qwen3_next(random: Random, config: Fields) -> Fields:
    config["rope_parameters"]["partial_rotary_factor"] = random.choice((0.5, 0.5, 1.0))
    key_heads = random.choice((1, 2))
    linear = {
        "head_dim": random.choice((8, 12)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * random.choice((1, 2)),
        "linear_key_head_dim": random.choice((4, 6)),
        "linear_value_head_dim": random.choice((4, 10)),
        "linear_conv_kernel_dim": random.choice((2, 4)),
        "shared_expert_intermediate_size": random.choice((5, 12)),
    }
    return _qwen(random, config) | linear | mixers(random, config)


@of("qwen3_5_moe_text")
def _qwen3_5_moe(random: Random, config: Fields) -> Fields:
    unlike = ("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "intermediate_size")
    return {n: v for n, v in _qwen3_next(random, config).items() if n not in unlike}


@of("kimi_linear")
def _kimi_linear(random: Random, config: Fields) -> Fields:
    config.pop("rope_parameters")
    own = sigmoid(random, config) | latent(random, config) | dense_kinds(random, config)
    del own["rope_interleave"]
    config |= {"tie_word_embeddings": False, "num_experts": own.pop("n_routed_experts")}
    linear = {
        "linear_num_heads": random.choice((1, 2, 4)),
        "linear_head_dim": random.choice((4, 6)),
        "linear_conv_kernel_dim": random.choice((2, 4)),
    }
    return own | linear | mixers(random, config)


@of("bailing_hybrid")
def _bailing_hybrid(random: Random, config: Fields) -> Fields:
    rope = config["rope_parameters"]
    own = _kimi_linear(random, config)
    del own["linear_num_heads"], own["q_lora_rank"]
    own["head_dim"] = own.pop("linear_head_dim")
    own["short_conv_kernel_size"] = own.pop("linear_conv_kernel_dim")
    bound = {"kda_safe_gate": random.random() < 0.7, "kda_lower_bound": random.choice((-5.0, -1.5))}
    return own | bound | {"rope_parameters": rope}


@of("glm4_moe")
def _glm4_moe(random: Random, config: Fields) -> Fields:
    config["rope_parameters"]["partial_rotary_factor"] = random.choice((0.5, 0.5, 1.0))
    return (
        sigmoid(random, config)
        | dense_first(random, config)
        | {
            "head_dim": random.choice((8, 12)),
            "attention_bias": random.random() < 0.7,
            "use_qk_norm": _coin(random),
        }
    )


@of("minimax_m2")
def _minimax_m2(random: Random, config: Fields) -> Fields:
    config["rope_parameters"]["partial_rotary_factor"] = random.choice((0.5, 0.5, 1.0))
    return _mixtral(random, config) | {"head_dim": random.choice((8, 12))}


@of("deepseek_v2")
def _deepseek_v2(random: Random, config: Fields) -> Fields:
    drawn = sigmoid(random, config) | latent(random, config) | dense_first(random, config)
    del drawn["norm_topk_prob"], drawn["rope_interleave"]
    return drawn | {"topk_method": random.choice(("greedy", "group_limited_greedy"))}


@of("ernie4_5_moe")
def _ernie(random: Random, config: Fields) -> Fields:
    config["moe_k"] = config.pop("num_experts_per_tok")
    layers = config["num_hidden_layers"]
    return {
        "moe_num_experts": random.choice(EXPERTS),
        "moe_intermediate_size": random.choice(WIDTHS),
        "moe_num_shared_experts": random.choice((0, 1, 2)),
        "intermediate_size": random.choice(WIDE),
        "moe_layer_start_index": random.choice((0, 1)),
        "moe_layer_end_index": random.choice((-1, layers - 1)),
        "moe_layer_interval": random.choice((1, 1, 2)),
        "moe_norm_min": random.choice((1e-12, 0.9)),
        "router_aux_loss_coef": 0.02,
    }


@of("exaone_moe")
def _exaone(random: Random, config: Fields) -> Fields:
    own = sigmoid(random, config) | dense_kinds(random, config)
    own["num_experts"] = own.pop("n_routed_experts")
    own["num_shared_experts"] = own.pop("n_shared_experts")
    return own | some_window(random, config)


@of("hunyuan_v1_moe")
def _hunyuan(random: Random, config: Fields) -> Fields:
    config["moe_topk"] = config.pop("num_experts_per_tok")
    return {
        "num_experts": random.choice(EXPERTS),
        "intermediate_size": random.choice(WIDTHS),
        "head_dim": random.choice((6, 8)),
        "attention_bias": _coin(random),
    }


@of("granitemoe")
def _granite(random: Random, config: Fields) -> Fields:
    return {
        "num_local_experts": random.choice(EXPERTS),
        "intermediate_size": random.choice(WIDTHS),
        "attention_bias": _coin(random),
        "embedding_multiplier": random.choice((1.0, 3.0)),
        "logits_scaling": random.choice((1.0, 5.0)),
        "residual_multiplier": random.choice((1.0, 0.4)),
        "attention_multiplier": random.choice((1.0, 0.3)),
        "router_aux_loss_coef": 0.02,
    }


@of("granitemoeshared")
def _granite_shared(random: Random, config: Fields) -> Fields:
    return _granite(random, config) | {"shared_intermediate_size": random.choice((0, 7))}


@of("gpt_oss")
def _gpt_oss(random: Random, config: Fields) -> Fields:
    return windows(random, config) | {
        "num_local_experts": random.choice(EXPERTS),
        "intermediate_size": random.choice(WIDTHS),
        "head_dim": random.choice((6, 8)),
        "swiglu_alpha": random.choice((1.702, 0.9)),
        "swiglu_limit": random.choice((7.0, 0.4)),
        "attention_bias": random.random() < 0.7,
        "router_aux_loss_coef": 0.02,
    }


@of("mimo_v2_flash")
def _mimo(random: Random, config: Fields) -> Fields:
    drawn = sigmoid(random, config) | dense_kinds(random, config) | windows(random, config)
    del drawn["n_shared_experts"]
    own = config.pop("rope_parameters") | {"partial_rotary_factor": random.choice((0.334, 0.5))}
    own.pop("mscale", None), own.pop("mscale_all_dim", None)
    other = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.334}
    return drawn | {
        "num_key_value_heads": random.choice((1, config["num_attention_heads"] // 2)),
        "head_dim": 12,
        "v_head_dim": random.choice((4, 6)),
        "attention_value_scale": random.choice((0.707, None)),
        "attention_bias": _coin(random),
        "rope_parameters": {"full_attention": own, "sliding_attention": other},
    }


@of("llama4_text")
def _llama4(random: Random, config: Fields) -> Fields:
    layers = config["num_hidden_layers"]
    turns = [random.randint(0, 1) for _ in range(layers)]
    turns[random.randrange(layers)] = 1
    sparse = [n for n in range(layers) if _coin(random)] or [layers - 1]
    if _coin(random):
        config["rope_parameters"] = BANDS
    return {
        "num_local_experts": random.choice(EXPERTS),
        "num_experts_per_tok": random.choice((1, 1, 2)),
        "intermediate_size": random.choice(WIDTHS),
        "intermediate_size_mlp": random.choice(WIDE),
        "head_dim": random.choice((6, 8)),
        "moe_layers": sparse,
        "no_rope_layers": turns,
        "attention_chunk_size": random.choice((3, 7, 64)),
        "use_qk_norm": random.random() < 0.7,
        "attn_temperature_tuning": random.random() < 0.7,
        "floor_scale": random.choice((3, 5)),
        "attn_scale": random.choice((0.1, 0.5)),
        "attention_bias": _coin(random),
        "router_aux_loss_coef": 0.02,
    }


@of("lfm2_moe")
def _lfm2(random: Random, config: Fields) -> Fields:
    layers = config["num_hidden_layers"]
    kinds = [random.choice(("conv", "full_attention")) for _ in range(layers)]
    kinds[random.randrange(layers)] = "full_attention"
    return {
        "num_experts": random.choice(EXPERTS),
        "moe_intermediate_size": random.choice(WIDTHS),
        "intermediate_size": random.choice(WIDE),
        "num_dense_layers": random.choice((0, 1)),
        "layer_types": kinds,
        "conv_L_cache": random.choice((2, 3, 4)),
        "use_expert_bias": _coin(random),
        "norm_topk_prob": _coin(random),
        "routed_scaling_factor": random.choice((1.0, 2.5)),
        "norm_eps": config.pop("rms_norm_eps"),
    }


@of("flex_olmo")
def _flex_olmo(random: Random, config: Fields) -> Fields:
    return _olmoe(random, config) | {"attention_bias": _coin(random)}


def some_window(random: Random, config: Fields) -> Fields:
    """Draw windows, of at least one layer."""
    seen = windows(random, config)
    seen["layer_types"][random.randrange(config["num_hidden_layers"])] = "sliding_attention"
    return seen


@of("afmoe")
def _afmoe(random: Random, config: Fields) -> Fields:
    return some_window(random, config) | {
        "num_experts": random.choice(EXPERTS),
        "moe_intermediate_size": random.choice(WIDTHS),
        "intermediate_size": random.choice(WIDE),
        "num_dense_layers": random.choice((0, 1)),
        "num_shared_experts": random.choice((1, 2)),
        "route_scale": random.choice((1.0, 2.5)),
        "mup_enabled": _coin(random),
        "head_dim": random.choice((6, 8)),
        "attention_bias": _coin(random),
    }


@of("axk1")
def _axk1(random: Random, config: Fields) -> Fields:
    drawn = latent(random, config) | {"q_lora_rank": random.choice((8, 12))}
    return sigmoid(random, config) | drawn | dense_kinds(random, config)


@of("kolibri1")
def _kolibri1(random: Random, config: Fields) -> Fields:
    return some_window(random, config) | {
        "num_experts": random.choice(EXPERTS),
        "moe_intermediate_size": random.choice(WIDTHS),
        "shared_expert_intermediate_size": random.choice((5, 12)),
        "norm_topk_prob": _coin(random),
        "head_dim": random.choice((6, 8)),
    }


@of("cohere2_moe")
def _cohere(random: Random, config: Fields) -> Fields:
    epsilon = config.pop("rms_norm_eps")
    return (
        some_window(random, config)
        | dense_kinds(random, config)
        | {
            "num_experts": random.choice(EXPERTS),
            "intermediate_size": random.choice(WIDTHS),
            "prefix_dense_intermediate_size": random.choice((None, 12)),
            "prefix_dense_sliding_window_pattern": random.choice((1, 2)),
            "num_shared_experts": random.choice((0, 1, 2)),
            "shared_expert_combination_strategy": random.choice(("average", "sum")),
            "expert_selection_fn": random.choice(("softmax", "sigmoid")),
            "norm_topk_prob": _coin(random),
            "logit_scale": random.choice((0.0625, 0.3)),
            "head_dim": random.choice((6, 8)),
            "attention_bias": _coin(random),
            "rms_norm_eps": random.choice((None, epsilon)),
            "layer_norm_eps": random.choice((1e-5, 1e-3)),
        }
    )


FAMILIES = tuple(OWN)
SEEN: dict[str, Fields] = {
    "deepseek_v3": {
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
    },
    "gpt_oss": {"swiglu_limit": 0.4},
    "mimo_v2_flash": {"attention_value_scale": 0.707},
    "llama4_text": {"rope_parameters": BANDS},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "cohere2_moe": {"num_shared_experts": 1, "shared_expert_combination_strategy": "average"},
}
"""What every other draw has: groups of which some are left out, a bound that is met, a mean."""
DEFAULTS: dict[str, Fields] = {
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 128},
}
"""What transformers' class has no default for; GLM-4.5's has 21 rotary dims, an odd number."""
COMPLEX_ANGLES = ("deepseek_v2", "llama4_text")
"""Families whose rotary angles in transformers are complex numbers of two fp32."""
PUBLISHED = {
    "axk1": 518_983_052_288,  # published with a norm that no dense layer uses: 7,168 more
    "bailing_hybrid": 124_414_191_072,
    "cohere2_moe": 190_004_928_512,
    "gpt_oss": 116_829_156_672,
    "glm4_moe_lite": 29_943_390_976,
    "exaone_moe": 28_550_639_616,
    "hy_v3": 295_033_528_320,
    "kimi_linear": 49_133_074_464,
    "llama4_text": 107_769_861_120,
    "mimo_v2_flash": 308_778_768_832,
    "minimax_m2": 228_689_748_992,
    "qwen3_next": 79_674_391_296,
    "qwen3_5_moe_text": 34_660_610_688,
    "solar_open": 102_651_793_408,
}
"""Parameters of the default configurations of transformers 5.24."""
REFUSED = {
    "bailing_hybrid": {"linear_conv_kernel_dim"},  # null, beside another name that has a number
    "deepseek_v2": {"topk_method"},  # null
    "qwen3_moe": {"num_local_experts"},  # it goes by another name here
    "kolibri1": {"num_local_experts"},
    "glm4_moe": {"head_dim"},  # the class divides what does not go into it
}
"""Fields beside sizes without which a default configuration is refused."""
