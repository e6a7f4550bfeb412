"""Fields of a ``config.json`` that divide or name each layer: what fails is refused by name."""

from typing import Any

import pytest

from moefold.model.families.registry import families, from_hf


def _usual(model_type: str, **change: Any) -> dict[str, Any]:
    """Return a small ``config.json`` of any family whose other fields have defaults."""
    sizes: dict[str, Any] = dict.fromkeys(families()[model_type].hf_sizes, 8)
    sizes |= {"hidden_size": 64, "num_experts_per_tok": 2}
    sizes |= {families()[model_type].epsilon_field: 1e-5}
    return {"model_type": model_type, **sizes, **change}


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("afmoe", "global_attn_every_n_layers"),
        ("bailing_hybrid", "layer_group_size"),
        ("cohere2_moe", "sliding_window_pattern"),
        ("cohere2_moe", "prefix_dense_sliding_window_pattern"),
        ("exaone_moe", "sliding_window_pattern"),
        ("qwen3_next", "full_attention_interval"),
        ("qwen3_moe", "decoder_sparse_step"),
        ("ernie4_5_moe", "moe_layer_interval"),
        ("llama4_text", "interleave_moe_layer_step"),
        ("llama4_text", "no_rope_layer_interval"),
    ],
)
def test_a_step_between_layers_of_zero_is_refused_by_name_once(model_type: str, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0; must be at least 1") as caught:
        from_hf(_usual(model_type, first_k_dense_replace=1, **{field: 0}))
    assert str(caught.value).count(field) == 1


ZERO_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}
COHERE = {"num_shared_experts": 0, "sliding_window": 4}


@pytest.mark.parametrize(
    ("model_type", "change", "said"),
    [
        ("cohere2_moe", COHERE | {"logit_scale": 0}, "logits_divisor"),
        ("minimax_m2", {"rotary_dim": 4, "head_dim": 0}, "head_dim"),
        ("deepseek_v2", {"rope_scaling": ZERO_YARN}, "original_length"),
    ],
)
def test_a_field_of_zero_that_others_are_divided_by_is_refused(
    model_type: str, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        from_hf(_usual(model_type, **change))


def test_kinds_of_layers_that_are_no_kinds_are_refused_by_name() -> None:
    for name in ("layer_types", "mlp_layer_types"):
        with pytest.raises(ValueError, match=f"{name} must be .* for each of 8 layers"):
            from_hf(_usual("exaone_moe", **{name: [{}] * 8}))
    with pytest.raises(ValueError, match="no_rope_layers has 3 entries for 8 layers"):
        from_hf(_usual("llama4_text", no_rope_layers=[1, 1, 0]))
    lists = {"full_attn_layers": ["x"], "kda_layers": [1]}
    with pytest.raises(ValueError, match="must list each of 8 layers once"):
        from_hf(_usual("kimi_linear", linear_attn_config=lists))


def test_a_null_tie_is_what_the_class_takes() -> None:
    for tied in (True, None):
        assert from_hf(_usual("cohere2_moe", **COHERE, tie_word_embeddings=tied)).decoder.tied
