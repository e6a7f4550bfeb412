"""Small models that the matrix runs on, by name. Torch-free."""

from collections.abc import Iterator
from typing import Any, get_args

from moefold.config.base import Record
from moefold.config.slot import Slot
from moefold.layers.config import Rope, Yarn
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import BALANCE, Aux, Bias, Capacity, Groups, Moe, Router, Shared, Z
from moefold.optim.config import AdamW
from moefold.proof.case import Subject
from moefold.proof.shrink import CLIP, RATE

GQA = Gqa(heads=8, kv_heads=4, head_dim=4, qk_norm="head")
MHA = Gqa(heads=8, kv_heads=8, head_dim=4, qk_norm="projection")
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
ADAMW = AdamW(lr=RATE, clip_norm=CLIP)
DENSE = Dense(width=16)


def moe(**changes: Any) -> Moe:
    """Return a mixture of eight experts of width 16."""
    usual: dict[str, Any] = {"width": 16, "router": ROUTER, "balance": TERMS}
    return Moe(**(usual | changes))


SHARED = moe(shared=Shared(width=16, gate=True))


def decoder(attention: Record, *ffns: Record, **changes: Any) -> Decoder:
    """Return a decoder of one block for each feed-forward."""
    stacks = tuple(Stack(blocks=(Block(attention=attention, ffn=ffn),)) for ffn in ffns)
    usual: dict[str, Any] = {"vocab": 64, "hidden": 16, "init_std": 0.3, "init_out_scale": 1.0}
    return Decoder(**(usual | changes), stacks=stacks)


def subject(described: Decoder, **changes: Any) -> Subject:
    """Return a subject with AdamW."""
    return Subject(described, ADAMW, **changes)


BIASED = moe(
    router=DEEPSEEK, balance=(Bias(rate=0.01), Aux(over="sequence")), shared=Shared(width=16)
)

SUBJECTS: dict[str, Subject] = {
    "gqa": subject(decoder(GQA, DENSE, SHARED)),
    "mha": subject(decoder(MHA, DENSE, SHARED)),
    "mla": subject(decoder(MLA, DENSE, BIASED)),
    "deep": subject(decoder(GQA, DENSE, SHARED, moe(), moe())),
    "tied": subject(decoder(GQA, DENSE, SHARED, tied=True)),
    "tied deep": subject(decoder(GQA, DENSE, moe(), moe(), moe(), tied=True)),
    "mla direct": subject(decoder(MLA.model_copy(update={"q_rank": None}), moe(), moe())),
    "capacity": subject(decoder(GQA, DENSE, moe(capacity=Capacity(factor=1.0)))),
    "capacity by place": subject(
        decoder(GQA, DENSE, moe(capacity=Capacity(factor=0.75, drop="position")))
    ),
    "top-k first": subject(
        decoder(GQA, moe(router=Router(experts=8, top_k=2, order="topk_first")))
    ),
    "softplus": subject(
        decoder(GQA, moe(router=Router(experts=8, top_k=4, score="sqrt_softplus")))
    ),
    "top-1": subject(decoder(GQA, moe(router=Router(experts=8, top_k=1, renormalise=False)))),
    "idle experts": subject(decoder(GQA, DENSE, BIASED), idle=(6, 7)),
    "idle ranks": subject(decoder(GQA, DENSE, SHARED), empty=(1, 3), padding=12),
    "dense": subject(decoder(GQA, DENSE, DENSE)),
}


def terms() -> Iterator[tuple[str, Subject]]:
    """Yield a subject for each kind of balance and each population it can be over, alone."""
    for kind, record in BALANCE.kinds.items():
        fields = record.model_fields
        given: dict[str, Any] = {"coefficient": 1.0} if "coefficient" in fields else {}
        populations = get_args(fields["over"].annotation) if "over" in fields else ()
        for over in populations or ("",):
            term = record(**given, **({"over": over} if over else {}))
            mixture = moe(router=DEEPSEEK, balance=(term,))
            yield f"{kind} {over}".strip(), subject(decoder(GQA, mixture))


def kinds(slot: Slot, **sizes: int) -> Iterator[Record]:
    """Yield a record of each kind in a slot; required numbers are 2, or those given by name."""
    for record in slot.kinds.values():
        fields = record.model_fields
        required = {name: sizes.get(name, 2) for name, f in fields.items() if f.is_required()}
        yield record(**required)
