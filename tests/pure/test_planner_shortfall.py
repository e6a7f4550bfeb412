"""Where nothing fits, a plan says what is missing and what would make it fit; lengths of runs."""

import json
from dataclasses import replace

import pytest

from moefold.cli.main import main
from moefold.planner.hardware import parse_cluster, with_memory
from moefold.planner.memory import peak_within, rank_totals
from moefold.planner.plan import GB, plan
from moefold.planner.published import published_model
from moefold.planner.search import Search
from moefold.planner.search_space import full_space, offloading_space
from moefold.planner.shortfall import find_shortfall, may_fit, memory_limit
from moefold.planner.task import TrainingTask, task_from_model


def task(cluster: str, memory_gb: float, batch: int = 8) -> TrainingTask:
    """Return OLMoE on devices of some memory."""
    where = parse_cluster(cluster)
    where = replace(where, device=with_memory(where.device, round(memory_gb * GB)))
    return task_from_model(published_model("OLMoE-1B-7B"), where, batch)


@pytest.mark.parametrize(("cluster", "memory_gb"), [("a100x1", 24.0), ("a100x2", 12.0)])
def test_each_named_change_then_fits(cluster: str, memory_gb: float) -> None:
    one = task(cluster, memory_gb)
    shortfall = find_shortfall(one)
    assert shortfall.least is not None and shortfall.least.peak_bytes > memory_limit(one)
    assert not Search(one).best(full_space(one), 1)
    assert "adapter={kind: lora, rank: 16}" in shortfall.tried
    assert shortfall.remedies
    for remedy in shortfall.remedies:
        spaces = offloading_space(remedy.task), full_space(remedy.task)
        found = [one for space in spaces for one in Search(remedy.task).best(space, 1)]
        assert found and found[0].peak_bytes <= memory_limit(remedy.task), remedy.change
        again = max(rank_totals(remedy.found.case))
        assert again == pytest.approx(remedy.found.peak_bytes)
        assert again <= memory_limit(remedy.task)


def test_the_least_memory_is_that_of_all_layouts_of_its_space() -> None:
    """Found by trying every folding and place of the state with what saves least."""
    one = task("a100x4", 10.0)
    search = Search(one)
    space = full_space(one).thrifty
    least = search.least_memory(space)
    assert least is not None
    peaks = [
        peak_within(case, 1e15)
        for _, depth in search._memory_bounds(space)
        for case in search._least_cases(space, depth)
    ]
    assert least.peak_bytes == pytest.approx(min(filter(None, peaks)))
    assert search.first_within(space, least.peak_bytes) is not None
    assert search.first_within(space, 0.99 * least.peak_bytes) is None


def test_what_binds_is_the_largest_part() -> None:
    """Of full training with its state on the host, gradients of four bytes a weight."""
    shortfall = find_shortfall(task("a100x1", 24.0))
    names = [name for name, _ in shortfall.parts]
    assert names[:2] == ["gradients", "weights"]
    sizes = [size for _, size in shortfall.parts]
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.05)


def test_a_task_that_fits_is_searched() -> None:
    assert may_fit(Search(task("a100x4", 40.0)))
    assert not may_fit(Search(task("a100x4", 5.0)))


def test_the_status_says_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "OLMoE-1B-7B", "--cluster", "a100x1", "--memory", "24", "--batch", "8"]
    assert main(given) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "least memory found: 45.4 GB per device, 22.8 may be used" in text
    assert "bound by gradients" in text and "2 A100 (not 1)" in text
    assert main([*given, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)["nothing_fits"]
    assert said["fits_with"][0]["change"] == "adapter={kind: lora, rank: 16}"
    assert said["fits_with"][0]["memory_gb"] <= said["limit_gb"] < said["least_gb"]


@pytest.mark.parametrize(
    ("name", "where", "memory_gb"),
    [
        ("olmoe_1b_7b", "a100x1", 52.0),
        pytest.param("qwen3_30b_a3b", "h100x4", None, marks=pytest.mark.matrix),
    ],
)
def test_state_goes_to_the_host_where_training_fits_no_other_way(
    name: str, where: str, memory_gb: float | None
) -> None:
    """Four bytes of gradient and two of weight per parameter stay: a layout with its run file."""
    found = plan(name, where, memory_gb=memory_gb, top=1)
    assert found.trainable is not None and not found.trainable.unsupported
    assert found.run_file is not None
    assert found.run_file["layout"]["state"]["at"] == "host"
    assert found.task.tokens is None and found.shortfall is None


def test_a_length_is_shown_where_it_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "tiny", "--cluster", "a100x1", "--json"]
    for more, tokens in (([], None), (["--tokens", "1e9"], 1e9)):
        assert main([*command, *more]) == 0
        whole = json.loads(capsys.readouterr().out)["whole_run"]
        assert (whole and whole["tokens"]) == tokens
    assert main([*command, "train.steps=10"]) == 0
    assert json.loads(capsys.readouterr().out)["whole_run"]["tokens"] > 0
