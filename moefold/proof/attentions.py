"""Attentions of the matrix's small models. Torch-free."""

from collections.abc import Mapping

from moefold.config.base import Record
from moefold.layers.config import Rope, Temperature, Yarn
from moefold.layers.kinds.chunked import Chunked
from moefold.layers.kinds.convolution import ShortConvolution
from moefold.layers.kinds.delta import DeltaNet
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.layers.kinds.windowed import Windowed

GQA = Gqa(heads=8, kv_heads=4, head_dim=4, qk_norm="head")
MHA = Gqa(heads=8, kv_heads=8, head_dim=4, qk_norm="projection")
WINDOWED = Windowed(heads=8, kv_heads=4, head_dim=4, window=5, qk_norm="head")
YARN = Yarn(factor=4.0, original_length=16, mscale_all_dim=1.0)
MLA = Mla(
    heads=8,
    q_rank=8,
    kv_rank=8,
    nope_dim=4,
    rope_dim=4,
    v_dim=6,
    rope=Rope(yarn=YARN, layout="interleaved"),
)
HALF = Rope(fraction=0.5)
BIASES = Gqa(heads=8, kv_heads=4, head_dim=4, bias="all", rope=HALF)
FEW = Temperature(every=3, scale=0.5)
DELTA = DeltaNet(key_heads=4, value_heads=8, key_dim=4, value_dim=6)
CHANNELS = DELTA.model_copy(
    update={"decay": "channel", "decay_rank": 4, "gate": "sigmoid", "gate_rank": 4}
)
BOUNDED = DELTA.model_copy(update={"decay": "channel", "decay_floor": -5.0, "delta": False})
GATED = MLA.model_copy(update={"rope": None, "gate": True})
UNCOMMON: Mapping[str, tuple[Record, Record]] = {
    "biased": (BIASES, BIASES),
    "narrow": (
        Gqa(heads=8, kv_heads=4, head_dim=4, v_dim=2, value_scale=0.7, rope=HALF),
        Windowed(heads=8, kv_heads=8, head_dim=4, v_dim=2, value_scale=0.7, window=5),
    ),
    "convolved": (ShortConvolution(taps=4), GQA),
    "delta": (DELTA, GQA),
    "channels": (CHANNELS, GQA),
    "bounded": (BOUNDED, GQA),
    "gated latents": (GATED, GATED.model_copy(update={"q_rank": None})),
    "chunked": (
        Chunked(heads=8, kv_heads=4, head_dim=4, chunk=5, qk_norm="unit", norm_after_rope=True),
        Chunked(heads=8, kv_heads=4, head_dim=4, rope=None, temperature=FEW),
    ),
}
"""Those that only some families have: of the layers of a model, by turns."""
