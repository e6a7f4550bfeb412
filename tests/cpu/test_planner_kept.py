"""Planned bytes that a layer keeps, against what a pass really leaves alive: by storage."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from bench.planner_memory import rows
from moefold.config.base import Record
from moefold.kernels.quantise.config import QUANTISE, Quantise
from moefold.layers.config import (
    Activation,
    Full,
    Offload,
    OffloadToHost,
    RecomputeKind,
    Selective,
    Temperature,
)
from moefold.layers.kinds.convolution import ShortConvolution
from moefold.layers.kinds.delta import DeltaNet
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Chunked, Gqa, Windowed
from moefold.layers.kinds.mla import Mla
from moefold.layers.offload import ActivationOffload
from moefold.layers.saved_tensors import SavedTensors
from moefold.model.config import Block
from moefold.moe.config import Aux, Bias, ExpertChoice, Idle, IdleRouter, Moe, Router, Shared, Z
from moefold.planner.memory_chunk import offloaded_tensors
from moefold.planner.memory_saved import deferred_operands, saved_bytes, saved_tensors
from moefold.proof.options import scored_routers, variants
from moefold.spec.codes import coded_blocks
from moefold.spec.layer import NOTHING, Shape, recomputed_modules
from tests.cpu.alive import (
    HIDDEN,
    LENGTH,
    SEQUENCES,
    bytes_alive,
    bytes_held,
    bytes_planned,
    decoder_of,
    set_up,
    there,
)

GQA = Gqa(heads=4, kv_heads=2, head_dim=16)
MLA = Mla(heads=4, q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=16)
DELTA = DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=24)
CHANNELS = {"decay": "channel", "decay_rank": 8, "gate": "sigmoid", "gate_rank": 8}
MOE = Moe(width=24, router=Router(experts=8, top_k=2), shared=Shared(width=40), balance=(Aux(),))
BIASED = Router(experts=8, top_k=3, score="sigmoid", selection_bias=True, scale=2.5)
BLOCKS = {
    "grouped heads, dense": Block(attention=GQA, ffn=Dense(width=48)),
    "norms on heads, shared": Block(attention=GQA.model_copy(update={"qk_norm": "head"}), ffn=MOE),
    "norms on projections, gate": Block(
        attention=GQA.model_copy(update={"qk_norm": "projection"}),
        ffn=MOE.model_copy(
            update={
                "router": Router(experts=8, top_k=2, order="topk_first"),
                "shared": Shared(width=40, gate=True, two_way=True),
                "latent": 32,
                "balance": (Aux(over="global_batch"),),
            }
        ),
    ),
    "window, sinks": Block(
        attention=Windowed(heads=4, kv_heads=2, head_dim=16, window=8), ffn=Dense(width=48)
    ),
    "latents, sigmoid": Block(
        attention=MLA, ffn=Moe(width=24, router=BIASED, balance=(Z(), Aux(), Bias()))
    ),
    "jitter, experts choose": Block(
        attention=GQA,
        ffn=Moe(
            width=24,
            router=ExpertChoice(experts=8, top_k=2, most=3, jitter=0.1),
            balance=(Aux(),),
        ),
    ),
    "norms after, gate on the output": Block(
        attention=GQA.model_copy(update={"gate": True}), ffn=MOE, norms="after"
    ),
    "norms on both sides, low rank": Block(
        attention=MLA, ffn=Dense(width=48, latent=24), norms="both"
    ),
    "narrow values with a factor, biases and a bound in experts": Block(
        attention=Windowed(
            heads=4, kv_heads=4, head_dim=16, v_dim=8, value_scale=0.7, window=8, gate=True
        ),
        ffn=Moe(
            width=24,
            router=Router(experts=8, top_k=2, order="topk_first", bias=True),
            expert_bias=True,
            activation=Activation(limit=7.0),
        ),
    ),
    "chunks, norms without a weight, a temperature, weights on the input": Block(
        attention=Chunked(
            heads=4,
            kv_heads=2,
            head_dim=16,
            chunk=8,
            qk_norm="unit",
            norm_after_rope=True,
            temperature=Temperature(every=3, scale=0.5),
        ),
        ffn=MOE.model_copy(update={"weigh": "input"}),
    ),
    "short convolution, low rank in blocks": Block(
        attention=ShortConvolution(taps=3), ffn=Dense(width=48, latent=24, blocks=2)
    ),
    "delta net, blocks": Block(attention=DELTA, ffn=Dense(width=48, blocks=4)),
    "decays of channels": Block(attention=DELTA.model_copy(update=CHANNELS), ffn=Dense(width=48)),
    "one norm": Block(
        attention=GQA, ffn=Moe(width=24, router=Router(experts=8, top_k=2)), norms="shared"
    ),
    "one norm, dense": Block(attention=GQA, ffn=Dense(width=48), norms="shared"),
    "one norm, latent beside a shared expert": Block(
        attention=DELTA, ffn=MOE.model_copy(update={"latent": 32}), norms="shared"
    ),
    "latent beside a shared expert": Block(
        attention=GQA, ffn=MOE.model_copy(update={"latent": 32})
    ),
    "one norm, a factor": Block(
        attention=MLA, ffn=Dense(width=48, latent=24), norms="shared", residual_scale=0.5
    ),
    "idle experts": Block(
        attention=GQA,
        ffn=Moe(
            width=24,
            router=IdleRouter(experts=8, top_k=3, idle=Idle(identity=1, constant=2, zero=1)),
        ),
    ),
    "latents without a query's, wide values": Block(
        attention=MLA.model_copy(update={"q_rank": None, "v_dim": 24}), ffn=Dense(width=48)
    ),
}
ROUTED = Block(attention=GQA, ffn=MOE)
OPTIONS = {f"{field} {value}": block for field, value, block in variants(ROUTED)} | {
    f"{name}, renormalised {whole}": ROUTED.model_copy(
        update={"ffn": MOE.model_copy(update={"router": router})}
    )
    for whole in (True, False)
    for name, router in scored_routers(experts=8, top_k=2, renormalise=whole).items()
}
"""A block for each placement of norms and each score of a router, also those that are new."""
ALL: tuple[RecomputeKind, ...] = get_args(RecomputeKind)
POLICIES: list[Record | None] = [
    None,
    Full(),
    *(Selective(modules=(kind,)) for kind in ALL),
    Selective(modules=("norms", "mla_up")),
    Selective(modules=("attention", "mla_up")),
    Selective(modules=("norms", "permute")),
    Selective(modules=ALL),
]
ENDS = (POLICIES[0], POLICIES[1], POLICIES[-1])
"""Nothing made again, the whole block, and each module by itself."""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_that_stay_alive_are_the_planned_ones(name: str, precision: str) -> None:
    """Under every policy, decisions included; in fp32 all modules leave at once."""
    for policy in POLICIES if precision == "bf16" else ENDS:
        found = bytes_alive(BLOCKS[name], policy, precision)
        assert found == bytes_planned(BLOCKS[name], policy, precision), policy


@pytest.mark.parametrize("name", OPTIONS)
def test_bytes_that_an_option_of_a_block_or_router_keeps_are_the_planned_ones(name: str) -> None:
    """Kept, waiting for the products of weights, and with each module made again at once."""
    block = OPTIONS[name]
    for policy in (None, Selective(modules=ALL)):
        assert bytes_alive(block, policy, "bf16") == bytes_planned(block, policy, "bf16"), policy
    parts = deferred_operands(block, Shape(HIDDEN, SEQUENCES * LENGTH))
    planned = sum(part.bytes for part in parts if part.name != "input")
    assert bytes_held(block, None, "bf16") == planned


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_that_wait_for_the_products_of_weights_are_the_planned_ones(
    name: str, precision: str
) -> None:
    """The same whatever is made again, which waits too; the input is another's."""
    shape = Shape(HIDDEN, SEQUENCES * LENGTH, width=4 if precision == "fp32" else 2)
    parts = deferred_operands(BLOCKS[name], shape)
    planned = sum(part.bytes for part in parts if part.name != "input")
    for policy in ENDS:
        assert bytes_held(BLOCKS[name], policy, precision) == planned, policy


