"""Small models of each family, in transformers and here, with the same weights."""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moefold.model.decoder import DecoderModel
from moefold.model.families.base import Family, Reading
from moefold.model.families.names import find, pieces
from moefold.model.families.registry import from_hf

STORED = json.loads((Path(__file__).parents[1] / "data" / "hf_tiny_reference.json").read_text())
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")


def places(model: DecoderModel, family: Family) -> Iterator[tuple[str, str, Any, tuple[int, ...]]]:
    """Yield reference name, our name, index and shape of every tensor in the packed layout."""
    state = model.state_dict()
    for ours, (row, layer) in find(family.tensors, state).items():
        for piece in pieces(row, layer, tuple(state[ours].shape), "packed"):
            yield piece.name, ours, piece.index, piece.shape


def fill(model: DecoderModel, family: Family, weights: Mapping[str, Tensor]) -> None:
    """Copy weights under transformers' names into our model; each is used exactly once."""
    state, used = model.state_dict(), set()
    for theirs, ours, index, shape in places(model, family):
        assert tuple(weights[theirs].shape) == shape, (theirs, shape)
        part = state[ours][index]
        part.copy_(weights[theirs].reshape(part.shape))
        used.add(theirs)
    left = set(weights) - used - ({"lm_head.weight"} if model.record.tied else set())
    assert not left, left


def gradients(model: DecoderModel, family: Family) -> dict[str, Tensor]:
    """Return our gradients under transformers' names and in their shapes."""
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for theirs, ours, index, shape in places(model, family):
        if ours in parameters:
            grad = parameters[ours].grad
            assert grad is not None, ours
            found[theirs] = grad[index].reshape(shape)
    return found


def stored_value(name: str, shape: tuple[int, ...]) -> Tensor:
    """The weight that the stored reference numbers were made with."""
    value = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        value = 1 + 0.1 * value
    elif name.endswith("e_score_correction_bias"):
        value = 0.05 * value
    else:
        value = (0.3 if name.endswith("gate.weight") else 0.08) * value
    return torch.from_numpy(value)


def draw(model_type: str, random: Random) -> dict[str, Any]:
    """Draw the fields of a small configuration."""
    heads = random.choice((2, 4))
    dim = random.choice((4, 8))
    experts = random.choice((4, 6, 8))
    top_k = random.randint(2, min(4, experts - 1))
    config: dict[str, Any] = {
        "vocab_size": random.choice((61, 64)),
        "hidden_size": heads * dim,
        "num_hidden_layers": random.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([d for d in (1, 2, heads) if heads % d == 0]),
        "num_experts_per_tok": top_k,
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
            "factor": random.choice((2.0, 4.0)),
            "original_max_position_embeddings": 16,
        }
        if random.random() < 0.5:
            config["rope_parameters"] |= {"mscale": 0.7, "mscale_all_dim": 0.9}
    return config | _own_fields(model_type, random, config, experts)


def _own_fields(
    model_type: str, random: Random, config: dict[str, Any], experts: int
) -> dict[str, Any]:
    width, wide = random.choice((6, 10)), random.choice((12, 20))
    renormalise = random.random() < 0.5
    layers = config["num_hidden_layers"]
    if model_type != "deepseek_v3":
        config["router_aux_loss_coef"] = 0.02
    match model_type:
        case "mixtral":
            own = {"num_local_experts": experts, "intermediate_size": width}
            return own | {"head_dim": random.choice((6, 8))}
        case "olmoe":
            own = {"num_experts": experts, "intermediate_size": width}
            return own | {"norm_topk_prob": renormalise}
        case "qwen3_moe":
            step = random.choice((1, 1, 2))
            dense = random.choice(([], [0], [] if step == 2 else [layers - 1]))
            return {
                "num_experts": experts,
                "moe_intermediate_size": width,
                "intermediate_size": wide,
                "head_dim": random.choice((6, 8)),
                "norm_topk_prob": renormalise,
                "mlp_only_layers": dense,
                "decoder_sparse_step": step,
            }
    groups = random.choice([g for g in (1, 2, 4) if experts % g == 0 and experts // g >= 2])
    least = -(-config["num_experts_per_tok"] // (experts // groups))
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "n_routed_experts": experts,
        "moe_intermediate_size": width,
        "intermediate_size": wide,
        "n_shared_experts": random.choice((1, 2)),
        "first_k_dense_replace": random.choice((0, 1)),
        "q_lora_rank": random.choice((None, 12)),
        "kv_lora_rank": random.choice((8, 10)),
        "qk_nope_head_dim": random.choice((4, 6)),
        "qk_rope_head_dim": random.choice((4, 8)),
        "v_head_dim": random.choice((4, 6)),
        "n_group": groups,
        "topk_group": random.randint(least, groups),
        "norm_topk_prob": renormalise,
        "routed_scaling_factor": random.choice((1.0, 2.5)),
        "rope_interleave": random.random() < 0.5,
    }


def reference(model_type: str, config: dict[str, Any], seed: int) -> Any:
    """Return the model in transformers, with weights large enough that every part matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * drawn if "norm" in name else 0.3 * drawn)
    return model.train()


def written(model: Any) -> dict[str, Any]:
    """Return the ``config.json`` that transformers writes for a model."""
    config = json.loads(model.config.to_json_string())
    return {k: v for k, v in config.items() if k != "transformers_version"}


def ours(model: Any, precision: Any) -> tuple[DecoderModel, Reading]:
    """Return our model of the same configuration and weights."""
    reading = from_hf(written(model))
    made = DecoderModel(reading.decoder, precision)
    fill(made, reading.model, model.state_dict())
    return made, reading


@contextmanager
def wide(model: Any) -> Iterator[None]:
    """Let a model in transformers compute in float64 where it narrows to float32 by name.

    Rotary angles stay float32, as they are here too.
    """
    import importlib

    module = importlib.import_module(type(model).__module__)
    rotary = type(model.model.rotary_emb)
    forward = rotary.forward

    def narrow(self: Any, *args: Any, **kwargs: Any) -> Any:
        module.torch = torch
        del torch.Tensor.float
        try:
            return forward(self, *args, **kwargs)
        finally:
            _widen(module)

    _widen(module)
    rotary.forward = narrow
    try:
        yield
    finally:
        rotary.forward = forward
        module.torch = torch
        del torch.Tensor.float


class _Wide:
    """The torch module, but for the two names of single precision."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _widen(module: Any) -> None:
    module.torch = _Wide()
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def width_of(model: Any, double: bool) -> Any:
    """Return the context in which a model in transformers is compared."""
    return wide(model) if double else nullcontext()
