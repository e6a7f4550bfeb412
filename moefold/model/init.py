"""Initial values as pure functions of (seed, name, index): the same in every layout.

A parameter's element number i is drawn from a counter-based generator keyed by (seed, name) in
blocks of fixed size, so that any slice can be made without the rest.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from moefold.layers.placement import WHOLE, Shard, shard
from moefold.model.config import Decoder
from moefold.spec.decoder import LORA_A, LORA_B

BLOCK = 1 << 16
HALF = BLOCK // 2
"""Elements drawn from one key."""

WRITES_RESIDUAL = (".o.weight", ".out.weight", ".w_out")


def initialise(
    model: nn.Module, decoder: Decoder, seed: int, shards: Mapping[str, Shard] | None = None
) -> None:
    """Fill parameters and buffers in place.

    Norms start at a factor of one, other vectors and buffers (biases, counts) at zero, matrices as
    normals;
    A of an adapter with the spread of PEFT's, B at zero. Decays of linear attention begin spread
    over the range that Mamba-2 draws them from (arXiv 2405.21060).
    ``shards`` says of which piece of a whole tensor each parameter is; without them all are whole.
    """
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for name, parameter in model.named_parameters():
            whole = shard(name, tuple(parameter.shape), WHOLE, {})
            parameter.copy_(start_value(decoder, seed, whole if shards is None else shards[name]))


def start_value(decoder: Decoder, seed: int, piece: Shard) -> Tensor:
    """Return a parameter's values before step one, those of one piece of it."""
    if piece.name.endswith(LORA_B):  # so that adapters begin by adding nothing
        return torch.zeros(piece.local_shape)
    if piece.name.endswith(LORA_A):
        return normal_piece(seed, piece, (3 * piece.shape[-1]) ** -0.5)
    if piece.name.endswith((".a_log", ".dt_bias")):
        share = (torch.arange(*piece.box[0]) + 0.5) / piece.shape[0]
        if piece.name.endswith(".a_log"):
            return (1 + 15 * share).log()
        step = torch.exp(math.log(1e-3) + share * math.log(1e2))
        return step + torch.log(-torch.expm1(-step))  # what softplus makes the step of
    if piece.name.endswith("_bias"):
        return torch.zeros(piece.local_shape)
    if len(piece.shape) == 1:
        one = piece.name.endswith("norm.weight") and not _zero_centred(decoder, piece.name)
        return torch.full(piece.local_shape, float(one))
    out_scale = decoder.init_out_scale or 1 / math.sqrt(2 * decoder.layers)
    scale = out_scale if piece.name.endswith(WRITES_RESIDUAL) else 1.0
    return normal_piece(seed, piece, decoder.init_std * scale)


def _zero_centred(decoder: Decoder, name: str) -> bool:
    """Whether a norm's factors are one more than its weight."""
    _, _, inner = name.partition(".attention.")
    if not inner:
        return decoder.norm == "zero_centred"
    attention = decoder.blocks[int(name.split(".")[1])].attention
    return inner[1:] == "_norm.weight" and getattr(attention, "qk_norm", "") == "zero_centred"


def normal_piece(seed: int, piece: Shard, std: float) -> Tensor:
    """Return a piece of what :func:`normal` gives for the whole; draws its range of dim 0 alone."""
    (start, end), inner = piece.box[0], piece.shape[1:]
    whole = normal(seed, piece.name, (end - start, *inner), std, start * math.prod(inner))
    return whole[(slice(None), *(slice(*bounds) for bounds in piece.box[1:]))]


def normal(seed: int, name: str, shape: tuple[int, ...], std: float, first: int = 0) -> Tensor:
    """Return normal values (fp32) for elements ``first`` onwards of the tensor called ``name``."""
    count = math.prod(shape)
    key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], np.uint64)[0]
    out = np.empty(count, np.float32)
    for block in range(first // BLOCK, -(-(first + count) // BLOCK)):
        start, end = max(first, block * BLOCK), min(first + count, (block + 1) * BLOCK)
        out[start - first : end - first] = _drawn(key, block, start % BLOCK, (end - 1) % BLOCK + 1)
    return torch.from_numpy(out).mul_(std).view(shape)


def _drawn(key: np.uint64, block: int, start: int, end: int) -> np.ndarray:
    """Draw elements of a block by the Box-Muller transform of 2 uniforms in (0, 1].

    A pair gives one element of the block's first half and one of its second; only pairs of elements
    that are asked for are transformed, which for a small parameter is most of the time.
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
