"""What the scripts on mlx-lm share: sizes of a small model, a text, and mlx-lm's logits of it."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model

mx.set_default_device(mx.cpu)
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
ids = torch.arange(2, 34)[None]


def logits_of(folder: Path) -> np.ndarray:
    """Return mlx-lm's logits of the text, in fp32."""
    model = load_model(folder)[0]
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(ids.numpy())))[0]
