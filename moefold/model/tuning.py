"""Adds adapters to a model and freezes parameters, as its description states."""

import torch
from torch import Tensor, nn

from moefold.layers.linear import Adaptable
from moefold.model.config import Decoder
from moefold.spec.decoder import LORA_A, LORA_B, known_weights


def prepare_tuning(model: nn.Module, record: Decoder, dtype: torch.dtype) -> None:
    """Add uninitialised adapters to a model, and freeze the parameters that are not trained.

    A frozen parameter is cast to the dtype in which it is read.

    Args:
        model: the model, with parameters in the master dtype.
        record: its description.
        dtype: compute dtype of products.

    Raises:
        ValueError: if a layer with an adapter does not support adapters.
    """
    weights = {weight.name: weight for weight in known_weights(record)}
    specs = {"": record, **{f"layers.{n}.": block for n, block in enumerate(record.blocks)}}
    for name, adapter in ((p + a.weight, a) for p, spec in specs.items() for a in spec.adapters):
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if not isinstance(owner, Adaptable):
            raise ValueError(
                f"{name}: {type(owner).__name__} does not support adapters; leave the weight out "
                "of adapter.targets, or inherit from moefold.layers.linear.Adaptable and read "
                "the weight with its operand()"
            )
        base = owner.get_parameter(leaf)
        shapes = (weights[name + end].shape for end in (LORA_A, LORA_B))
        a, b = (torch.empty(shape, dtype=base.dtype, device=base.device) for shape in shapes)
        owner.add_adapter(leaf, adapter, a, b)
    for weight in weights.values():
        if weight.frozen:
            path, _, leaf = weight.name.rpartition(".")
            owner = model.get_submodule(path)
            values = owner.get_parameter(leaf).detach()
            values = values.to(dtype) if weight.reads_compute_dtype else values
            setattr(owner, leaf, nn.Parameter(values, requires_grad=False))


def merge_adapter(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``weight + scale * B A`` in the dtype of the adapter, the master dtype."""
    # The gate and up projections of an expert share A.
    a = a.unsqueeze(1) if b.dim() > a.dim() else a
    return weight.to(a.dtype) + scale * (b @ a)
