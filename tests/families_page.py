"""The table of ``docs/families.md``: which parts each family uses, read off its class."""

from pathlib import Path

from moefold.model.families.base import Family
from moefold.model.families.fields import Rotary
from moefold.model.families.mixed_sizes import (
    ChannelSizes,
    ChunkedSizes,
    ConvolutionSizes,
    DeltaSizes,
    TwoKindSizes,
)
from moefold.model.families.registry import MISSING_PARTS, families
from moefold.model.families.sizes import (
    AnySharedSizes,
    DenseFirst,
    DenseListed,
    DenseRopeSizes,
    FamilySizes,
    LatentSizes,
    SharedSizes,
    SinkSizes,
    WindowSizes,
)

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEAD = "| model_type | attention | router | feed-forward |"
FACTORS = {"residual_scale": "residual", "embed_scale": "embedding", "logits_divisor": "logits"}
NORMS = {
    "after": "norms after each sublayer",
    "both": "norms before and after each sublayer",
    "shared": "one norm for both sublayers",
}


def _shape(family: type[Family]) -> type[FamilySizes]:
    return family.model_fields["shape"].annotation  # type: ignore[return-value]


def attention(family: type[Family]) -> str:
    """Name the parts of a family's attention."""
    shape, own = _shape(family), family.attention_fixed
    parts = ["latent" if issubclass(shape, LatentSizes | ChannelSizes) else "grouped-query"]
    parts += ["short convolutions"] if issubclass(shape, ConvolutionSizes) else []
    parts += ["gated delta nets"] if issubclass(shape, DeltaSizes) else []
    parts += ["delta nets with decays of each channel"] if issubclass(shape, ChannelSizes) else []
    parts += ["no positions"] if not family.has_rope else []
    if own.get("qk_norm") == "zero_centred":
        parts.append("q/k norm per head")
    elif own.get("qk_norm"):
        parts.append(f"q/k norm per {own['qk_norm']}")
    parts += ["biases"] if "bias" in family.attention_fields else []
    parts += ["q/k norm or none"] if "qk_norm" in family.attention_fields else []
    parts += ["norm after rotary"] if own.get("norm_after_rope") else []
    gated = "gate of each head" if "latent" in parts else "gate on the output"
    parts += [gated] if own.get("gate") else []
    parts += ["factor on scores"] if "scale" in family.attention_fields else []
    partial = any(isinstance(f, Rotary) and f.fraction is not None for f in family.fields)
    parts += ["partial rotary"] if partial else []
    parts += (
        ["values of other dims"] if "v_dim" in shape.model_fields and "latent" not in parts else []
    )
    parts += ["factor on values"] if "value_scale" in family.attention_fields else []
    if issubclass(shape, ChunkedSizes):
        parts += ["norm without a weight", "chunks, full layers without positions", "temperature"]
    if issubclass(shape, WindowSizes):
        parts.append("windows" if shape.full_rope else "windows, full layers without positions")
        parts += ["sinks"] if issubclass(shape, SinkSizes | TwoKindSizes) else []
        parts += ["there twice the key-value heads"] if issubclass(shape, TwoKindSizes) else []
        parts += ["dense ones with"] if issubclass(shape, DenseRopeSizes) else []
    if family.fixed_rope != "half":
        parts.append("interleaved or half rotary" if family.fixed_rope is None else "interleaved")
    return ", ".join(parts)


def router(family: type[Family]) -> str:
    """Name what a family's router computes."""
    own = family.router_fixed
    parts = [" or ".join(family.router_kinds) or own.get("score", "softmax")]
    parts += ["selection bias"] if own.get("selection_bias") else []
    parts += ["selection bias or none"] if "selection_bias" in family.router_fields else []
    parts += ["bias"] if own.get("bias") else []
    parts += ["over the chosen"] if own.get("order") == "topk_first" else []
    parts += ["least sum"] if "floor" in family.router_fields else []
    parts += ["groups"] if "groups" in family.router_fields else []
    parts += ["scale"] if "scale" in family.router_fields else []
    parts += ["renormalised or not"] if "renormalise" in family.router_fields else []
    return ", ".join(parts)


def feed_forward(family: type[Family]) -> str:
    """Name what stands beside routed experts."""
    shape, parts = _shape(family), ["routed experts"]
    parts += ["their biases"] if family.moe_fixed.get("expert_bias") else []
    parts += ["weights on their input"] if family.moe_fixed.get("weigh") else []
    parts += ["clamped activation"] if "activation" in family.moe_fields else []
    parts += ["shared expert"] if issubclass(shape, SharedSizes) else []
    parts += ["shared expert"] if "resolved_shared_width" in vars(shape) else []
    parts += ["gated shared expert"] if family.shared_gate else []
    parts += ["shared expert or none"] if issubclass(shape, AnySharedSizes) else []
    names = (*family.block_fields, *family.decoder_fields)
    factors = [word for name, word in FACTORS.items() if name in names]
    parts += [f"factor on {', '.join(factors)}"] if factors else []
    parts += [NORMS[family.block_fixed["norms"]]] if family.block_fixed.get("norms") else []
    parts += ["norms centred at zero"] if family.decoder_fixed.get("norm") else []
    parts += ["LayerNorm or RMSNorm"] if "norm" in names else []
    parts += ["first layers dense"] if issubclass(shape, DenseFirst) else []
    parts += ["listed layers dense"] if issubclass(shape, DenseListed) else []
    return ", ".join(parts)


def table() -> str:
    """Return the rows of both tables, as the page has them."""
    rows = [
        f"| {' '.join((name, *family.aliases))} | {attention(family)} | {router(family)} | "
        f"{feed_forward(family)} |"
        for name, family in sorted(families().items())
        if family.__module__.startswith("moefold.")
    ]
    parts = [f"| {name} | {part} |" for name, part in sorted(MISSING_PARTS.items())]
    missing = ["| model_type | missing part |", "|---|---|", *parts]
    return "\n".join([HEAD, "|---|---|---|---|", *rows, "", *missing])


def write() -> None:
    """Write both tables into the page anew; they are its end."""
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index(HEAD)] + table() + "\n", "utf-8")
