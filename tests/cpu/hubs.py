"""Small Hugging Face folders, written here from scratch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from moefold.convert.plan import meta_state_dict
from moefold.model.config import MODEL, Decoder
from moefold.model.families import registry
from moefold.model.families.names import find_mappings, pieces, resolve_rows

SIZES = {"hidden": 16, "layers": 3, "heads": 2, "experts": 4, "top_k": 2, "expert_width": 6}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"shape": SIZES | {"kv_heads": 1, "head_dim": 6}},
    "qwen3_moe": {"shape": SIZES | {"kv_heads": 2, "dense_layers": [1]}, "tied": True},
    "olmoe": {"shape": SIZES | {"kv_heads": 2}, "balance": [{"kind": "aux"}]},
    "deepseek_v3": {
        "shape": SIZES
        | {"dense_layers": 1, "q_rank": 5, "kv_rank": 7, "nope_dim": 4, "rope_dim": 4, "v_dim": 3}
        | {"shared_width": 12},
        "groups": {"count": 2, "keep": 1},
    },
}
VOCAB = 40


def decoder_of(family: str) -> Decoder:
    """Return the description of a small model."""
    data = {"family": family, "context": 64, **MODELS[family]}
    record: Any = MODEL.kinds[family].model_validate(data)
    return record.describe(VOCAB)


def weights_of(decoder: Decoder, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return drawn values for every tensor of a decoder, rounded to a storage type."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(target.shape, generator=generator).to(dtype).to(target.dtype)
        for name, target in meta_state_dict(decoder).items()
    }


def on_disk(
    decoder: Decoder,
    weights: Mapping[str, Tensor],
    layout: Literal["per_expert", "packed"] = "per_expert",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return a decoder's tensors as they lie in a Hugging Face folder."""
    family = registry.family_of(decoder)
    stored: dict[str, Tensor] = {}
    for name, (row, layer) in find_mappings(resolve_rows(family.tensors, decoder), weights).items():
        kept = torch.float32 if name.endswith("selection_bias") else dtype
        for piece in pieces(row, layer, tuple(weights[name].shape), layout):
            part = weights[name][piece.index].to(kept)
            stored[piece.name] = piece.to_hf(part, stored.get(piece.name))
    return stored


def write_hub(
    folder: Path, decoder: Decoder, stored: Mapping[str, Tensor], *, shards: int = 1, **fields: Any
) -> Path:
    """Write a folder with a ``config.json`` and safetensors; ``fields`` change the config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = registry.family_of(decoder).to_hf(decoder) | fields
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(stored)[n::shards]
        save_file({name: stored[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map)
    return folder


def write_tokenizer(folder: Path, words: Sequence[str]) -> Path:
    """Write a ``tokenizer.json`` of whole words, after the end of a document and the unknown."""
    tokens = ["<|endoftext|>", "<unk>", *words]
    table = {token: number for number, token in enumerate(tokens)}
    inner = Tokenizer(WordLevel(table, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    inner.add_special_tokens(tokens[:1])
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    # Without it transformers takes the class of the model's type, which builds a BPE.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    """Write the file that says which tensor lies where."""
    content = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree in type, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
