"""Small models of each family, in transformers and here, with the same weights."""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel
from moefold.model.families.base import Family, ParsedConfig
from moefold.model.families.names import TensorPiece, find_mappings, pieces, resolve_rows
from moefold.model.families.registry import from_hf
from moefold.spec.decoder import model_weights

DATA = Path(__file__).parents[1] / "data"
STORED = json.loads((DATA / "hf_tiny_reference.json").read_text())
RELEASED = {
    file.stem: json.loads(file.read_text()) for file in sorted((DATA / "released").iterdir())
}
"""What ``config.json`` of released models holds: their sizes, switches and what goes with them."""


def places(model: DecoderModel, family: Family) -> Iterator[tuple[str, TensorPiece]]:
    """Yield our name and the place of every tensor in the packed layout."""
    state = model.state_dict()
    for ours, (row, layer) in find_mappings(
        resolve_rows(family.tensors, model.record), state
    ).items():
        for piece in pieces(row, layer, tuple(state[ours].shape), "packed"):
            yield ours, piece


def fill(model: DecoderModel, family: Family, weights: Mapping[str, Tensor]) -> None:
    """Copy weights under transformers' names into our model; each is used exactly once."""
    state, used = model.state_dict(), set()
    for ours, piece in places(model, family):
        stored = weights[piece.name]
        assert tuple(stored.shape) == piece.shape, piece
        part = state[ours][piece.index]
        part.copy_(piece.from_hf(stored, tuple(part.shape)))
        used.add(piece.name)
    left = set(weights) - used - ({"lm_head.weight"} if model.record.tied else set())
    assert not left, left


def gradients(model: DecoderModel, family: Family) -> dict[str, Tensor]:
    """Return our gradients under transformers' names and in their shapes."""
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for ours, piece in places(model, family):
        if ours in parameters:
            grad = parameters[ours].grad
            assert grad is not None, ours
            found[piece.name] = piece.to_hf(grad[piece.index], found.get(piece.name))
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


def reference(model_type: str, config: dict[str, Any], seed: int | None = None) -> Any:
    """Return the model in transformers, with weights large enough that every part matters.

    Without a seed they are as its class makes them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    if seed is None:
        return model
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            drawn = torch.randn(tensor.shape, generator=generator)
            norm = "norm" in name and name.endswith("weight")
            tensor.copy_(1 + 0.2 * drawn if norm else 0.3 * drawn)
    return model.train()


def gate_of(block: Any) -> Any:
    """Return the module that chooses experts in a layer of transformers."""
    if hasattr(block, "feed_forward"):
        feed_forward = block.feed_forward
        return feed_forward.gate if hasattr(feed_forward, "gate") else feed_forward.router
    if not hasattr(block, "mlp"):
        return block.block_sparse_moe.router
    return block.mlp.gate if hasattr(block.mlp, "gate") else block.mlp.router


def total_of(decoder: Decoder) -> int:
    """Return how many parameters a decoder has."""
    return sum(weight.elements for weight in model_weights(decoder))


def by_class(model_type: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return a ``config.json`` as its class of transformers completes it; None where it refuses."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    given = {name: value for name, value in config.items() if name != "model_type"}
    assert model_type in CONFIG_MAPPING, f"transformers has no class for {model_type}"
    try:
        return stripped(CONFIG_MAPPING[model_type](**given))
    except (StrictDataclassError, ValueError, TypeError, AttributeError):
        return None


def stripped(config: Any) -> dict[str, Any]:
    """Return the ``config.json`` of an object of such a class."""
    found = json.loads(config.to_json_string())
    return {k: v for k, v in found.items() if k != "transformers_version"}


def written(model: Any) -> dict[str, Any]:
    """Return the ``config.json`` that transformers writes for a model."""
    return present(stripped(model.config))


def present(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without blocks of further tokens, which transformers' classes lack."""
    return config | (
        {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config else {}
    )


def ours(model: Any, precision: Any) -> tuple[DecoderModel, ParsedConfig]:
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
    inner = model.model
    other = getattr(inner, "pos_emb", nn.Identity())  # a model without positions has neither
    rotary = type(getattr(inner, "rotary_emb", other))
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