@pytest.mark.matrix
@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_are_so_under_every_policy(name: str) -> None:
    """In fp32, and what waits for the products of weights."""
    for policy in POLICIES:
        found = bytes_alive(BLOCKS[name], policy, "fp32")
        assert found == bytes_planned(BLOCKS[name], policy, "fp32"), policy
        waiting = bytes_held(BLOCKS[name], policy, "bf16")
        assert waiting == bytes_held(BLOCKS[name], None, "bf16"), policy


UNEVEN = ("jitter, experts choose", "idle experts")
CODED = {
    name: one
    for name, one in BLOCKS.items()
    if not getattr(one.ffn, "has_expert_variant", False) and name not in UNEVEN
}
"""Those that may have products on codes, whose experts can all get all rows."""


def steady(name: str) -> Block:
    """A block whose experts each get all rows."""
    block = CODED[name]
    return block.model_copy(
        update={"ffn": getattr(block.ffn, "without_discrete_choices", lambda: block.ffn)()}
    )


def check_codes(name: str, record: Quantise, policies: list[Record | None]) -> None:
    """Hold that a block keeps, and waits with, the planned bytes; codes are of one byte or half."""
    block, shape = steady(name), Shape(HIDDEN, SEQUENCES * LENGTH)
    for policy in policies:
        found = bytes_alive(block, policy, "bf16", record)
        assert found == bytes_planned(block, policy, "bf16", record), (record, policy)
    (coded,) = coded_blocks(decoder_of(block, record))
    for policy in policies[-1:]:
        parts = deferred_operands(coded, shape, recomputed_modules(policy))
        waiting = sum(part.bytes for part in parts if part.name != "input")
        assert bytes_held(block, policy, "bf16", record) == waiting, (record, policy)


