"""Initial values of parameters as pure functions of (seed, name, index), in any layout.

A counter-based generator keyed by (seed, name) draws elements in blocks of fixed size, so that any
slice of a parameter can be computed without the rest.
"""

import hashlib
import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from moefold.layers.placement import WHOLE, Shard, shard
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

    ``shards`` gives the piece of the global tensor that each parameter is; by default the whole.
    """
    begin = start_values(decoder, seed)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for name, parameter in model.named_parameters():
            whole = shard(name, tuple(parameter.shape), WHOLE, {})
            parameter.copy_(begin(whole if shards is None else shards[name]))


def start_values(decoder: Decoder, seed: int) -> Callable[[Shard], Tensor]:
    """Return a function from a piece of a parameter to its initial values (fp32).

    Layers describe how their parameters start (``Weight.start``). Of parameters without a
    description, norm weights start at one, other vectors and biases at zero, matrices normal.
    """
    described = {weight.name: weight for weight in known_weights(decoder)}
    out_scale = decoder.init_out_scale or 1 / math.sqrt(2 * decoder.layers)
    factor = 0.0 if decoder.norm == "zero_centred" else 1.0
    fills = {"zeros": 0.0, "ones": 1.0, "norm": factor}
    spreads = {"normal": decoder.init_std, "output": decoder.init_std * out_scale}

    def values(piece: Shard) -> Tensor:
        name, vector = piece.name, len(piece.shape) == 1
        start: Start = "zeros" if vector or name.endswith("_bias") else "normal"
        if name in described:
            start = described[name].begins
        elif vector and name.endswith("norm.weight"):
            start = "ones"
        if callable(start):  # dim 0 alone counts, by each index's midpoint in (0, 1)
            first = [start((place + 0.5) / piece.shape[0]) for place in range(*piece.box[0])]
            column = torch.tensor(first).view(-1, *(1 for _ in piece.shape[1:]))
            return column.expand(piece.local_shape)
        if not isinstance(start, str):
            return normal_piece(seed, piece, start)
        if start in fills:
            return torch.full(piece.local_shape, fills[start])
        return normal_piece(seed, piece, spreads[start])

    return values


def normal_piece(seed: int, piece: Shard, std: float) -> Tensor:
    """Return a piece of the global :func:`normal` tensor; only its range of dim 0 is drawn."""
    (start, end), inner = piece.box[0], piece.shape[1:]
    whole = normal(seed, piece.name, (end - start, *inner), std, start * math.prod(inner))
    return whole[(slice(None), *(slice(*bounds) for bounds in piece.box[1:]))]


def normal(seed: int, name: str, shape: tuple[int, ...], std: float, first: int = 0) -> Tensor:
    """Return normal values (fp32) for elements ``first`` onwards of the tensor ``name``."""
    count = math.prod(shape)
    key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], np.uint64)[0]
    out = np.empty(count, np.float32)
    for block in range(first // BLOCK, -(-(first + count) // BLOCK)):
        start, end = max(first, block * BLOCK), min(first + count, (block + 1) * BLOCK)
        out[start - first : end - first] = _drawn(key, block, start % BLOCK, (end - 1) % BLOCK + 1)
    return torch.from_numpy(out).mul_(std).view(shape)


def _drawn(key: np.uint64, block: int, start: int, end: int) -> np.ndarray:
    """Draw elements [start, end) of a block by the Box-Muller transform of uniforms in (0, 1].

    Each pair of uniforms yields one element of either half of the block. If the range lies within
    one half, only its pairs are transformed: the transform dominates for small parameters.
    """
    raw = np.random.Philox(key=np.array([key, block], np.uint64)).random_raw(BLOCK)
    within = start // HALF == (end - 1) // HALF
    pairs = slice(start % HALF, (end - 1) % HALF + 1) if within else slice(None)
    bits = raw.reshape(2, HALF)[:, pairs] >> np.uint64(11)
    first, second = (bits.astype(np.float64) + 1) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    if within:
        return (radius * (np.sin if start >= HALF else np.cos)(angle)).astype(np.float32)
    drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return drawn[start:end].astype(np.float32)
