"""How far adapters moved each routed expert from where its base has it: ``moved.png``."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moefold.checkpoint.load import Reader
from moefold.spec.decoder import LORA_A, LORA_B
from moefold.training.hooks.plots import moved_figure
from moefold.training.model_checkpoint import ModelTensors


def moved(tensors: ModelTensors) -> tuple[list[str], np.ndarray]:
    """Return layers [L], and ``|scale * B A| / |W|`` [L, E] over all matrices of each expert.

    Norms are Frobenius's; that of a product follows from ``B^T B`` and ``A A^T``. Layers with fewer
    experts than the widest one are padded with NaN.
    """
    squares: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, scale in tensors.scales.items():
        layer, _, weight = name.removeprefix("layers.").partition(".")
        if "experts" not in weight.split("."):
            continue
        a, b = (tensors.stored(name + end).double() for end in (LORA_A, LORA_B))
        b = b.flatten(1, -2)
        product_E = scale**2 * ((b.mT @ b) * (a @ a.mT)).sum((1, 2)).clamp(min=0)
        weight_E = tensors.stored(name).double().flatten(1).square().sum(1)
        squares.setdefault(layer, []).append((product_E, weight_E))
    layers = sorted(squares, key=int)
    shares: list[Tensor] = []
    for held in map(squares.__getitem__, layers):
        product_E, weight_E = (torch.stack(parts).sum(0) for parts in zip(*held, strict=True))
        shares.append((product_E / weight_E).sqrt())
    out = np.full((len(layers), max(map(len, shares), default=0)), np.nan)
    for row, share_E in zip(out, shares, strict=True):
        row[: len(share_E)] = share_E.numpy()
    return layers, out


def draw_moved(checkpoint: Path, path: Path, title: str) -> bool:
    """Draw a checkpoint's experts; return whether any has an adapter."""
    with Reader(checkpoint) as reader:
        layers, shares = moved(ModelTensors(reader, reader.manifest.meta.get("adapters", {})))
    if layers:
        moved_figure(layers, shares, title).savefig(path, dpi=144)
    return bool(layers)
