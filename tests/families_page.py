"""The table of ``docs/families.md``: which parts each family uses, read off its class."""

from pathlib import Path

from moefold.model.families.base import Family
from moefold.model.families.fields import Rotary
from moefold.model.families.mixed_sizes import (
    ChannelSizes,
    ChunkedSizes,
    ConvolvedSizes,
    DeltaSizes,
    TwoKindSizes,
)
from moefold.model.families.registry import LACKS, families
from moefold.model.families.sizes import (
    AnySharedSizes,
    DenseFirst,
    DenseListed,
    DenseTurnSizes,
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
    "after": "norms after each half",
    "both": "norms before and after each half",
    "shared": "one norm for both halves",
}


def _shape(family: type[Family]) -> type[FamilySizes]:
    return family.model_fields["shape"].annotation  # type: ignore[return-value]


def attention(family: type[Family]) -> str:
    """Name the parts of a family's attention."""
    shape, own = _shape(family), family.attention_own
    said = ["latent" if issubclass(shape, LatentSizes | ChannelSizes) else "grouped-query"]
    said += ["short convolutions"] if issubclass(shape, ConvolvedSizes) else []
    said += ["gated delta nets"] if issubclass(shape, DeltaSizes) else []
    said += ["delta nets with decays of each channel"] if issubclass(shape, ChannelSizes) else []
    said += ["no positions"] if not family.turns else []
    if own.get("qk_norm") == "zero_centred":
        said.append("q/k norm per head")
    elif own.get("qk_norm"):
        said.append(f"q/k norm per {own['qk_norm']}")
    said += ["biases"] if "bias" in family.attention_fields else []
    said += ["q/k norm or none"] if "qk_norm" in family.attention_fields else []
    said += ["norm after rotary"] if own.get("norm_after_rope") else []
    gated = "gate of each head" if "latent" in said else "gate on the output"
    said += [gated] if own.get("gate") else []
    said += ["factor on scores"] if "scale" in family.attention_fields else []
    partial = any(isinstance(f, Rotary) and f.fraction is not None for f in family.fields)
    said += ["partial rotary"] if partial else []
    said += (
        ["values of other dims"] if "v_dim" in shape.model_fields and "latent" not in said else []
    )
    said += ["factor on values"] if "value_scale" in family.attention_fields else []
    if issubclass(shape, ChunkedSizes):
        said += ["norm without a weight", "chunks, full layers without positions", "temperature"]
    if issubclass(shape, WindowSizes):
        said.append("windows" if shape.full_turn else "windows, full layers without positions")
        said += ["sinks"] if issubclass(shape, SinkSizes | TwoKindSizes) else []
        said += ["there twice the key-value heads"] if issubclass(shape, TwoKindSizes) else []
        said += ["dense ones with"] if issubclass(shape, DenseTurnSizes) else []
    if family.fixed_rope != "half":
        said.append("interleaved or half rotary" if family.fixed_rope is None else "interleaved")
    return ", ".join(said)


def router(family: type[Family]) -> str:
    """Name what a family's router computes."""
    own = family.router_own
    said = [" or ".join(family.router_kinds) or own.get("score", "softmax")]
    said += ["selection bias"] if own.get("selection_bias") else []
    said += ["selection bias or none"] if "selection_bias" in family.router_fields else []
    said += ["bias"] if own.get("bias") else []
    said += ["over the chosen"] if own.get("order") == "topk_first" else []
    said += ["least sum"] if "floor" in family.router_fields else []
    said += ["groups"] if "groups" in family.router_fields else []
    said += ["scale"] if "scale" in family.router_fields else []
    said += ["renormalised or not"] if "renormalise" in family.router_fields else []
    return ", ".join(said)


def feed_forward(family: type[Family]) -> str:
    """Name what stands beside routed experts."""
    shape, said = _shape(family), ["routed experts"]
    said += ["their biases"] if family.moe_own.get("expert_bias") else []
    said += ["weights on their input"] if family.moe_own.get("weigh") else []
    said += ["clamped activation"] if "activation" in family.moe_fields else []
    said += ["shared expert"] if issubclass(shape, SharedSizes) else []
    said += ["shared expert"] if "width_of_shared" in vars(shape) else []
    said += ["gated shared expert"] if family.shared_gate else []
    said += ["shared expert or none"] if issubclass(shape, AnySharedSizes) else []
    names = (*family.block_fields, *family.decoder_fields)
    factors = [word for name, word in FACTORS.items() if name in names]
    said += [f"factor on {', '.join(factors)}"] if factors else []
    said += [NORMS[family.block_own["norms"]]] if family.block_own.get("norms") else []
    said += ["norms centred at zero"] if family.decoder_own.get("norm") else []
    said += ["LayerNorm or RMSNorm"] if "norm" in names else []
    said += ["first layers dense"] if issubclass(shape, DenseFirst) else []
    said += ["listed layers dense"] if issubclass(shape, DenseListed) else []
    return ", ".join(said)


def table() -> str:
    """Return the rows of both tables, as the page has them."""
    rows = [
        f"| {' '.join((name, *family.aliases))} | {attention(family)} | {router(family)} | "
        f"{feed_forward(family)} |"
        for name, family in sorted(families().items())
        if family.__module__.startswith("moefold.")
    ]
    lacks = [f"| {name} | {part} |" for name, part in sorted(LACKS.items())]
    missing = ["| model_type | part that is not here |", "|---|---|", *lacks]
    return "\n".join([HEAD, "|---|---|---|---|", *rows, "", *missing])


def write() -> None:
    """Write both tables into the page anew; they are its end."""
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index(HEAD)] + table() + "\n", "utf-8")
