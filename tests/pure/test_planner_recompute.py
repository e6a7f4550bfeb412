"""What is made again where the planner chooses: it fits, and nothing that fits takes less time."""

from collections.abc import Collection, Iterator
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, get_args

import pytest

from moefold.config.base import to_dict
from moefold.config.errors import RunError
from moefold.layers.config import Auto, Full, Offload, OffloadKind, RecomputeKind, Selective
from moefold.mesh.config import Sizes
from moefold.parallel.config import Layout
from moefold.planner.case import Case
from moefold.planner.hardware import parse_cluster
from moefold.planner.layouts import make_layout
from moefold.planner.memory import estimate_memory, fullest_rank
from moefold.planner.published import published_model
from moefold.planner.recompute import _recompute_sets, choose_recompute, resolve_memory_limit
from moefold.planner.task import task_from_model, task_from_run
from moefold.planner.time import estimate_time
from moefold.run import load_run
from moefold.schedule.config import DualPipeV, Interleaved, Merged, OneFOneB, ZeroBubbleH1
from moefold.spec.layer import Module
from tests.planning import relaid

SHAPES = {
    "DeepSeek-V3": ("h100x256", Sizes(pp=16, vpp=2, ep=16, tp=2), Interleaved()),
    "DeepSeek-V3, pairs": ("h100x256", Sizes(pp=16, vpp=2, ep=16), DualPipeV()),
    "Qwen3-30B-A3B": ("h100x16", Sizes(ep=16), OneFOneB()),
    "Qwen3-30B-A3B, tp": ("h100x16", Sizes(tp=2, pp=2, ep=4), OneFOneB()),
    "Qwen3-30B-A3B, pairs": ("h100x16", Sizes(pp=4, ep=4), Merged()),
    "Qwen3-235B-A22B": ("h100x256", Sizes(tp=2, pp=8, ep=32), ZeroBubbleH1()),
    "Qwen3-235B-A22B, cp": ("h100x256", Sizes(cp=2, pp=8, ep=16), OneFOneB()),
    "Mixtral-8x7B": ("h100x64", Sizes(tp=2, pp=4, ep=8), OneFOneB()),
    "Mixtral-8x22B": ("h100x128", Sizes(tp=2, pp=8, ep=8), OneFOneB()),
    "OLMoE-1B-7B": ("h100x8", Sizes(), OneFOneB()),
    "OLMoE-1B-7B, ep": ("h100x8", Sizes(ep=8), OneFOneB()),
    "Kimi-K2": ("h200x256", Sizes(pp=16, ep=16), ZeroBubbleH1()),
}


def case_of(name: str) -> Case:
    """Return a shape's step of several micro-batches, with nothing made again."""
    where, sizes, schedule = SHAPES[name]
    task = task_from_model(
        published_model(name.split(",")[0]), parse_cluster(where), 512, 4096, load=1.2
    )
    return task.case(make_layout(sizes, schedule=schedule), 1, "bf16")


def subsets(kinds: Collection[Module]) -> Iterator[frozenset[Module]]:
    """Yield the subsets of kinds."""
    sizes = range(len(kinds) + 1)
    yield from map(frozenset, chain.from_iterable(combinations(kinds, n) for n in sizes))


SOME = ("Qwen3-30B-A3B, tp", "Mixtral-8x7B", "OLMoE-1B-7B")
"""Those that run each time; all do behind ``make matrix``."""
MARKED = [name if name in SOME else pytest.param(name, marks=pytest.mark.matrix) for name in SHAPES]


FEW_LAYERS = ("DeepSeek-V3, pairs",)
"""Where what leaves comes back so many layers ahead that the device holds no less."""
LEAVING = [
    (name, place)
    if (name, place) == ("OLMoE-1B-7B", "host")
    else pytest.param(name, place, marks=pytest.mark.matrix)
    for name, place in product(SHAPES, ("host", "disk"))
]


def auto(limit: float, place: str = "") -> Auto:
    """Return the policy with a limit in bytes."""
    leaving: dict[str, Any] = {"host": {"host": True}, "disk": {"disk": "scratch"}}.get(place, {})
    return Auto(limit=f"{limit / 1e6:.6f} MB", **leaving)


def leaving(place: str, modules: frozenset[Any]) -> Offload | None:
    """Return the record that offloads modules to a place."""
    names = {"modules": sorted(modules)} | ({"folder": "scratch"} if place == "disk" else {})
    return Offload.model_validate({place: names}) if modules else None