@pytest.mark.parametrize(
    ("name", "kind", "changed", "policy"),
    [
        ("norms on heads, shared", "nvfp4", {"keep": ["*.k.weight"]}, None),
        ("latents, sigmoid", "mxfp8", {}, Selective(modules=("mla_up", "experts"))),
        (
            "norms on both sides, low rank",
            "fp8_block",
            {"block": 16},
            Selective(modules=("norms", "ffn")),
        ),
        ("delta net, blocks", "fp8_tensor", {}, Selective(modules=("attention",))),
        ("norms on heads, shared", "mxfp8", {"wgrad": "wide"}, None),
        ("norms on projections, gate", "mxfp8", {}, Selective(modules=("ffn",))),
        ("norms on heads, shared", "nvfp4", {"hidden": "codes"}, None),
        ("norms on heads, shared", "fp8_tensor", {"scaling": "delayed", "history": 3}, None),
    ],
)
def test_bytes_of_codes_are_the_planned_ones(
    name: str, kind: str, changed: dict[str, Any], policy: Record | None
) -> None:
    """What several weights read is there once.

    Plants: each weight has codes of its own; latents' go with a dense feed-forward; scales of
    pre-activations are forgotten.
    """
    check_codes(name, QUANTISE.kinds[kind].model_validate(changed), [policy])  # type: ignore[arg-type]


def test_codes_leave_for_the_host_as_planned() -> None:
    """Two of them in a byte too, and those of pre-activations. Plant: such never leave."""
    modules: tuple[Any, ...] = "attention", "experts", "shared"
    record = QUANTISE.kinds["nvfp4"].model_validate({"hidden": "codes"})
    assert isinstance(record, Quantise)
    block = steady("norms on heads, shared")
    layer, flow, x_TD = set_up(block, None, "bf16", record)
    asked = Offload.model_validate({"host": {"modules": modules}})
    places = ActivationOffload(asked, torch.device("cpu"))
    flow = replace(flow, saved_tensors=SavedTensors(None, places, computes_loss=False))
    with flow.saved_tensors.layer_hooks():
        out = layer(x_TD, flow)
    (coded,) = coded_blocks(decoder_of(block, record))
    parts = saved_tensors(coded, Shape(HIDDEN, SEQUENCES * LENGTH))
    gone = offloaded_tensors(parts, NOTHING, Offload(host=OffloadToHost(modules=modules)))[0]
    assert any(part.name.endswith(".codes") for part in gone)
    assert places.stores["host"].stats.held == sum(part.bytes for part in gone)
    del out


@pytest.mark.matrix
@pytest.mark.parametrize("kind", QUANTISE.kinds)
@pytest.mark.parametrize("name", CODED)
def test_bytes_of_codes_are_so_under_every_policy(name: str, kind: str) -> None:
    """In published blocks and in small ones, with wide products of weights' gradients, and with
    codes of pre-activations."""
    made = QUANTISE.kinds[kind]
    for changed in ({}, {"block": 16, "hidden": "codes"}, {"wgrad": "wide", "hidden": "codes"}):
        check_codes(name, made.model_validate(changed), POLICIES)  # type: ignore[arg-type]


@pytest.mark.matrix
def test_the_measured_peak_of_a_step_is_near_the_planned_one() -> None:
    """Plant: runs of rows become codes all at once."""
    (found,) = rows("nvfp4, dense")
    assert abs(found["planned"] / found["tensors"] - 1) < 0.05


@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_that_autograd_saves_are_the_planned_ones(name: str) -> None:
    """Counted by saved-tensor hooks; a decision, which is kept beside them, apart."""
    layer, flow, x_TD = set_up(BLOCKS[name], None, "bf16")
    weights = there(layer, flow)
    saved: dict[int, torch.Tensor] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(see, lambda tensor: tensor):
        layer(x_TD, flow)
    found = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in weights)
    shape = Shape(HIDDEN, SEQUENCES * LENGTH)
    parts = [part for part in saved_tensors(BLOCKS[name], shape) if part.saved]
    assert found == saved_bytes(parts)


def test_a_routed_layer_whose_copies_are_made_again_keeps_rows_and_pre_activations() -> None:
    """T * D + 2 * T * K * F elements, SonicMoE's bound (arXiv 2512.14080), and the routing."""
    ffn = Moe(width=24, router=Router(experts=8, top_k=3))
    shape, again = Shape(HIDDEN, rows=64), frozenset(("permute",))
    stays = {
        part.name: part.bytes
        for part in ffn.saved(shape)
        if part.from_forward and part.is_saved_under(again)
    }
    rows = stays.pop("ffn_norm.output") + stays.pop("experts.hidden")
    assert rows == (64 * HIDDEN + 2 * 64 * 3 * 24) * shape.width
    assert stays.pop("residual") == shape.hidden_bytes, "the block's own"
    assert set(stays) == {
        "ffn_norm.statistic",
        "router.scores",
        "router.chosen",
        "router.total",
        "router.weights",
        "decision",
        "offsets",
        "experts.weights",
        "combine.tokens",
        "dispatch.rows",
    }
