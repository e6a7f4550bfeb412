"""Planned memory against Megatron's own count, measured peaks, and runs that did not fit."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from memory_ablation import savings

from moefold.layers.config import Offload, OffloadToHost
from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.mesh.config import EVEN, Sizes
from moefold.model.config import Block, Decoder, MultiToken, Stack
from moefold.moe.config import Moe, Router, Shared
from moefold.planner.case import Case, NumberFormats, Software
from moefold.planner.hardware import parse_cluster
from moefold.planner.memory import (
    StageMemory,
    estimate_memory,
    fullest_rank,
    memory_after_each,
    rank_totals,
    stage_bytes,
)
from moefold.planner.memory_saved import saved_tensors_of
from moefold.planner.memory_state import StateBytes, StateSharding, state_estimator
from moefold.planner.search_space import SCHEDULES
from moefold.planner.untrained import AbsentLayer, Mamba2, UngatedMoe, make_block
from moefold.schedule.config import GPipe, Interleaved, Merged, OneFOneB, Schedule
from moefold.spec.decoder import embedding_weight, model_weights, with_multi_token
from moefold.spec.layer import Weight
from tests.planning import laid, relaid
from tests.published import decoder, qk_norms
from tests.schedule_checker import peak_in_flight
from tests.traffic.calls import elements_here, place_weights

FILE = Path(__file__).parents[1] / "data" / "memory_layouts.json"
DATA = json.loads(FILE.read_text("utf-8"))
MEGATRON = Software(stack="megatron")
GIB = 2**30
UNDESCRIBED = "gpt3-175b(dense,megatron)"
"""Two matrices per feed-forward and biases, which no kind of ours has."""
LAYOUTS = [case for case in DATA["cases"] if case["model"] != UNDESCRIBED]


def state(case: Case, weights: list[Weight]) -> StateBytes:
    return StateSharding.of(case).local_state(weights)


def stage_states(case: Case) -> list[StateBytes]:
    """Return the state of a rank of each pipeline rank, from the first to the last."""
    states = state_estimator(case.decoder, StateSharding.of(case))
    return [states.rank_state(held) for held in case.contents.ranks]


def layout(entry: dict[str, Any]) -> Case:
    model, vpp = decoder(entry["model"]), entry["vpp"] or 1
    axes = {axis: entry[axis] for axis in ("tp", "cp", "pp", "ep", "etp")}
    return Case(
        with_multi_token(model, [MultiToken()] * (entry["mtp"] or 0)),
        entry["seq"],
        64 * entry["world"],
        entry["mbs"],
        parse_cluster(f"h100x{entry['world']}"),
        laid(sizes=Sizes(**axes, vpp=vpp), zero=int(entry["dist_opt"]), stages=EVEN),
        1.0,
        software=MEGATRON,
    )


def known_gap(entry: dict[str, Any], case: Case) -> float:
    """Return the bytes by which the estimator is known to be below an average stage of ours."""
    pp, tp = entry["pp"], entry["tp"]
    gap = Weight("norms", (qk_norms(entry["model"]),))
    bytes_ = state(case, [gap]).total / pp
    attention, dp = case.decoder.blocks[0].attention, case.folding.dp
    dense = sum(elements_here(case, w) for w in model_weights(case.decoder) if not w.is_expert)
    dense -= qk_norms(entry["model"])
    # The estimator shares master weights and moments of dense parts over dp alone.
    bytes_ -= entry["dist_opt"] * 12 * dense / pp * (1 / dp - 1 / (dp * entry["cp"]))
    if isinstance(attention, Mla):
        rank = attention.q_rank or 0
        width = rank + attention.kv_rank + attention.rope_dim
        latents = width * case.decoder.hidden + rank + attention.kv_rank
        # Whole on each tensor rank; the estimator cuts them, the norms on latents too.
        down = Weight("down", (latents * len(case.decoder.blocks),))
        bytes_ += state(case, [down]).total / pp * (1 - 1 / tp)
    return bytes_


@pytest.mark.parametrize("entry", LAYOUTS, ids=lambda e: f"{e['model']} {e['world']} pp{e['pp']}")
def test_state_is_that_of_megatron_once_known_gaps_are_taken_out(entry: dict[str, Any]) -> None:
    """To the byte: the average stage without embeddings, plus those of the first."""
    case = layout(entry)
    ends = state(case, [embedding_weight(case.decoder)]).total
    total = sum(stage_states(case), StateBytes()).total
    extra = 0.0
    if entry["mtp"]:
        # Theirs is a whole layer on one stage; ours joins it by a matrix and three norms.
        last = stage_states(case)[-1].total
        without = layout(entry | {"mtp": None})
        added = last - stage_states(without)[-1].total
        hidden = case.decoder.hidden
        joined = state(case, [Weight("join", (2 * hidden + 3, hidden))]).total
        total -= added
        extra = added - joined - ends
    blocks = total - 2 * ends
    first = ends * (2 if entry["pp"] == 1 else 1)
    found = blocks / entry["pp"] + first + extra - known_gap(entry, case)
    assert found == pytest.approx(entry["weight_and_optimizer_bytes"], rel=1e-9)


def mixtral_2b(run: dict[str, Any]) -> Case:
    attention = Gqa(heads=32, kv_heads=4, head_dim=64)
    ffn = Moe(width=5504, router=Router(experts=8, top_k=2))
    stack = Stack(repeat=4, blocks=(Block(attention=attention, ffn=ffn),))
    model = Decoder(vocab=32000, hidden=2048, stacks=(stack,))
    where, mbs = parse_cluster("h100x8"), run["mbs"]
    asked = laid(sizes=Sizes(tp=run["tp"], etp=run["tp"]))
    return Case(model, 4096, 8 * mbs, mbs, where, asked, 1.0, software=MEGATRON)


@pytest.mark.parametrize("run", DATA["measured"]["runs"], ids=str)
def test_measured_peaks_of_eight_gpus(run: dict[str, Any]) -> None:
    """Within 8 %, asked for; within 3 % as it stands. Nothing was fitted to them."""
    assert fullest_rank(mixtral_2b(run)).peak_allocated / GIB == pytest.approx(
        run["total"], rel=0.03
    )


def deepseek(recompute: frozenset[Any] = frozenset()) -> Case:
    model = with_multi_token(decoder("deepseek-v3"), [MultiToken()])
    asked = laid(sizes="pp4 vpp4 ep64", stages="Et*4|(tttt|)*14tmL", recompute=recompute)
    where = parse_cluster("gb200x256")
    return Case(model, 4096, 8192, 1, where, asked, 1.0, software=MEGATRON)


def test_activations_of_deepseek_v3_are_those_of_the_paper() -> None:
    """The third pipeline rank holds 15 chunks of four mixtures.

    The paper counts the experts' output, which a weight before it spares, and shows it apart.
    """
    want = DATA["deepseek_v3"]
    case = deepseek()
    assert peak_in_flight(case.table)[2] == 15
    found = estimate_memory(case)[2].peak_action.activations / GIB
    rows = case.rows * 8 * case.decoder.hidden * 2
    assert 60 * rows / GIB == pytest.approx(want["unpermuted"], rel=0.01)
    assert found + want["unpermuted"] == pytest.approx(want["activations"], rel=0.01)
    less = (
        found - estimate_memory(deepseek(frozenset(("mla_up",))))[2].peak_action.activations / GIB
    )
    assert less == pytest.approx(want["mla_up"], rel=0.02)


def moonlight() -> Decoder:
    attention = Mla(heads=16, q_rank=None)
    dense = Block.model_validate({"attention": attention, "ffn": {"kind": "dense", "width": 11264}})
    router = Router(experts=64, top_k=6, score="sigmoid", selection_bias=True)
    mixture = Moe(width=1408, router=router, shared=Shared(width=2816))
    stacks = (
        Stack(blocks=(dense,)),
        Stack(repeat=26, blocks=(Block(attention=attention, ffn=mixture),)),
    )
    return Decoder(vocab=163840, hidden=2048, stacks=stacks)


def nano() -> Decoder:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    router = Router(experts=128, top_k=6)
    mixture = UngatedMoe(width=1856, router=router, shared=Shared(width=3712))
    mixers = {"M": Mamba2(heads=64, head_dim=64), "*": Gqa(heads=32, kv_heads=2, head_dim=128)}
    blocks = tuple(
        make_block(mixers[letter], mixture if after == "E" else AbsentLayer())
        for letter, after in pairwise(pattern + " ")
        if letter != "E"
    )
    return Decoder(vocab=131072, hidden=2688, stacks=(Stack(blocks=blocks),))


def llama_8x70b() -> Decoder:
    attention = Gqa(heads=64, kv_heads=8, head_dim=128)
    ffn = Moe(width=28672, router=Router(experts=8, top_k=2))
    stack = Stack(repeat=80, blocks=(Block(attention=attention, ffn=ffn),))
    return Decoder(vocab=128256, hidden=8192, stacks=(stack,))


MODELS = {"Moonlight": moonlight, "Nano": nano, "Llama3-8x70B": llama_8x70b}


def published(row: dict[str, Any]) -> Case:
    """Return a row of Megatron-Bridge: gradients in bf16, moments too in two of its recipes."""
    made = MODELS.get(row["model"], lambda: decoder("qwen3-30b-a3b"))
    model = made()
    narrow = 2 if row["model"] in ("Moonlight", "Nano") else 4
    sizes = Sizes(tp=row["tp"], ep=row["ep"], etp=row.get("etp", 1))
    schedule = Merged() if row.get("merged") else OneFOneB()
    batch = row["world"] // row["tp"] * (4 if row.get("merged") else 1)
    again = frozenset(row["recompute"])
    asked = laid(sizes=sizes, schedule=schedule, dispatch="hybrid_ep", recompute=again)
    return Case(
        model, row["seq"], batch, 1, parse_cluster(f"h100x{row['world']}"), asked, 1.0,
        NumberFormats(gradient_bytes=2, moment_bytes=narrow),
        replace(MEGATRON, cuda_graphs=row.get("graphs", "none")),
    )  # fmt: skip


@pytest.mark.parametrize("row", DATA["published"]["rows"], ids=str)
def test_published_rows_fit_or_do_not_as_they_did(row: dict[str, Any]) -> None:
    case = published(row)
    assert (max(rank_totals(case)) <= case.cluster.device.memory_bytes) == row["fits"]
    if row["gb"] is not None:
        assert fullest_rank(case).peak_allocated / 1e9 == pytest.approx(row["gb"], rel=0.08)


def small(pp: int = 4, schedule: Schedule | None = None, m: int = 12, **changes: Any) -> Case:
    attention = Gqa(heads=8, kv_heads=4, head_dim=16)
    ffn = Moe(width=64, router=Router(experts=8, top_k=2))
    stack = Stack(repeat=12, blocks=(Block(attention=attention, ffn=ffn),))
    model = Decoder(vocab=512, hidden=128, stacks=(stack,))
    sizes = changes.pop("sizes", Sizes(pp=pp, ep=2))
    world = changes.pop("world", 8 * pp)
    dp = world // (sizes.pp * sizes.cp * sizes.tp)
    case = Case(
        model, 128, m * dp, 1, parse_cluster(f"h100x{world}"),
        laid(sizes=sizes, schedule=schedule or OneFOneB()), 1.0,
    )  # fmt: skip
    return relaid(case, **changes)


def test_activations_are_chunks_in_flight() -> None:
    case = small()
    parts = saved_tensors_of(case, case.decoder.blocks[0])
    kept = sum(part.bytes for part in parts if part.is_saved_under(frozenset()))
    row = case.rows * case.decoder.hidden * 2
    found = [one.peak_action.activations for one in estimate_memory(case)]
    last = (
        2 * row + case.rows * 4
    )  # the last norm's input and statistic, and the gradient of the loss
    assert found == [4 * 3 * kept, 3 * 3 * kept, 2 * 3 * kept, 3 * kept + last]
    assert fullest_rank(case).rank == 0


def test_a_step_ends_with_nothing_kept() -> None:
    for schedule, vpp in ((OneFOneB(), 1), (Interleaved(), 3), (Merged(), 3), (GPipe(), 1)):
        for one in estimate_memory(small(schedule=schedule, sizes=Sizes(pp=4, vpp=vpp, ep=2))):
            assert one.actions[-1].label == "step" and one.actions[-1].activations == 0
            assert all(moment.activations > 0 for moment in one.actions[:-1])


@pytest.mark.parametrize("m", [1, 4])
def test_once_a_step_has_ended_all_gradients_are_there_and_nothing_else(m: int) -> None:
    """After a single backward too, which is the first and the last."""
    case = small(pp=1, m=m)
    last = list(memory_after_each(case, 0))[-1]
    assert last.gradients == stage_bytes(case, 0).state.gradients
    assert last.activations == last.operands == 0


def test_gpipe_keeps_all_and_merged_passes_share() -> None:
    plain, all_first = parts(small()), parts(small(schedule=GPipe()))
    assert all_first.peak_action.activations == 3 * plain.peak_action.activations
    one = small(pp=1, schedule=OneFOneB())
    alone, beside = fullest_rank(one), fullest_rank(relaid(one, schedule=Merged()))
    ratio = beside.peak_action.activations / alone.peak_action.activations
    assert 1 < ratio < 1.15, "a merged pair holds one layer more, not a second micro-batch"


@pytest.mark.parametrize("schedule", [*SCHEDULES, GPipe()], ids=lambda one: one.kind)
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 2), (4, 1), (3, 2), (4, 3)])
def test_totals_are_those_of_every_moment_of_the_whole_step(schedule, pp: int, vpp: int) -> None:
    """Of a long step only its beginning and what differs in it are looked at: nothing is missed."""
    for m, zero in ((2 * pp, 1), (8 * pp, 2), (8 * pp + 1, 1), (11 * pp, 0)):
        if any(schedule.violations(pp, vpp, m)):
            continue
        keeping = {"zero": zero, "recompute": frozenset(("norms",))}
        case = small(pp, schedule, m, sizes=Sizes(pp=pp, vpp=vpp, ep=2), **keeping)
        whole = [one.total for one in estimate_memory(case)]
        assert list(rank_totals(case)) == pytest.approx(whole)
        assert fullest_rank(case).total == pytest.approx(max(whole))
        if m > 5 * pp and schedule.kind != "gpipe":
            assert len(fullest_rank(case).actions) < len(estimate_memory(case)[0].actions)


def parts(case: Case) -> StageMemory:
    return estimate_memory(case)[0]


def test_each_stage_of_sharding_takes_its_part() -> None:
    """What is shared lies once on all copies: eight of dense parts, four of each expert's."""
    for zero in range(4):
        case = small(zero=zero, software=MEGATRON)
        weights = [
            w for chunk in case.contents.parts[1] for p in chunk for w in place_weights(case, p)
        ]
        copies = [case.folding.edp if w.is_expert else case.folding.dp for w in weights]
        locals_ = [elements_here(case, w) for w in weights]
        shared = sum(local / n for local, n in zip(locals_, copies, strict=True))
        found, whole = estimate_memory(case)[1].state, sum(locals_)
        assert found.weights == pytest.approx(2 * (shared if zero > 2 else whole))
        assert found.gradients == pytest.approx(4 * (shared if zero > 1 else whole))
        assert found.master == pytest.approx(4 * (shared if zero > 0 else whole))
        assert found.moments == pytest.approx(2 * found.master)


