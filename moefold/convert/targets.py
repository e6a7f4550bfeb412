"""What a decoder's state consists of, taken from the model itself on the meta device."""

from dataclasses import dataclass

import torch

from moefold.model.config import Decoder
from moefold.model.decoder import DecoderModel


@dataclass(frozen=True)
class Target:
    """Shape and type of one parameter or buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def targets(decoder: Decoder) -> dict[str, Target]:
    """Return every tensor that a decoder's checkpoint holds, in the model's order."""
    state = DecoderModel(decoder, precision="fp32", device="meta").state_dict()
    return {name: Target(tuple(t.shape), t.dtype) for name, t in state.items()}
