"""Small models of the matrix, by name, each with some kinds of parts. Imports no torch."""

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any, get_args

from moefold.config.base import Record
from moefold.layers.config import Rope, Temperature, Yarn
from moefold.layers.kinds.convolution import ShortConvolution
from moefold.layers.kinds.delta import DeltaNet
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Chunked, Gqa, Windowed
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block, Decoder, MultiToken, Stack, to_stacks
from moefold.moe.config import (
    BALANCE,
    Activation,
    Aux,
    Bias,
    Capacity,
    ExpertChoice,
    Groups,
    Idle,
    IdleRouter,
    Moe,
    Quantile,
    RoundRobin,
    Router,
    Shared,
    Z,
)
from moefold.moe.config import ROUTER as ROUTER_SLOT
from moefold.optim.config import AdamW
from moefold.proof.case import Subject
from moefold.proof.options import missing_blocks, scored_routers, variants
from moefold.proof.shrink import CLIP, LEARNING_RATE
from moefold.spec.decoder import with_multi_token

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
TEMPERATURE = Temperature(every=3, scale=0.5)
DELTA = DeltaNet(key_heads=4, value_heads=8, key_dim=4, value_dim=6)
CHANNELS = DELTA.model_copy(
    update={"decay": "channel", "decay_rank": 4, "gate": "sigmoid", "gate_rank": 4}
)
BOUNDED = DELTA.model_copy(update={"decay": "channel", "decay_floor": -5.0, "delta": False})
CENTRED = GQA.model_copy(update={"qk_norm": "zero_centred", "gate": True})
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
        Chunked(heads=8, kv_heads=4, head_dim=4, rope=None, temperature=TEMPERATURE),
    ),
}
"""Attentions that only some families have; the layers of a model alternate between the two."""

ROUTER = Router(experts=8, top_k=2)
DEEPSEEK = Router(
    experts=8,
    top_k=3,
    score="sigmoid",
    epsilon=1e-20,
    scale=1.5,
    groups=Groups(count=4, keep=2),
    selection_bias=True,
)
TERMS = (Aux(), Aux(over="sequence"), Aux(over="global_batch"), Z())
ADAMW = AdamW(lr=LEARNING_RATE, clip_norm=CLIP)
DENSE = Dense(width=16)

FACTORED = tuple(Dense(width=16, latent=rank, blocks=n) for rank, n in ((8, 1), (None, 2), (8, 2)))
"""Feed-forwards of low rank, in blocks, and both."""


def moe(**changes: Any) -> Moe:
    """Return an MoE layer of eight experts of width 16, with ``changes``."""
    usual: dict[str, Any] = {"width": 16, "router": ROUTER, "balance": TERMS}
    return Moe(**(usual | changes))


SHARED = moe(shared=Shared(width=16, gate=True))


def decoder(
    attention: Record, *ffns: Record, other: Record | None = None, **changes: Any
) -> Decoder:
    """Return a decoder with a block for each feed-forward; ``other`` is every second attention."""
    attentions = cycle((attention, other or attention))
    stacks = tuple(Stack(blocks=(Block(attention=next(attentions), ffn=f),)) for f in ffns)
    usual: dict[str, Any] = {"vocab": 64, "hidden": 16, "init_std": 0.3, "init_out_scale": 1.0}
    return Decoder(**(usual | changes), stacks=stacks)


def alternating(name: str, *ffns: Record) -> Decoder:
    """Return a decoder whose layers alternate between the two attentions ``UNCOMMON[name]``."""
    first, second = UNCOMMON[name]
    return decoder(first, *ffns, other=second)


def subject(model: Decoder, **changes: Any) -> Subject:
    """Return a subject with AdamW."""
    return Subject(model, ADAMW, **changes)


def scaled_decoder() -> Decoder:
    """Return a decoder with all scale factors, no RoPE, norms after it, and a router's floor."""
    plain = GQA.model_copy(update={"rope": None, "scale": 0.7})
    after = GQA.model_copy(update={"norm_after_rope": True})
    router = Router(experts=8, top_k=2, floor=0.4, selection_bias=True)
    routed = moe(router=router, shared=Shared(width=16))
    halves = ((plain, DENSE), (after, routed))
    blocks = tuple(Block(attention=a, ffn=f, residual_scale=0.6) for a, f in halves)
    scaled = decoder(GQA, DENSE, embed_scale=3.0, logits_divisor=2.0)
    return scaled.model_copy(update={"stacks": (Stack(blocks=blocks),)})


def normed_decoder() -> Decoder:
    """Return a decoder with every uncommon placement of norms, and gated attention outputs."""
    gated = GQA.model_copy(update={"gate": True})
    routed = moe(shared=Shared(width=16), scale=0.5)
    dense = Block(attention=gated, ffn=DENSE, norms="both")
    placed = (copy for _, _, copy in variants(Block(attention=gated, ffn=routed)))
    stacks = to_stacks((dense, *placed))
    return decoder(GQA, DENSE, norm="layer").model_copy(update={"stacks": stacks})


FORMED = moe(
    router=Router(experts=8, top_k=2, order="topk_first", bias=True),
    expert_bias=True,
    activation=Activation(alpha=1.7, limit=0.5, offset=1.0),
)
ENTERED = moe(
    router=Router(experts=8, top_k=2, score="sigmoid", renormalise=False),
    weigh="input",
    shared=Shared(width=16),
    expert_bias=True,
)
BIASED = moe(
    router=DEEPSEEK, balance=(Bias(rate=0.01), Aux(over="sequence")), shared=Shared(width=16)
)

