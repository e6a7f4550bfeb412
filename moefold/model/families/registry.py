"""The families that a Hugging Face folder, or a finished decoder, can be of."""

from collections.abc import Mapping
from typing import Any

from moefold.model.config import MAX_LAYERS, MODEL, Decoder

# Imported because each registers itself when imported.
from moefold.model.families import deepseek_v3, mixtral, olmoe, qwen3_moe  # noqa: F401
from moefold.model.families.base import Family, Reading


def families() -> dict[str, type[Family]]:
    """Return every registered family that knows Hugging Face folders, by its ``model_type``."""
    known = (record for record in MODEL.kinds.values() if issubclass(record, Family))
    return {family.model_type: family for family in known}


def from_hf(config: Mapping[str, Any]) -> Reading:
    """Read a Hugging Face ``config.json`` of any known family.

    Raises:
        ValueError: where the model type is unknown, or naming every field that is not supported.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError("config.json: model_type is missing, so the family is unknown")
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ValueError(
            f"config.json: num_hidden_layers is {layers}, and the most are {MAX_LAYERS}"
        )
    known = families()
    if model_type not in known:
        raise ValueError(
            f"config.json: model_type {model_type!r} is not known; known: "
            f"{', '.join(sorted(known))}"
        )
    return known[model_type].from_hf(config)


def family_of(decoder: Decoder) -> type[Family]:
    """Return the family whose description a decoder is.

    Raises:
        ValueError: saying, family by family, what the decoder has that it does not.
    """
    reasons: list[str] = []
    for family in families().values():
        try:
            family.of(decoder)
        except ValueError as error:
            reasons.append(str(error))
        else:
            return family
    raise ValueError(
        "no family that can be written as a Hugging Face folder has this decoder:\n  "
        + "\n  ".join(reasons)
    )
