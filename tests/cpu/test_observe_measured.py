"""FLOPs as they happen: matrix products counted while a step runs, against the formula.

The formula follows a convention, so what differs is known beforehand and is added by hand here:
the router's products and those of a shared expert's gate are made but not counted, the norms on
latents are counted but are no products. Everything else must agree to the last multiply-add.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.data.batch import from_ids
from moefold.layers.config import Full
from moefold.layers.context import attend as attention_layer
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Capacity, Moe, Router, Shared
from moefold.planner.count import count
from tests import references
from tests.cpu.small import HIDDEN, gradients, ids_of, model_of, padded_rows
from tests.model_counts import tally, total

GQA = Gqa(heads=3, kv_heads=1, head_dim=4, qk_norm="projection")
MLA = Mla(heads=2, q_rank=6, kv_rank=5, nope_dim=4, rope_dim=2, v_dim=3)
ROUTER = Router(experts=5, top_k=3)
NARROW = Moe(width=7, router=ROUTER)
WIDE = Moe(width=9, router=Router(experts=7, top_k=2), shared=Shared(width=11, gate=True))


def of(*blocks: tuple[Any, Any], **more: Any) -> Decoder:
    stack = Stack(blocks=tuple(Block(attention=a, ffn=f) for a, f in blocks))
    return Decoder(vocab=64, hidden=HIDDEN, stacks=(stack,), **more)


DECODERS = {
    "top-3 of 5, width 7": of((GQA, NARROW)),
    "gated shared expert": of((GQA, WIDE), (GQA, NARROW)),
    "latent attention, dense first": of((MLA, Dense(width=13)), (MLA, NARROW)),
    "latent attention without a rank of queries": of(
        (MLA.model_copy(update={"q_rank": None}), WIDE)
    ),
    "tied": of((GQA, Dense(width=24)), (GQA, WIDE), tied=True),
}
MATRIX = torch.ops.aten
FIRST = {
    MATRIX.mm: 0, MATRIX.bmm: 0, MATRIX._grouped_mm: 0, MATRIX.addmm: 1, MATRIX.addmm_: 1,
    MATRIX.baddbmm: 1,
}  # fmt: skip
"""Operations that are products, and which argument is the first factor."""


class Products(TorchDispatchMode):
    """Adds up the multiply-adds of products of matrices; those with vectors belong to norms."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0
        self.others: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in FIRST:
            first, second = args[FIRST[packet]], args[FIRST[packet] + 1]
            self.multiply_adds += first.numel() * second.shape[-1]
        elif any(word in str(packet) for word in ("mm", "attention", "einsum", "conv", "matmul")):
            self.others.add(str(packet))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention multiply every query with every key, as plain products."""
    monkeypatch.setattr(attention_layer, "attention", references.attention)


def measured(
    record: Decoder, lengths: tuple[int, ...], precision: str = "fp64", **more: Any
) -> int:
    """Return FLOPs of one step, each length a micro-batch of its own."""
    policy = more.pop("recompute", None)
    model = model_of(record, precision, **({"experts": "loop"} | more))
    batches = [from_ids(ids_of(1, length)) for length in lengths]
    with Products() as products:
        gradients(model, batches, policy, 8)
    assert products.others == set()
    return 2 * products.multiply_adds


def beside_the_convention(record: Decoder) -> int:
    """Return FLOPs per token that are made and not counted, less those counted and not made."""
    flops = 0
    for block in record.blocks:
        if isinstance(block.ffn, Moe):
            flops += 6 * HIDDEN * block.ffn.router.experts
            shared = block.ffn.shared
            flops += 6 * HIDDEN if shared is not None and shared.gate else 0
        if isinstance(block.attention, Mla):
            flops -= 6 * (block.attention.kv_rank + (block.attention.q_rank or 0))
    return flops


@pytest.mark.parametrize("lengths", [(12,), (5, 16, 2)])
@pytest.mark.parametrize("name", DECODERS)
def test_flops_are_those_of_a_real_step(name: str, lengths: tuple[int, ...]) -> None:
    """Plant: in the layer, run every expert on every row; in the formula, the hidden size."""
    record = DECODERS[name]
    made = measured(record, lengths) - sum(lengths) * beside_the_convention(record)
    assert made == count(record).flops(lengths, causal=False)
    built = total(tally(model_of(record)))
    assert made == sum(built.flops(length, causal=False) for length in lengths)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_grouped_product_multiplies_no_more(precision: str) -> None:
    record = of((GQA, Moe(width=16, router=ROUTER)))
    grouped = measured(record, (12, 7), precision, experts="grouped")
    assert grouped == measured(record, (12, 7), precision, experts="loop")
    assert grouped == count(record).flops((12, 7), causal=False) + 19 * beside_the_convention(
        record
    )


def test_recompute_adds_one_forward_of_the_blocks_alone() -> None:
    record = DECODERS["gated shared expert"]
    head = 6 * record.vocab * HIDDEN * 12
    once, twice = measured(record, (12,)), measured(record, (12,), recompute=Full())
    assert (twice - once) * 3 == once - head


def test_experts_multiply_no_dropped_copy() -> None:
    tight = of((GQA, NARROW.model_copy(update={"capacity": Capacity(factor=0.5)})))
    model = model_of(tight, experts="loop")
    with Products() as products:
        gradients(model, [from_ids(ids_of(1, 12))], None, 8)
    sent = int(next(model.moe_layers())[1].balance.counters.sent_E.sum())
    assert sent < 12 * 3
    less = measured(of((GQA, NARROW)), (12,)) - 2 * products.multiply_adds
    assert less == (12 * 3 - sent) * 6 * 3 * HIDDEN * NARROW.width


@pytest.mark.parametrize("pads", [0, 4])
def test_experts_multiply_no_padding(pads: int) -> None:
    """What experts of twice the width add is the same with padding rows and without."""
    found = []
    for width in (NARROW.width, 2 * NARROW.width):
        record = of((GQA, NARROW.model_copy(update={"width": width})))
        model = model_of(record, experts="loop")
        with Products() as products:
            gradients(model, [padded_rows((12,), pads)], None, 8)
        found.append(2 * products.multiply_adds)
    assert found[1] - found[0] == 12 * 3 * 6 * 3 * HIDDEN * NARROW.width


def test_the_counter_counts() -> None:
    a, b, c = torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 5)
    with Products() as products:
        _: Tensor = a @ b
        torch.mm(a, b, out=c)
        c.addmm_(a, b)
        torch.bmm(a[None], b[None])
    assert products.multiply_adds == 4 * 30
    with Products() as products:
        torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 8))
        torch.nn.functional.conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 2))
    assert len(products.others) == 2