@pytest.mark.parametrize("name", MARKED)
def test_the_choice_fits_and_is_the_best_of_all_sets(name: str) -> None:
    """At four limits between the least that anything needs and what all takes."""
    case = case_of(name)
    all_kinds = (*get_args(RecomputeKind), "block")
    found = {}
    for again in subsets(all_kinds):
        tried = relaid(case, recompute=frozenset(again))
        found[frozenset(again)] = fullest_rank(tried).total, estimate_time(tried).seconds
    least, most = (min(found.values())[0], found[frozenset()][0])
    chosen = set()
    for share in (0.0, 0.5, 0.85, 1.0):
        limit = least + share * (most - least) + 1
        again = choose_recompute(case, auto(limit)).recomputed
        needed, seconds = found[again]
        best = min(took for size, took in found.values() if size <= limit)
        assert needed <= limit and seconds <= 1.01 * best, (share, again)
        chosen.add(again)
    assert len(chosen) > 1 and frozenset() in chosen, "the limits ask for different sets"
    with pytest.raises(ValueError, match=rf"needs {least / 1e9:.4g} GB"):
        choose_recompute(case, auto(least * 0.99))


@pytest.mark.parametrize(("name", "place"), LEAVING)
def test_so_it_is_where_kinds_may_leave(name: str, place: str) -> None:
    """Against all pairs of what is made again and what leaves, norms in one of them alone."""
    case, found = case_of(name), dict[Layout, tuple[float, float]]()
    for again, away in product(_recompute_sets(case), subsets(get_args(OffloadKind))):
        if "norms" in again & away or ("block" in again and away - {"block"}):
            continue
        tried = relaid(case, recompute=again, offload=leaving(place, away))
        found[tried.layout] = fullest_rank(tried).total, estimate_time(tried).seconds
    most = found[case.layout][0]
    least = min(found.values())[0]
    chosen = set()
    for share in (0.0, 0.3, 0.85, 1.0):
        limit = least + share * (most - least) + 1
        chose = choose_recompute(case, auto(limit, place))
        needed, seconds = found[chose]
        best = min(took for size, took in found.values() if size <= limit)
        assert needed <= limit and seconds <= 1.01 * best, (share, chose)
        chosen.add(chose.offload)
    resolve_memory_limit(case, auto(least + 1, place))
    with pytest.raises(ValueError, match=rf"needs {least / 1e9:.4g} GB"):
        resolve_memory_limit(case, auto(least * 0.999, place))
    assert name in FEW_LAYERS or (len(chosen) > 1 and None in chosen), chosen


def test_a_run_without_a_limit_is_not_told_to_raise_it() -> None:
    """A memory limit that is stated is named."""
    with pytest.raises(ValueError, match=r"auto with 80\.\d GB \(.*5 %\): .* GB; use a smaller"):
        task_from_run(load_run("qwen3_30b_a3b", ["layout.recompute=auto"]), parse_cluster("h100x1"))
    limited = "layout.recompute={kind: auto, limit: 9 GB}"
    with pytest.raises(ValueError, match=r"limit 9 GB: .* GB; raise the limit, or use a smaller"):
        task_from_run(load_run("qwen3_30b_a3b", [limited]), parse_cluster("h100x1"))


def test_a_run_is_settled_by_its_plan() -> None:
    """Its layout names the kinds; a run that names them itself stays as it is."""
    given = ["layout.recompute={kind: auto, limit: 60 GB}", "layout.zero=3"]
    run = load_run("qwen3_30b_a3b", [*given, "layout.sizes=ep8", "train.micro_batch=2"])
    task, layout = task_from_run(run, parse_cluster("h100x16"))
    assert isinstance(layout.recompute, Selective | Full)
    assert layout == run.layout.model_copy(update={"recompute": layout.recompute})
    assert max(one.total for one in estimate_memory(task.case(layout))) <= 60e9
    assert isinstance(run.layout.recompute, Auto) and run.layout.recompute.bytes == 60e9
    stated = load_run("tiny", ["layout.recompute={kind: selective, modules: [norms]}"])
    assert task_from_run(stated, parse_cluster("h100x4"))[1] is stated.layout


def test_what_leaves_is_settled_too(tmp_path: Path) -> None:
    """To the place that the run names; stated kinds stay where they are."""
    sizes = ["layout.zero=3", "layout.sizes=ep8", "train.micro_batch=2"]
    for place, limit in (("host: true", 75), (f"disk: {tmp_path}", 41)):
        auto = f"layout.recompute={{kind: auto, limit: {limit} GB, {place}}}"
        run = load_run("qwen3_30b_a3b", [auto, *sizes])
        task, layout = task_from_run(run, parse_cluster("h100x16"))
        offload = layout.offload
        assert offload is not None and not isinstance(layout.recompute, Auto)
        assert [*offload.destinations] == [place.split(":")[0]]
        assert offload.disk is None or offload.disk.folder == str(tmp_path)
        assert Layout.model_validate(to_dict(layout)) == layout, "as a run file states it"
        assert max(one.total for one in estimate_memory(task.case(layout))) <= limit * 1e9


def test_what_leaves_is_named_once() -> None:
    """By the plan or by the run, to the host or to a disk."""
    both = "layout.recompute={kind: auto, host: true, disk: ./scratch}"
    with pytest.raises(RunError, match="cannot be combined with host"):
        load_run("tiny", [both])
    stated = "layout.offload={host: {modules: [experts]}}"
    with pytest.raises(RunError, match=r"cannot be combined with layout\.offload"):
        load_run("tiny", [stated, "layout.recompute={kind: auto, host: true}"])
