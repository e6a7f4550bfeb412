"""Registry of families: reads Hugging Face folders, and finds the family of a decoder."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.config.suggest import closest
from moefold.model.config import MAX_LAYERS, MODEL, Decoder
from moefold.model.families.base import Family, ParsedConfig

_SPACE = "state-space layers"
_INDEXER = "the indexer of sparse attention"
_HYPER = "hyper-connections between layers"
MISSING_PARTS: Mapping[str, str] = {
    "deepseek_v32": _INDEXER,
    "deepseek_v4": _HYPER,
    "glm5_next": _HYPER,
    "glm_moe_dsa": _INDEXER,
    "granitemoehybrid": _SPACE,
    "hy_v4": _HYPER,
    "jamba": _SPACE,
    "longcat_flash": "two attentions in a block, and experts without weights",
    "minimax": "lightning attention",
    "nemotron_h": _SPACE,
    "phimoe": "a router that samples",
    "zaya": "convolutions inside attention",
}
"""The part that moefold lacks, by ``model_type`` of an unsupported family."""
_OUTER_FIELDS = ("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id")
"""Fields of a multimodal model's ``config.json`` that apply to its text model."""


def families() -> dict[str, type[Family]]:
    """Return all registered families of Hugging Face models, by ``model_type``."""
    known = (record for record in MODEL.kinds.values() if issubclass(record, Family))
    return {family.model_type: family for family in known}


def from_hf(config: Mapping[str, Any]) -> ParsedConfig:
    """Read a Hugging Face ``config.json`` of any known family.

    Raises:
        ValueError: if the model type is unknown, or naming every field that is not supported.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError("config.json: model_type is missing, so the family is unknown")
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ValueError(
            f"config.json: num_hidden_layers is {layers}; must be at most {MAX_LAYERS}"
        )
    known = families()
    by_type = known | {alias: family for family in known.values() for alias in family.aliases}
    inner = config.get("text_config")
    if model_type not in by_type and isinstance(inner, dict) and inner.get("model_type") in by_type:
        parsed = from_hf({**inner, **{key: config[key] for key in _OUTER_FIELDS if key in config}})
        note = f"config.json: only the text_config of {model_type} is read"
        return replace(parsed, from_multimodal=True, notes=(note, *parsed.notes))
    if model_type in MISSING_PARTS:
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported: "
            f"it needs {MISSING_PARTS[model_type]}"
        )
    if model_type not in by_type:
        name = closest(model_type, by_type)
        near = "" if name is None else f"nearest: {name!r}; "
        if isinstance(inner, dict):
            near = f"nor is {inner.get('model_type')!r} of its text_config; "
        raise ValueError(
            f"config.json: model_type {model_type!r} is not known; {near}known: "
            f"{', '.join(sorted(known))}"
        )
    return by_type[model_type].from_hf(config)


def family_of(decoder: Decoder) -> type[Family]:
    """Return the family that describes a decoder.

    Raises:
        ValueError: listing, for each family, how the decoder differs.
    """
    reasons: list[str] = []
    for family in sorted(families().values(), key=lambda f: f.model_type != decoder.family):
        try:
            family.of(decoder)
        except ValueError as error:
            reasons.append(str(error))
        else:
            return family
    raise ValueError(
        "the model cannot be written as a Hugging Face folder; differences by family:\n  "
        + "\n  ".join(reasons)
    )
