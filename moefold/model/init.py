"""Initial values of parameters as pure functions of (seed, name, index), in any layout.

A counter-based generator keyed by (seed, name) draws elements in blocks of fixed size, so any
slice of a parameter can be computed without the rest.
"""

import hashlib
import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from moefold.layers.placement import REPLICATED, Shard, shard
from moefold.model.config import Decoder
from moefold.spec.decoder import known_weights
from moefold.spec.layer import Start

BLOCK = 1 << 16
HALF = BLOCK // 2
"""Pairs in a block of ``BLOCK`` elements, which one key draws."""


def initialise(
    model: nn.Module, decoder: Decoder, seed: int, shards: Mapping[str, Shard] | None = None
) -> None:
    """Initialise parameters in place, and fill buffers with zeros.

    ``shards`` maps each parameter to its shard of the global tensor; by default it is the full one.
    """
    values = initial_values(decoder, seed)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for name, parameter in model.named_parameters():
            full = shard(name, tuple(parameter.shape), REPLICATED, {})
            parameter.copy_(values(full if shards is None else shards[name]))


def initial_values(decoder: Decoder, seed: int) -> Callable[[Shard], Tensor]:
    """Return a function from a shard of a parameter to its initial values (fp32).

    Layers describe the initialisation of their parameters (``Weight.start``). By default norm
    weights are ones, other vectors and biases zeros, and matrices normal.
    """
    described = {weight.name: weight for weight in known_weights(decoder)}
    out_scale = decoder.init_out_scale or 1 / math.sqrt(2 * decoder.layers)
    norm_weight = 0.0 if decoder.norm == "zero_centred" else 1.0
    constants = {"zeros": 0.0, "ones": 1.0, "norm": norm_weight}
    stds = {"normal": decoder.init_std, "output": decoder.init_std * out_scale}

    def values(piece: Shard) -> Tensor:
        name = piece.name
        vector = len(piece.shape) == 1
        start: Start = "zeros" if vector or name.endswith("_bias") else "normal"
        if name in described:
            start = described[name].resolved_start
        elif vector and name.endswith("norm.weight"):
            start = "ones"
        if callable(start):  # a function of the position in dim 0: the index's midpoint in (0, 1)
            rows = [start((index + 0.5) / piece.shape[0]) for index in range(*piece.box[0])]
            column = torch.tensor(rows).view(-1, *(1 for _ in piece.shape[1:]))
            return column.expand(piece.local_shape)
        if not isinstance(start, str):
            return normal_slice(seed, piece, start)
        if start in constants:
            return torch.full(piece.local_shape, constants[start])
        return normal_slice(seed, piece, stds[start])

    return values


def normal_slice(seed: int, piece: Shard, std: float) -> Tensor:
    """Return a shard of the global :func:`draw_normal`, drawing only its range of dim 0."""
    (start, end) = piece.box[0]
    inner = piece.shape[1:]
    rows = draw_normal(seed, piece.name, (end - start, *inner), std, start * math.prod(inner))
    return rows[(slice(None), *(slice(*bounds) for bounds in piece.box[1:]))]


def draw_normal(seed: int, name: str, shape: tuple[int, ...], std: float, first: int = 0) -> Tensor:
    """Return normal values (fp32) for the elements of tensor ``name`` from ``first`` on."""
    count = math.prod(shape)
    key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], np.uint64)[0]
    out = np.empty(count, np.float32)
    for block in range(first // BLOCK, -(-(first + count) // BLOCK)):
        start = max(first, block * BLOCK)
        end = min(first + count, (block + 1) * BLOCK)
        out[start - first : end - first] = _draw(key, block, start % BLOCK, (end - 1) % BLOCK + 1)
    return torch.from_numpy(out).mul_(std).view(shape)


def _draw(key: np.uint64, block: int, start: int, end: int) -> np.ndarray:
    """Draw elements [start, end) of a block by the Box-Muller transform of uniforms in (0, 1].

    Each pair of uniforms yields one element in each half of the block. If the range is within one
    half, only its pairs are transformed: the transform dominates for small parameters.
    """
    raw = np.random.Philox(key=np.array([key, block], np.uint64)).random_raw(BLOCK)
    one_half = start // HALF == (end - 1) // HALF
    pairs = slice(start % HALF, (end - 1) % HALF + 1) if one_half else slice(None)
    bits = raw.reshape(2, HALF)[:, pairs] >> np.uint64(11)
    first, second = (bits.astype(np.float64) + 1) * 2.0**-53
    radius = np.sqrt(-2 * np.log(first))
    angle = 2 * np.pi * second
    if one_half:
        return (radius * (np.sin if start >= HALF else np.cos)(angle)).astype(np.float32)
    drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return drawn[start:end].astype(np.float32)
