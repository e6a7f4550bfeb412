"""The planner's time model: curves and network against printed figures, the pipeline against the
simulator, and what a step's parts must satisfy."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from moefold.layers.config import Gathered, Offload, OffloadToPages
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.mesh.config import ORDERS, Sizes
from moefold.mesh.pipeline import Stages
from moefold.model.config import Block, Decoder, MultiToken, Stack
from moefold.moe.config import Moe, Router, Shared
from moefold.optim.config import AdamW, Muon
from moefold.planner.case import (
    Case,
    NumberFormats,
    Overlaps,
    Software,
    StageContents,
    schedule_table,
)
from moefold.planner.count import count
from moefold.planner.curves import Product, attention_seconds, constants, product_seconds
from moefold.planner.hardware import parse_cluster
from moefold.planner.network import (
    LINK_LATENCY,
    RING_EFFICIENCY,
    DispatchRows,
    GroupReach,
    even_domains,
    exchange_seconds,
    ring_seconds,
    strided_reach,
)
from moefold.planner.search_space import SCHEDULES
from moefold.planner.time import (
    PassTime,
    case_shape,
    estimate_time,
    idle_micro_batches,
    model_flops,
    pipeline_seconds,
)
from moefold.planner.time_layer import layer_time
from moefold.planner.time_work import LayerPolicy, build_setting, sublayer_work
from moefold.schedule.config import (
    GPipe,
    Interleaved,
    Merged,
    OneFOneB,
    ZeroBubbleH1,
    ZeroBubbleV,
)
from moefold.schedule.simulate import StageCosts, simulate
from moefold.spec.decoder import with_multi_token
from moefold.spec.layer import Matmul, Operation, Shape, Weight
from moefold.spec.tuning import freeze
from tests.planning import laid, relaid
from tests.traffic.data import data
from tests.traffic.experts import expert
from tests.traffic.step import tensor, traffic

STORED = json.loads(
    Path(__file__).parents[2].joinpath("moefold/planner/time_constants.json").read_text("utf-8")
)
QWEN3_30B = Decoder(
    vocab=151936,
    hidden=2048,
    stacks=(
        Stack(
            repeat=48,
            blocks=(
                Block(
                    attention=Gqa(heads=32, kv_heads=4, head_dim=128, qk_norm="head"),
                    ffn=Moe(width=768, router=Router(experts=128, top_k=8)),
                ),
            ),
        ),
    ),
)
ATTENTION = Mla(heads=128, q_rank=1536)
DEEPSEEK = Decoder(
    vocab=129280,
    hidden=7168,
    stacks=(
        Stack(repeat=3, blocks=(Block(attention=ATTENTION, ffn=Dense(width=18432)),)),
        Stack(
            repeat=58,
            blocks=(
                Block(
                    attention=ATTENTION,
                    ffn=Moe(
                        width=2048,
                        router=Router(experts=256, top_k=8),
                        shared=Shared(width=2048),
                    ),
                ),
            ),
        ),
    ),
)


def case(**changes: object) -> Case:
    """Return a case of Qwen3-30B-A3B on 16 H100."""
    base = Case(
        decoder=QWEN3_30B,
        seq=4096,
        batch=256,
        micro_batch=1,
        cluster=parse_cluster("h100x16"),
        layout=laid(sizes="ep8", dispatch="hybrid_ep"),
        load=1.0,
        software=Software(stack="megatron", release="26.04", cuda_graphs="partial"),
    )
    return relaid(base, **changes)


@pytest.mark.parametrize(
    ("decoder", "multi_token", "gflop"),
    [(QWEN3_30B, 0, 23.01), (DEEPSEEK, 0, 249.81), (DEEPSEEK, 1, 260.0)],
)
def test_flops_are_those_that_sources_count(decoder, multi_token, gflop):
    layers = len(decoder.blocks)
    one = case(
        decoder=with_multi_token(decoder, [MultiToken()] * multi_token),
        stages=Stages.balanced(1, 1, layers, multi_token),
        cluster=parse_cluster("h100x64"),
        sizes=Sizes(ep=64),
    )
    assert model_flops(one) / (one.batch * one.seq) / 1e9 == pytest.approx(gflop, rel=0.003)


def test_parts_add_up_and_name_what_binds():
    took = estimate_time(case())
    assert sum(took.parts.values()) == pytest.approx(took.seconds)
    assert min(took.parts.values()) >= 0
    assert took.tflops_per_gpu == pytest.approx(model_flops(case()) / took.seconds / 16 / 1e12)
    assert took.bottleneck in ("compute", "memory bandwidth", "communication", "host", "pipeline")
    assert len(took.ranks) == 1


@pytest.mark.parametrize("schedule", [*SCHEDULES, GPipe()], ids=lambda s: s.kind)
def test_equal_stages_take_as_long_as_in_tables(schedule):
    tried = 0
    for p, v, m in product((2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4, 7, 8, 12, 16, 17, 24, 41)):
        if any(schedule.violations(p, v, m)):
            continue
        each = StageCosts(1 / 3 / v, 1 / 3 / v, 1 / 3 / v)
        exact = simulate(schedule_table(schedule, p, v, m), each).makespan
        assert pipeline_seconds(schedule, m, v, [1.0] * p) == pytest.approx(exact), (p, v, m)
        tried += 1
    assert tried > 10


@pytest.mark.parametrize(
    "schedule", [OneFOneB(), GPipe(), Interleaved(), Merged(), ZeroBubbleH1()], ids=lambda s: s.kind
)
def test_uneven_pipelines_take_nearly_as_long_as_their_tables(schedule):
    chance = random.Random(7)
    for p, v, m in ((2, 1, 8), (4, 1, 16), (4, 1, 64)):
        uneven = [chance.uniform(0.9, 1.1) for _ in range(p * v)]
        costs = [StageCosts(one / 3, one / 3, one / 3) for one in uneven]
        exact = simulate(schedule_table(schedule, p, v, m), costs).makespan
        assert pipeline_seconds(schedule, m, v, uneven) == pytest.approx(exact, rel=0.05), (p, v, m)


def test_a_schedule_without_a_closed_form_is_simulated():
    class Outside(ZeroBubbleV):
        """Of a kind that the planner does not know."""

    outside, known = Outside(), ZeroBubbleV()
    for m in (8, 9, 48):
        assert (
            idle_micro_batches(outside, 4, 2, m)
            == pytest.approx(idle_micro_batches(known, 4, 2, m))
            != 0
        )


TABLE_7 = {
    "gb200": ((735, 391), (743, 578), (769, 612), (930, 675)),
    "h100": ((1265, 661), (5774, 1485), (8059, 3064), (9164, 4626)),
}
"""Dispatch in microseconds by all-to-all and by HybridEP, over 8, 16, 32 and 64 ranks
(arXiv 2603.07685, table 7: hidden 7168, 4096 rows, 256 experts, 8 of them per row)."""


@pytest.mark.parametrize("device", TABLE_7)
def test_exchanges_take_as_long_as_printed(device):
    rows = DispatchRows(4096, 14336, 8, 4, 8)
    where = parse_cluster(f"{device}x64")
    rates = constants().rates(where.device.name, "megatron", "26.04")
    for ranks, printed in zip((8, 16, 32, 64), TABLE_7[device], strict=True):
        group = strided_reach(where, ranks, 1)
        for dispatcher, micros in zip(("alltoall", "hybrid_ep"), printed, strict=True):
            seconds = exchange_seconds(rows, dispatcher, group, where, rates, 1.0)
            assert seconds * 1e6 == pytest.approx(micros, rel=0.2), (ranks, dispatcher)


@pytest.mark.parametrize(
    ("device", "peak", "length", "forward", "backward"),
    [
        ("H100", 989e12, 4096, 553, 422),
        ("H100", 989e12, 16384, 638, 523),
        ("GB200", 2500e12, 4096, 1324, 1083),
        ("GB200", 2500e12, 16384, 1698, 1298),
    ],
)
def test_attention_is_as_fast_as_printed(device, peak, length, forward, backward):
    rates = constants().rates(device, "megatron", "26.04")
    for back, printed in ((False, forward), (True, backward)):
        seconds = attention_seconds(1e15, length, 128, rates, peak, back)
        assert 1e3 / seconds == pytest.approx(printed, rel=0.02)


def test_products_lose_at_small_dims_and_never_beat_the_peak():
    rates = constants().rates("H100", "megatron", "26.04")
    large, small = Product(8192, 8192, 8192), Product(64, 8192, 8192)
    rate = [one.flops / product_seconds(one, rates, 989e12, False) for one in (large, small)]
    assert rate[1] < 0.8 * rate[0] < rate[0] < 989e12


def test_groups_that_leave_their_domain_are_slower():
    where = parse_cluster("h100x64")
    rates = constants().rates("H100", "megatron", "26.04")
    inside = ring_seconds(1e9, strided_reach(where, 8, 1), where, rates.nic_gather)
    across = ring_seconds(1e9, strided_reach(where, 8, 8), where, rates.nic_gather)
    assert across > 4 * inside
    assert strided_reach(where, 8, 8).domains == 8
    assert strided_reach(parse_cluster("gb200x128"), 64, 1).domains == 1


@pytest.mark.parametrize(("where", "size"), [("h100x6", 6), ("gb200x72", 72), ("gb200x144", 72)])
def test_a_full_node_or_rack_is_one_domain(where: str, size: int) -> None:
    assert strided_reach(parse_cluster(where), size, 1).domains == 1


def test_groups_that_straddle_nodes_are_no_faster_than_those() -> None:
    """Of groups of six, some have four on one node and two on the next."""
    assert strided_reach(parse_cluster("h100x24"), 6, 1) == GroupReach(6, 2)
    assert strided_reach(parse_cluster("h100x24"), 12, 1).domains == 2
    # Two hops have nodes of equal size: five of four.
    assert even_domains(parse_cluster("h100x40"), 20, 1) == 5


@pytest.mark.parametrize("dispatcher", ["alltoall", "alltoall_once"])
def test_exchanges_carry_the_bytes_that_traffic_counts(dispatcher):
    one = case(dispatch=dispatcher)
    rows = DispatchRows(4096, 2048 * 2, 8)
    free = replace(constants().rates("H100", "megatron", "26.04"), link=1.0, link_fused=1.0)
    group = strided_reach(one.cluster, 8, 1)
    seconds = exchange_seconds(rows, dispatcher, group, one.cluster, free, 1.0) - LINK_LATENCY
    sent = seconds * one.cluster.device.link_bandwidth
    counted = [call for call in expert(one, 0) if call.group == "ep"]
    # Dispatch and combine, forward and backward; counts and probabilities are a few bytes a row.
    passes = 4 * 48 * one.num_micro_batches
    assert sum(call.total for call in counted) / passes == pytest.approx(sent, rel=0.03)


@pytest.mark.parametrize("dispatcher", ["padded", "spread"])
def test_stated_room_is_sent_filled_or_not(dispatcher):
    """Whatever the load; between eight ranks on links that nothing is lost on."""
    one = case(dispatch=dispatcher, max_rows=20_000, software=Software())
    sent = sum(call.total for call in expert(one, 0) if call.part in ("dispatch", "combine"))
    twice = relaid(one, dispatch=dispatcher, max_rows=40_000)
    more = estimate_time(twice).parts["dispatch"] / estimate_time(one).parts["dispatch"]
    again = sum(call.total for call in expert(twice, 0) if call.part in ("dispatch", "combine"))
    assert more == pytest.approx(again / sent, rel=0.02)
    assert (
        estimate_time(replace(one, load=1.5)).parts["dispatch"]
        == estimate_time(one).parts["dispatch"]
    )
    plain = estimate_time(case(dispatch="alltoall", software=Software())).parts["dispatch"]
    counted = sum(c.total for c in expert(case(dispatch="alltoall", software=Software()), 0))
    assert estimate_time(one).parts["dispatch"] / plain == pytest.approx(sent / counted, rel=0.05)


@pytest.mark.parametrize("again", [(), ("gather",), ("shared",), ("block",)])
@pytest.mark.parametrize("decoder", [QWEN3_30B, DEEPSEEK], ids=["gqa", "mla"])
def test_tensor_ranks_carry_the_bytes_that_traffic_counts(decoder, again):
    """Of latents as wide as they are, and of shared experts; no more than is sent."""
    one = case(
        decoder=decoder, sizes=Sizes(tp=4), recompute=frozenset(again), seq=32768,
        software=Software(),
    )  # fmt: skip
    calls = [call for call in tensor(one, 0) if call.part in ("attention", "ffn", "shared")]
    latency = LINK_LATENCY * sum(call.count for call in calls)
    carried = (
        (estimate_time(one).parts["tp"] - latency)
        * one.cluster.device.link_bandwidth
        * RING_EFFICIENCY
    )
    assert carried == pytest.approx(sum(call.total for call in calls), rel=0.01)


@pytest.mark.parametrize("part", ["tp", "cp", "dispatch"])
def test_rows_of_an_fp32_run_have_four_bytes_per_element(part):
    """As traffic counts them; of long sequences, beside which latencies are short."""
    axis = "ep" if part == "dispatch" else part
    sizes, rows = Sizes(**{axis: 4}), ("attention", "ffn", "dispatch", "combine")
    narrow = case(
        sizes=sizes, seq=2**18, dispatch="alltoall", context=Gathered(), software=Software()
    )
    wide = replace(narrow, number_formats=NumberFormats("fp32", weight_bytes=0))
    took, sent = list[float](), list[float]()
    for one in (narrow, wide):
        calls = [call for call in traffic(one, 0) if call.group == axis and call.part in rows]
        took.append(estimate_time(one).parts[part])
        sent.append(sum(call.total for call in calls))
    assert took[1] / took[0] == pytest.approx(sent[1] / sent[0], rel=0.01)
    assert sent[1] / sent[0] > 1.9


def test_an_fp32_run_offloads_four_bytes_per_element():
    where = parse_cluster("h100x16")
    slow = replace(where, device=replace(where.device, host_bandwidth=1e6))
    narrow = case(
        cluster=slow,
        offload=frozenset({"experts"}),
        software=Software(),
    )
    wide = replace(narrow, number_formats=NumberFormats("fp32", weight_bytes=0))
    took, twice = (estimate_time(one).parts["offload"] for one in (narrow, wide))
    assert twice == pytest.approx(2 * took, rel=0.01)


def test_a_frozen_head_has_no_product_for_its_gradient():
    frozen = QWEN3_30B.model_copy(update={"frozen": ("head.weight",)})
    free, fixed = (estimate_time(case(decoder=one)).parts["head"] for one in (QWEN3_30B, frozen))
    assert fixed == pytest.approx(free * 2 / 3)


@pytest.mark.parametrize("again", [(), ("block",)])
def test_layers_below_the_first_trained_parameter_have_no_backward(again):
    """Half of all layers: without the head, half of the time of backward is left."""
    stack = Stack(repeat=4, blocks=QWEN3_30B.blocks[:1])
    few = QWEN3_30B.model_copy(update={"stacks": (stack,), "vocab": 8})
    passed = freeze(few, ("embed.weight", "layers.[01].*"))
    upper = freeze(few, ("layers.[01].*",))  # the table below them is trained
    (whole, part, reached) = (
        estimate_time(case(decoder=one, recompute=frozenset(again))) for one in (few, passed, upper)
    )
    (forward, backward), (same, left), (_, more) = (
        map(sum, zip(*one.ranks, strict=True)) for one in (whole, part, reached)
    )
    assert same == pytest.approx(forward) and left == pytest.approx(backward / 2, rel=0.02)
    assert left < more < backward
    assert [count(one).flops([1]) for one in (few, passed)] == [
        pytest.approx(count(few).flops([1]) * share, rel=0.01) for share in (1, 2 / 3)
    ]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("pp", "again"), [(1, ()), (2, ()), (2, ("block",))])
def test_copies_of_weights_take_the_bytes_that_traffic_counts(zero, pp, again):
    """Under ZeRO 2 gradients go with every micro-batch, under ZeRO 3 weights come twice too."""
    one = case(
        cluster=parse_cluster("h100x8"),
        sizes=Sizes(pp=pp, ep=2),
        stages=Stages.balanced(pp, 1, 48),
        batch=64,
        zero=zero,
        recompute=frozenset(again),
        software=Software(),
    )
    took, device = estimate_time(one), one.cluster.device
    rank = max(range(pp), key=lambda at: sum(took.ranks[at])) * (8 // pp)
    kinds = "dp_cp", "edp"
    sent = sum(call.total for call in data(one, rank) if call.group in kinds)
    carried = (took.parts["dp"] + took.hidden["dp"]) * device.link_bandwidth * RING_EFFICIENCY
    assert carried == pytest.approx(sent, rel=0.03)


def ours(zero: int, pp: int = 2, **changes: object) -> Case:
    """Return a case of Moefold on 16 H100 with a stage of ZeRO."""
    return case(sizes=Sizes(pp=pp, ep=2), zero=zero, software=Software(), **changes)


def test_what_copies_exchange_hides_where_passes_run_beside_it():
    """Sums of all at the end of a step hide nowhere, nor those of products that were put off."""
    hidden = {zero: estimate_time(ours(zero)).hidden["dp"] for zero in range(4)}
    assert hidden[0] == 0 < hidden[1] < hidden[2] < hidden[3]
    off = estimate_time(ours(2, schedule=ZeroBubbleH1()))
    assert off.hidden["dp"] < hidden[2] / 5 and off.parts["dp"] > estimate_time(ours(2)).parts["dp"]
    shown = estimate_time(ours(3)).parts["dp"]
    deep = relaid(ours(3), sizes=Sizes(pp=2, vpp=24, ep=2))
    # Of a chunk of one layer nothing computes while its weights come.
    assert estimate_time(deep).parts["dp"] > 2 * shown > 0


def test_losses_on_further_tokens_read_one_head():
    one = case()
    setting = build_setting(one.cluster, one.software, "bf16", frozenset())
    made = PassTime(QWEN3_30B, case_shape(one), setting, LayerPolicy.of(one))
    alone, further = (
        made.layers_time(StageContents((), more, False, True)).weights for more in (0, 1)
    )
    assert further - alone == 2 * QWEN3_30B.hidden**2  # what joins its two inputs


def test_state_that_fewer_ranks_share_takes_longer():
    for rule in (AdamW(lr=1e-3), Muon(lr=1e-3)):
        numbers = NumberFormats(optimizer=rule)
        all_, two = (
            estimate_time(ours(1, zero_ranks=ranks, number_formats=numbers)) for ranks in (None, 2)
        )
        # Of 8 copies of dense weights, and of 4 of experts, two share one.
        assert two.parts["optimizer"] > 1.3 * all_.parts["optimizer"]
        assert two.parts["dp"] > 0


def test_other_stacks_too_sum_after_each_pass_where_gradients_are_shared_out():
    once, each = (estimate_time(case(zero=zero)).parts["dp"] for zero in (1, 2))
    assert each > 4 * once


def test_copies_are_further_apart_where_pipelines_lie_between():
    base = relaid(ours(1), sizes=Sizes(tp=2, pp=4, ep=2))
    near, far = (estimate_time(relaid(base, order=order)) for order in ORDERS)
    took = [one.parts["dp"] + one.hidden["dp"] for one in (near, far)]
    assert took[1] > 2 * took[0]


def test_each_policy_moves_the_step_the_way_it_should():
    base = estimate_time(case()).seconds
    slower = {
        "load": case(load=1.5),
        "recompute": case(recompute=frozenset(("block",))),
        "no graphs": case(software=Software("megatron", "26.04", "none")),
        "optimizer on the host": case(host_share=1.0),
        "all-to-all": case(dispatch="alltoall"),
        "pages": case(offload=Offload(pages=OffloadToPages())),
        "pages on the host": case(offload=Offload(pages=OffloadToPages(spill=1.0))),
    }
    for name, other in slower.items():
        assert estimate_time(other).seconds > base, name
    # Rows of 48 layers and 16 micro-batches: read and written, there and back.
    paged, plain = (estimate_time(one).parts["memory"] for one in (slower["pages"], case()))
    assert estimate_time(slower["pages on the host"]).parts["offload"] > 0
    inputs = 2048 + 2 * 768 + 768  # of a row, and what its products have
    least = 4 * 2 * 2048 * 8 * 4096 * 48 * 16 / 3.35e12
    assert least < paged - plain < 2 * least * inputs / 2048
    wider = case(sizes=Sizes(ep=16))
    assert estimate_time(wider).parts["dispatch"] > estimate_time(case()).parts["dispatch"]
    software = Software("megatron", "26.04", "partial", Overlaps(ep=True))
    overlapped = estimate_time(case(sizes=Sizes(ep=16), software=software))
    assert overlapped.seconds < estimate_time(wider).seconds
    assert overlapped.hidden["dispatch"] > 0
    fast = case(software=Software("megatron", "26.04", "none", host_speed=2.0))
    assert estimate_time(fast).seconds < estimate_time(slower["no graphs"]).seconds


def test_narrow_formats_quantise_and_save_time_on_wide_models():
    wide = case(
        decoder=DEEPSEEK,
        stages=Stages.balanced(8, 1, 61),
        cluster=parse_cluster("gb200x256"),
        sizes=Sizes(pp=8, ep=32),
        batch=2048,
    )
    narrow = replace(wide, number_formats=NumberFormats(recipe="mxfp8"))
    assert estimate_time(narrow).parts["quantise"] > 0 == estimate_time(wide).parts["quantise"]
    assert estimate_time(narrow).seconds < estimate_time(wide).seconds


def test_what_was_not_measured_is_less_certain():
    known = estimate_time(case()).uncertainty
    other = estimate_time(case(software=Software(stack="torchtitan"))).uncertainty
    strange = case(cluster=parse_cluster("a100x16"), software=Software(stack="torchtitan"))
    assert 0 < known < other < estimate_time(strange).uncertainty


def test_a_release_that_was_not_measured_is_planned_as_the_one_before():
    given = constants()
    assert given.nearest_release("megatron", "26.05") == "26.04"
    assert given.nearest_release("megatron", "27.01") == given.nearest_release("megatron", "")
    assert given.nearest_release("megatron", "unheard") == ""


def test_every_constant_has_a_source_and_none_belongs_to_a_model():
    scopes = ("common", "hopper", "blackwell", "blackwell_ultra", "x86", "grace", "megatron",
              "automodel", "deepseek", "torchtitan", "cdna", "H100", "H800", "B200", "GB200",
              "GB300")  # fmt: skip
    for name, (value, source) in STORED["constants"].items():
        assert value > 0, name
        assert len(source) > 10, name
        assert name.split(".")[0].split(" ")[0] in scopes, name


class GatedTwice(Gqa):
    """An attention from outside with an operation that a mixture has too."""

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield those of attention, and a gate's."""
        yield from super().weights(hidden)
        yield Weight("gate.weight", (hidden, hidden))

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield those of attention, and the gate."""
        yield from super().operations(hidden)
        yield Operation("gate", (Matmul(("gate.weight",)),))


class CoreTwice(Gqa):
    """An attention whose core is described twice."""

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield the last once more."""
        yield from super().operations(hidden)
        yield Operation("core", core=self.core)


def test_operations_of_one_name_in_both_halves_are_added_up() -> None:
    """Those of one half need names of their own."""
    shape = Shape(2048, 4096, seq=4096)
    setting = build_setting(parse_cluster("h100x8"), Software(), "bf16", frozenset())
    more = list[float]()
    for gate in (False, True):
        shared = Shared(width=768, gate=gate)
        ffn = Moe(width=768, router=Router(experts=8, top_k=2), shared=shared)
        blocks = (
            Block.model_construct(attention=kind(heads=32, kv_heads=4, head_dim=64), ffn=ffn)
            for kind in (Gqa, GatedTwice)
        )
        plain, gated = (layer_time(b, shape, setting, LayerPolicy("alltoall")) for b in blocks)
        more.append(gated.device_seconds - plain.device_seconds)
    assert more[0] == pytest.approx(more[1]) and more[0] > 0
    with pytest.raises(ValueError, match="CoreTwice describes two operations named core"):
        sublayer_work(CoreTwice(heads=4, kv_heads=2, head_dim=4), shape)
