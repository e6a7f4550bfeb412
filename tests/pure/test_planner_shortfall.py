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


def test_each_named_change_then_fits() -> None:
    one = task("a100x1", 24.0)
    shortfall = find_shortfall(one)
    assert shortfall.least is not None and shortfall.least.peak_bytes > memory_limit(one)
    assert not Search(one).best(full_space(one), 1)
    assert "adapter={kind: lora, rank: 16}" in shortfall.tried
    assert shortfall.remedies
    for remedy in shortfall.remedies:
        spaces = offloading_space(remedy.task), full_space(remedy.task)
        searches = (Search(remedy.task).best(space, 1) for space in spaces)
        found = next(filter(None, searches), None)
        assert found is not None, remedy.change
        assert found[0].peak_bytes <= memory_limit(remedy.task)
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
    for memory_gb, fits in ((40.0, True), (5.0, False)):
        one = task("a100x4", memory_gb)
        assert may_fit(Search(one), full_space(one)) is fits


def test_more_devices_than_a_sequence_has_rows_are_searched() -> None:
    one = replace(task("a100x64", 5.0, batch=64), seq=32)
    assert Search(one).first_within(full_space(one).thrifty, 1.0) is None


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


# ----------------------------------------------------------------------------- any job


def test_a_published_model_takes_an_adapter_and_frozen_weights() -> None:
    """With an adapter it has the state of a run with the same one."""
    adapter = "adapter={kind: lora, rank: 8, targets: [attention]}"
    found = plan("OLMoE-1B-7B", "a100x1", batch=8, memory_gb=24, top=1, overrides=[adapter])
    assert found.trainable is not None and found.shortfall is None
    own = plan("olmoe_1b_7b", "a100x1", batch=8, memory_gb=24, top=1, overrides=[adapter])
    assert own.trainable is not None
    both = [dict(one.memory.parts) for one in (found.trainable, own.trainable)]
    assert both[0]["weights"] == pytest.approx(both[1]["weights"], rel=0.01)
    assert both[0]["moments"] == pytest.approx(both[1]["moments"], rel=0.01)
    frozen = plan("OLMoE-1B-7B", "a100x1", batch=8, top=1, overrides=["train.freeze=['*.moe.*']"])
    whole = plan("OLMoE-1B-7B", "a100x1", batch=8, top=1)
    assert frozen.best is not None
    assert frozen.best.memory.parts["moments"] < 6e9
    assert whole.best is None or whole.best.memory_gb > frozen.best.memory_gb


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("adapter={kind: lora, rank: 0}", "rank"),
        ("train.freeze=['nothing']", "must match a parameter"),
        ("optim.lr=1", "takes adapter="),
    ],
)
def test_other_overrides_of_a_published_model_are_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan("OLMoE-1B-7B", "a100x1", batch=8, overrides=[override])


def test_a_stated_precision_is_the_answer_s() -> None:
    found = plan("OLMoE-1B-7B", "b200x1", batch=4, precision="mxfp8", top=2)
    assert found.layouts and {one.recipe for one in found.layouts} == {"mxfp8"}


@pytest.mark.parametrize(
    ("where", "word", "nearest"),
    [("h100x8", "mxfp8", "fp8_"), ("a100x8", "fp8", "bf16"), ("b200x8", "mxfp9", "mxfp8")],
)
def test_a_precision_that_a_device_lacks_is_refused(where: str, word: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"precision .*nearest: {nearest}"):
        plan("OLMoE-1B-7B", where, batch=8, precision=word)
