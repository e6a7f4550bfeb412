"""How a decoder's weights are read: which are frozen, and which in codes of few bits."""

import torch
from torch import nn

from moefold.kernels.scaled.products import Recipe
from moefold.layers.config import Quantise
from moefold.layers.precision import Narrow, WeightProducts
from moefold.model.config import Decoder
from moefold.spec.decoder import known_weights
from moefold.spec.layer import Weight
from moefold.spec.quantised import narrow_weights


def settle_weights(model: nn.Module, record: Decoder, dtype: torch.dtype) -> None:
    """Freeze what a decoder's description says is frozen, and let products read codes.

    Args:
        model: with the parameters of the description, by their global names.
        record: the description.
        dtype: what products take.

    Raises:
        ValueError: where a layer cannot multiply by codes.
    """
    for weight in known_weights(record):
        if weight.frozen:
            _freeze(model, weight, dtype)
    for name, number in narrow_weights(record).items():
        _quantise(model, record, name, number)


def _freeze(model: nn.Module, weight: Weight, dtype: torch.dtype) -> None:
    """Leave a parameter without a gradient, in the format that it is read in."""
    path, _, leaf = weight.name.rpartition(".")
    owner = model.get_submodule(path)
    values = owner.get_parameter(leaf).detach()
    values = values.to(dtype) if weight.narrow else values
    setattr(owner, leaf, nn.Parameter(values, requires_grad=False))


def _quantise(model: nn.Module, decoder: Decoder, name: str, number: int) -> None:
    """Let products of a weight read codes."""
    path, _, leaf = name.rpartition(".")
    owner, record = model.get_submodule(path), decoder.quantise
    assert isinstance(record, Quantise)
    if not isinstance(owner, WeightProducts):
        raise ValueError(
            f"{name}: train.quantise needs a layer that multiplies by Linear or SwiGlu; "
            f"keep it wide with train.quantise.keep=[{name}]"
        )
    recipe = Recipe(record.kind, record.rule, record.wgrad == "narrow", record.block)
    owner.narrow = {**owner.narrow, leaf: Narrow(recipe, number)}