LATER = MultiToken(weight=0.6), MultiToken(weight=0.4, reads="residual")

SUBJECTS: dict[str, Subject] = {
    "gqa": subject(decoder(GQA, DENSE, SHARED)),
    "mha": subject(decoder(MHA, DENSE, SHARED)),
    "mla": subject(decoder(MLA, DENSE, BIASED)),
    "windowed": subject(decoder(WINDOWED, DENSE, SHARED)),
    "scaled": subject(scaled_decoder()),
    "normed": subject(normed_decoder()),
    "centred": subject(decoder(DELTA, DENSE, SHARED, other=CENTRED, norm="zero_centred")),
    **{name: subject(alternating(name, DENSE, SHARED)) for name in UNCOMMON},
    "formed": subject(alternating("narrow", DENSE, FORMED, FORMED)),
    "entered": subject(alternating("chunked", DENSE, ENTERED, ENTERED)),
    "deep": subject(decoder(GQA, DENSE, SHARED, moe(), moe())),
    "tied": subject(decoder(GQA, DENSE, SHARED, tied=True)),
    "tied deep": subject(decoder(GQA, DENSE, moe(), moe(), moe(), tied=True)),
    "mla direct": subject(decoder(MLA.model_copy(update={"q_rank": None}), moe(), moe())),
    "capacity": subject(decoder(GQA, DENSE, moe(capacity=Capacity(factor=1.0)))),
    "capacity by place": subject(
        decoder(GQA, DENSE, moe(capacity=Capacity(factor=0.75, drop="position")))
    ),
    **{
        name: subject(decoder(GQA, moe(router=router)))
        for name, router in scored_routers(experts=8, top_k=4).items()
    },
    "top-1": subject(decoder(GQA, moe(router=Router(experts=8, top_k=1, renormalise=False)))),
    "idle experts": subject(decoder(GQA, DENSE, BIASED), idle=(6, 7)),
    "idle ranks": subject(decoder(GQA, DENSE, SHARED), empty=(1, 3), padding=12),
    "multi token": subject(with_multi_token(decoder(GQA, DENSE, SHARED), LATER)),
    "multi token tied": subject(
        with_multi_token(decoder(MLA, DENSE, BIASED, tied=True), LATER[1:])
    ),
    "odd vocabulary": subject(decoder(MHA, DENSE, SHARED, vocab=67)),
    "odd vocabulary tied": subject(
        with_multi_token(decoder(MHA, DENSE, SHARED, tied=True, vocab=61), LATER[1:])
    ),
    "dense": subject(decoder(GQA, DENSE, DENSE)),
    "dense in parts": subject(decoder(GQA, *FACTORED, SHARED)),
}


for mixer in (GQA, WINDOWED, MLA, DELTA):
    plain = Block(attention=mixer, ffn=SHARED)
    for option, found in missing_blocks([s.decoder for s in SUBJECTS.values()], plain):
        stacks = to_stacks((found,))
        model = decoder(GQA, DENSE).model_copy(update={"stacks": stacks})
        SUBJECTS[option] = subject(model)


def terms() -> Iterator[tuple[str, Subject]]:
    """Yield a subject for each kind of balance term and each population."""
    for kind, record in BALANCE.kinds.items():
        fields = record.model_fields
        settings: dict[str, Any] = {"coefficient": 1.0} if "coefficient" in fields else {}
        populations = get_args(fields["over"].annotation) if "over" in fields else ()
        for over in populations or ("",):
            term = record(**settings, **({"over": over} if over else {}))
            ffn = moe(router=DEEPSEEK, balance=(term,))
            yield f"{kind} {over}".strip(), subject(decoder(GQA, ffn))


def router_kinds() -> Iterator[tuple[str, Subject]]:
    """Yield a subject for each kind of router, and for random jitter and drops."""
    usual = {"experts": 8, "top_k": 2}
    kinds = {kind: record for kind, record in ROUTER_SLOT.kinds.items() if kind != "topk"}
    ffns = {n: moe(router=record.model_validate(usual)) for n, record in kinds.items()}
    ffns["jitter and drops by chance"] = moe(
        router=Router(experts=8, top_k=2, jitter=0.1), capacity=Capacity(factor=0.8, drop="random")
    )
    ffns["round robin, skewed"] = moe(router=RoundRobin(experts=8, top_k=2, skew=1.5))
    ffns["expert choice of few"] = moe(router=ExpertChoice(experts=8, top_k=2, most=3))
    for name, ffn in ffns.items():
        yield name, subject(decoder(GQA, DENSE, ffn))
    idle = Idle(identity=1, constant=2, zero=1)
    router = IdleRouter(experts=8, top_k=3, idle=idle, selection_bias=True)
    free = moe(router=router, capacity=Capacity(factor=1.5), balance=(*TERMS, Quantile(rate=0.5)))
    yield "idle experts and quantiles", subject(decoder(GQA, DENSE, free, free))
    both = Shared(width=16, gate=True, two_way=True)
    latent = moe(latent=8, shared=both, router=router.model_copy(update={"selection_bias": False}))
    blocks = (Block(attention=GQA, ffn=latent, norms=norms) for norms in ("before", "shared"))
    model = decoder(GQA, DENSE).model_copy(update={"stacks": (Stack(blocks=tuple(blocks)),)})
    yield "latent rows, two ways", subject(model)
