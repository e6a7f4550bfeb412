"""The search: against brute force on small spaces, its bounds, and DeepSeek-V3 within seconds."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from plan_search import SAME, TASKS, Searched, recorded, search

from moefold.layers.kinds.gqa import Gqa
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.mesh.legality import size_violations
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Moe, Router
from moefold.parallel.config import Layout
from moefold.planner.case import Case, NumberFormats, Recipe
from moefold.planner.hardware import device_by_name, parse_cluster, with_memory
from moefold.planner.layouts import DEVICE, OptimizerOnHost, make_dispatch, make_layout, unsupported
from moefold.planner.memory import fullest_rank, num_communicators, rank_totals
from moefold.planner.plan import PlannedLayout, run_file_fragment
from moefold.planner.published import published_entries, published_model
from moefold.planner.search import (
    MEMORY_RESERVE,
    Grids,
    PipelineDepth,
    PipelineLayout,
    Search,
    folding_sizes,
)
from moefold.planner.search_change import _single_changes, suggest_changes
from moefold.planner.search_space import (
    Foldings,
    SearchSpace,
    candidate_recipes,
    full_space,
    trainable_space,
)
from moefold.planner.task import (
    TrainingTask,
    published_layouts,
    task_from_model,
    task_from_run,
)
from moefold.planner.time import estimate_time
from moefold.run import load_run
from moefold.schedule.config import Interleaved, Merged, OneFOneB
from moefold.spec.decoder import model_needs, model_weights
from tests.planning import laid

GB = 1e9
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
BLOCK = Block(
    attention=Gqa(heads=8, kv_heads=4, head_dim=64),
    ffn=Moe(width=512, router=Router(experts=8, top_k=2)),
)
SMALL = Decoder(vocab=4096, hidden=512, stacks=(Stack(repeat=4, blocks=(BLOCK,)),))
EXPERTS = frozenset(("experts", "ffn", "shared"))
SPACE = SearchSpace(
    recipes=("bf16",),
    schedules=(OneFOneB(), Interleaved(), Merged()),
    dispatchers=("alltoall", "deep_ep"),
    recomputes=(frozenset(), EXPERTS, frozenset(("block",))),
    micro_batches=(1, 2),
)


def small(memory_gb: float = 80.0) -> TrainingTask:
    where = parse_cluster("h100x4")
    where = replace(where, device=with_memory(where.device, int(memory_gb * GB)))
    return TrainingTask("small", SMALL, 2048, 16, where, load=1.0)


Asked = tuple[Layout, int]
"""A layout and its micro-batch."""


def every(task: TrainingTask, space: SearchSpace) -> Iterator[Asked]:
    """Yield every layout of a space with balanced stages."""
    foldings = Foldings.for_task(task)
    for tp, cp in foldings.attention_grids:
        for ep, etp in foldings.expert_grids(tp, cp):
            for pp in foldings.pipeline_sizes(tp, cp, ep, etp):
                for vpp in range(1, 1 + (1 if pp == 1 else foldings.layers // pp)):
                    sizes = Sizes(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)
                    yield from of_sizes(task, space, sizes)


def of_sizes(task: TrainingTask, space: SearchSpace, sizes: Sizes) -> Iterator[Asked]:
    dp = task.cluster.devices // (sizes.tp * sizes.cp * sizes.pp)
    for size in space.micro_batches:
        if task.batch % (dp * size):
            continue
        m = task.batch // (dp * size)
        for schedule in space.schedules:
            if sizes.pp > 1 and any(schedule.violations(sizes.pp, sizes.vpp, m)):
                continue
            if isinstance(schedule, Interleaved) and sizes.vpp == 1:
                continue
            for dispatch in space.dispatchers if sizes.ep * sizes.etp > 1 else ("local",):
                for keeping in keepings(space, sizes.pp):
                    stated = {"schedule": schedule, "dispatch": make_dispatch(dispatch)}
                    yield make_layout(sizes, **stated, **keeping), size


def keepings(space: SearchSpace, pp: int) -> Iterator[dict[str, Any]]:
    """Yield everything that can be kept, as :func:`make_layout` takes it."""
    for zero, state in space.zero_and_states(pp):
        for again, away in space.recompute_offload_pairs:
            yield {"zero": zero, "recompute": again, "offload": away, "state": state}


def room(task: TrainingTask) -> float:
    return task.cluster.device.memory_bytes * (1 - MEMORY_RESERVE)


@cache
def priced(memory_gb: float) -> tuple[tuple[float, float, Case], ...]:
    """Return time, bytes and case of everything small, by time."""
    task, found = small(memory_gb), []
    for asked in every(task, SPACE):
        case = task.case(*asked)
        found.append((estimate_time(case).seconds, max(rank_totals(case)), case))
    return tuple(sorted(found, key=lambda item: item[0]))


# Memory for all that is fast, for little of it, and for nothing.
@pytest.mark.parametrize("memory_gb", [80.0, 1.4, 1.25, 1.0])
def test_no_layout_is_faster(memory_gb: float) -> None:
    task = small(memory_gb)
    fitting = [item for item in priced(80.0) if item[1] <= room(task)]
    found = Search(task).best(SPACE, 1)
    if not fitting:
        # Stages by time may need less than balanced ones: whatever is found must really fit.
        assert all(fullest_rank(one.case).total <= room(task) for one in found)
        return
    assert found, f"{fitting[0][2].layout} fits, and nothing was found"
    assert found[0].seconds <= fitting[0][0] * (1 + 1e-9), fitting[0][2].layout


def test_small_memory_really_binds() -> None:
    fits = [sum(item[1] <= room(small(gb)) for item in priced(80.0)) for gb in (80.0, 1.4, 1.25)]
    assert fits[0] > fits[1] > fits[2] > 0


def test_what_is_found_is_legal_fits_and_takes_what_is_said() -> None:
    """Where memory binds; without that what is found is compared with all layouts above."""
    task = small(1.4)
    asked = model_needs(task.decoder, task.seq)
    # Other micro-batches are many times as many layouts, and follow the same rules.
    found = Search(task).best(replace(full_space(task), micro_batches=(2,)), 4)
    assert len({folding_sizes(one.case.sizes) for one in found}) == len(found) > 1
    for one in found:
        case = one.case
        assert case == task.case(case.layout, case.micro_batch, case.number_formats.recipe)
        assert not size_violations(case.sizes, asked, case.world, stages=case.stages.text)
        assert estimate_time(case).seconds == pytest.approx(one.seconds)
        assert fullest_rank(case).total == pytest.approx(one.peak_bytes)
        assert one.peak_bytes <= room(task)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)


def test_today_is_what_training_executes() -> None:
    task = small()
    found = Search(task).best(trainable_space(task), 3)
    assert found and all(not [*unsupported(one.case.layout)] for one in found)


def test_bounds_are_never_above() -> None:
    """Of grids, of depths and of schedules; and no layout is dropped that fits a room."""
    search = Search(small())
    grids = {one: bound for bound, _, one in search.grids(SPACE)}
    compared = 0
    for seconds, needed, case in random.Random(5).sample(priced(80.0), 120):
        sizes, zero = case.sizes, case.layout.zero
        one = Grids("bf16", case.micro_batch, sizes.tp, sizes.cp, sizes.ep, sizes.etp)
        ((away, _), _) = case.offload.tiers
        kept: Any = case.recompute, away
        m = search.num_micro_batches(one, sizes.pp)
        assert m and grids[one] <= seconds * (1 + 1e-9)
        depth = PipelineDepth(one, sizes.pp, m, zero, DEVICE, (kept,))
        assert search.lower_bound(SPACE, depth) <= seconds * (1 + 1e-9)
        for bound, _, tried in search.schedules(SPACE, depth, needed):
            if isinstance(tried, PipelineLayout) and search._make_layout(tried) == case.layout:
                compared += 1
                assert bound <= seconds * (1 + 1e-9)
        alike = (sizes.pp, zero)
        fitting = [d for _, _, d in search.depths(SPACE, one, needed) if (d.pp, d.zero) == alike]
        assert fitting, "what fits is not dropped"
    assert compared > 60


def test_the_bound_of_grids_knows_of_rows_that_are_sent_as_codes() -> None:
    """It counted them in 16 bits, and so could drop the fastest layout of all. A model that does
    little but exchange rows between machines.
    """
    experts = Moe(width=128, router=Router(experts=16, top_k=8))
    stack = Stack(repeat=32, blocks=(BLOCK.model_copy(update={"ffn": experts}),))
    numbers = NumberFormats("fp8_block", recipe_options=frozenset({"rows"}))
    task = replace(
        small(),
        decoder=Decoder(vocab=4096, hidden=2048, stacks=(stack,)),
        seq=8192,
        batch=256,
        cluster=replace(small().cluster, per_node=1, domain=1),
        number_formats=numbers,
    )
    schedules, policies = (OneFOneB(),), (frozenset(),)
    space = replace(SPACE, recipes=("fp8_block",), schedules=schedules, recomputes=policies)
    grids, shares = {one: bound for bound, _, one in Search(task).grids(space)}, list[float]()
    for asked in every(task, space):
        case = task.case(*asked, "fp8_block")
        sizes = case.sizes
        one = Grids("fp8_block", case.micro_batch, sizes.tp, sizes.cp, sizes.ep, sizes.etp)
        shares.append(grids[one] / estimate_time(case).seconds)
    assert 0.99 < max(shares) <= 1 + 1e-9, "the bound is tight where rows are all"


QUICK = ("laptop", "a100x4", "h100x16", "gb200x8")
"""Clusters whose searches take seconds at most; ``bench/plan_search.py`` runs all."""
LONGEST = ("Qwen3-30B-A3B on h100x16", "Moonlight-16B-A3B on h100x16")
"""Of those the searches that take as long as all others."""


def in_turn(known: Searched) -> Any:
    marks = [pytest.mark.matrix] if known.name in LONGEST else []
    return pytest.param(known, marks=marks, id=known.name)


@pytest.mark.parametrize("known", [in_turn(one) for one in recorded() if one.cluster in QUICK])
def test_searches_find_what_is_on_record(known: Searched) -> None:
    found, _ = search(known)
    assert found.step_s <= known.step_s * SAME, f"{known.layout}: {known.policies}"


def test_the_record_is_of_all_tasks() -> None:
    kept = [(one.name, one.batch, one.memory_gb) for one in recorded()]
    assert kept == [(one.name, one.batch, one.memory_gb) for one in TASKS] and len(kept) == 20


def test_groups_of_a_rank_are_counted_without_making_them() -> None:
    chance = random.Random(3)
    for _ in range(300):
        sizes = Sizes(**{axis: chance.choice((1, 2, 3, 4)) for axis in ("tp", "cp", "pp", "ep")})
        folding = Folding(sizes, sizes.smallest_world * chance.choice((1, 2, 3)))
        groups = (folding.group(kind, 0) for kind in set(folding.first_equal_kinds().values()))
        several = sum(len(ranks) > 1 for ranks in groups)
        assert num_communicators(folding.attention, folding.experts) == several


@pytest.mark.slow
def test_deepseek_v3_on_1024_is_quick_and_beats_the_published_layout() -> None:
    task = task_from_model(
        published_model("DeepSeek-V3"), parse_cluster("h100x1024"), 8192, load=1.0
    )
    rows = published_layouts("DeepSeek-V3")
    (row,) = (row for row in rows if (row.device, row.devices) == ("H100", 1024))
    case = task.case(row.layout, row.micro_batch, row.recipe)
    published = estimate_time(case).seconds
    space = replace(full_space(task), recipes=(row.recipe,))
    start = time.process_time()
    (found,) = Search(task).best(space, 1)
    spent = time.process_time() - start
    assert found.seconds <= published
    assert fullest_rank(found.case).total <= room(task)
    assert not size_violations(found.case.sizes, model_needs(task.decoder, task.seq), 1024)
    # A generous margin over what it takes: cores are shared, and a blow-up takes minutes.
    assert spent < 30


def test_every_published_model_is_described() -> None:
    for name in published_entries():
        found, entry = published_model(name), published_entries()[name]
        total = sum(weight.elements for weight in model_weights(found.decoder)) / 1e9
        if entry.get("total_params_b"):
            assert total == pytest.approx(entry["total_params_b"], rel=0.06), name


def test_a_run_is_a_task() -> None:
    run = load_run("olmoe_1b_7b")
    task, given = task_from_run(run, parse_cluster("h100x8"), batch=512)
    case = task.case(given)
    assert (case.batch, case.seq, case.micro_batch) == (512, run.data.seq, run.train.micro_batch)
    assert case.decoder == run.decoder and case.software.stack == "moefold"
    assert case.layout is run.layout and case.recompute == frozenset()


@pytest.mark.parametrize("asked", ["fp8_block", "bf16", "fp32", "nvfp4"])
def test_the_format_that_a_run_asks_for_is_searched(asked: Recipe) -> None:
    """On devices whose own narrow formats are others too."""
    for name in ("a100", "h100", "b200"):
        found = candidate_recipes(device_by_name(name), asked)
        assert asked in found and "bf16" in found and len({*found}) == len(found)


def test_changes_help() -> None:
    task = small()
    given = task.case(make_layout(Sizes(tp=4), recompute=frozenset(("block",))))
    found = suggest_changes(task, given)
    seconds = estimate_time(given).seconds
    assert found and all(one.fits and one.saved_share > 0 for one in found)
    for one in found:
        took = estimate_time(one.case).seconds
        assert one.saved_share == pytest.approx(1 - took / seconds)
    tight = small(1.2)
    plain = tight.case(Layout())
    assert fullest_rank(plain).total > tight.cluster.device.memory_bytes
    assert all(one.saved_bytes > 0 for one in suggest_changes(tight, plain))


def with_graphs(task: TrainingTask, case: Case) -> dict[str, Case]:
    """Return the single changes to CUDA graphs."""
    changed = (one for _, one in _single_changes(task, case) if one.layout.graphs != "none")
    return {one.layout.graphs: task.case(*one) for one in changed}


def test_graphs_are_a_change_where_a_run_file_may_ask_for_them() -> None:
    """Fewer launches take less time; and what is proposed is legal."""
    task, model = small(), model_needs(small().decoder, small().seq)
    tried = (
        (Sizes(ep=2), "alltoall", None, {"partial"}),
        (Sizes(ep=2), "padded", 1 << 20, {"partial", "step"}),
        (Sizes(pp=2, ep=2), "padded", 1 << 20, {"partial", "step"}),
        (Sizes(tp=2), "local", None, {"partial", "step"}),
    )
    for sizes, dispatch, room, legal in tried:
        given = task.case(laid(sizes=sizes, dispatch=dispatch, max_rows=room))
        others = with_graphs(task, given)
        assert others.keys() == legal
        for graphs, one in others.items():
            said = run_file_fragment(PlannedLayout(one))["layout"]
            assert said["graphs"] == graphs
            assert not list(Layout.model_validate(said).violations(model))
            faster = estimate_time(given).seconds - estimate_time(one).seconds
            assert faster > 0
    away = task.case(make_layout(Sizes(tp=2), state=OptimizerOnHost()))
    assert not with_graphs(task, away)
    pages = {"pages": {"page": 64, "spill": 0.5}}
    fixed = {"sizes": "ep2", "dispatch": {"kind": "padded", "max_rows": 1 << 20}}
    spilled = task.case(Layout.model_validate({**fixed, "offload": pages}))
    assert not with_graphs(task, spilled), "rows that leave the device are not captured"


@pytest.mark.parametrize(
    "dispatch", [{"kind": "two_level", "node": 2}, {"kind": "nccl_ep", "max_rows": 1 << 20}]
)
def test_changes_to_dispatchers_with_values_of_their_own(dispatch: dict[str, Any]) -> None:
    """Such a layout had no suggestions: its dispatcher was made anew without them."""
    task = small()
    given = task.case(Layout.model_validate({"sizes": "ep2", "dispatch": dispatch}))
    assert with_graphs(task, given).keys() == {"partial"}
    assert suggest_changes(task, given)


FITTING = (
    ("one_gpu_24gb", "a100x1", 24.0),
    ("one_gpu_80gb", "h100x1", None),
    ("eight_gpus_80gb", "h100x8", None),
    ("deepseek_v3_2048", "h800x2048", None),
)


@pytest.mark.parametrize(("name", "devices", "memory_gb"), FITTING)
def test_recipes_fit_as_the_page_says(name: str, devices: str, memory_gb: float | None) -> None:
    where = parse_cluster(devices)
    if memory_gb is not None:
        where = replace(where, device=with_memory(where.device, int(memory_gb * GB)))
    task, layout = task_from_run(load_run(name), where)
    free = where.device.memory_bytes - max(rank_totals(task.case(layout)))
    assert free > 0.04 * where.device.memory_bytes
    (row,) = (line for line in PAGE.read_text("utf-8").splitlines() if f"`{name}`" in line)
    assert f"| {free / GB:.1f} GB |" in row, "run bench/plan_recipes.py"