def test_passes_have_two_units_whole_that_are_shared_out() -> None:
    """Weights in the compute dtype under ZeRO 3, gradients in fp32 from ZeRO 2 on."""
    cases = [small(zero=zero, software=Software()) for zero in range(4)]
    plain, one, two, three = (
        max(m.temporaries for m in parts(case).actions[:-1]) for case in cases
    )
    weights = place_weights(cases[0], cases[0].contents.parts[0][0][1])
    layer = sum(elements_here(cases[0], weight) for weight in weights)
    assert plain == one
    assert two - one == pytest.approx(2 * 4 * layer, rel=0.02)
    assert three - two == pytest.approx(2 * 2 * layer, rel=0.02)
    state = parts(cases[3]).state
    assert state.weights == 0 and state.gradients == parts(cases[2]).state.gradients


def test_offload_and_recompute_take_away_what_they_name() -> None:
    base = parts(small()).peak_action.activations

    def peak(share: float) -> float:
        """Return the peak of activations, none of them in transfer."""
        host = OffloadToHost(modules=("experts",), share=share)
        away = Offload.model_construct(host=host, in_flight=0)
        return parts(small(offload=away)).peak_action.activations

    gone, two = peak(1.0), peak(2 / 3)
    assert gone < two < base
    assert base - two == pytest.approx((base - gone) * 2 / 3), "two of the rank's three layers"
    block_only = parts(small(recompute=frozenset(("block",)))).peak_action.activations
    assert block_only < gone
    moved = parts(small(host_share=1.0)).state
    assert (moved.master, moved.moments) == (0, 0)


def test_the_fullest_experts_decide() -> None:
    even, uneven = parts(small()), parts(small(load=2.0))
    assert uneven.peak_action.activations > even.peak_action.activations
    assert uneven.state == even.state


def test_parts_add_up_to_the_total() -> None:
    for one in estimate_memory(small()):
        assert sum(one.parts.values()) == pytest.approx(one.total)


def test_what_megatron_takes_off_is_planned_as_reported() -> None:
    """Of DeepSeek-V3's activations (arXiv 2603.07685, section 4.1), what modules made again take
    off in FP8 and all else in BF16: within 5 %.
    """
    found = savings()
    wide = [found.pop(f"less by {name}") for name in ("mla_up", "norms", "moe_act")]
    assert len(found) == 6
    for name, (planned, reported) in found.items():
        assert planned == pytest.approx(reported, rel=0.05), name
    # In BF16 the last is planned at twice what is reported, so that they were taken off in FP8.
    for (planned, reported), times in zip(wide, (1, 0.9, 2), strict=True):
        assert planned == pytest.approx(times * reported, rel=0.05)
