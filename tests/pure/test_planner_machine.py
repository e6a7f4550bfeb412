"""A machine file: what it holds comes back, and its rates are those that plans are made with."""

from dataclasses import replace
from pathlib import Path

import pytest

from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block, Decoder, Stack
from moefold.moe.config import Moe, Router
from moefold.optim.config import AdamW, Muon
from moefold.parallel.config import Layout
from moefold.planner.case import Case, NumberFormats
from moefold.planner.curves import constants
from moefold.planner.hardware import Machine, default_machine_file, parse_cluster
from moefold.planner.memory import GPU_OVERHEADS, software_overheads
from moefold.planner.task import task_from_run
from moefold.planner.time import estimate_time, newton_schulz_seconds
from moefold.run import load_run

RATES = {
    "gemm": 1.0, "half": 0.0, "memory": 1.0, "device": 1.0, "kernel_s": 1e-6, "launch_s": 0.0,
    "step_s": 0.0, "forward_rate": 0.5, "forward_half": 0.0, "backward_rate": 0.5,
    "backward_half": 0.0,
}  # fmt: skip
MACHINE = Machine(
    "a CPU",
    1,
    "torch 2",
    1e11,
    4e11,
    2e10,
    2**34,
    {"fp32": RATES, "bf16": RATES},
    {"fp32": {}, "bf16": {}},
)


def case(machine: Machine = MACHINE, **numbers: object) -> Case:
    attends = Mla(heads=4, q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32)
    block = Block(attention=attends, ffn=Moe(width=128, router=Router(experts=8, top_k=2)))
    decoder = Decoder(vocab=1024, hidden=128, stacks=(Stack(repeat=2, blocks=(block,)),))
    return Case(
        decoder, 256, 4, 4, machine.cluster, Layout(), 1.0, NumberFormats(**numbers),
    )  # fmt: skip


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "there" / "machine.json"
    MACHINE.write(file)
    assert Machine.read(file) == MACHINE


def test_a_plan_names_the_machine_s_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``cpu`` is the usual file; one that is not there is asked for by the command's name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"machine\.json does not exist: run `moefold bench"):
        parse_cluster("cpu")
    MACHINE.write(default_machine_file())
    assert parse_cluster("cpu") == parse_cluster(str(default_machine_file())) == MACHINE.cluster


def test_a_measured_gpu_has_its_own_rates_and_the_links_it_is_sold_with(tmp_path: Path) -> None:
    """Plant: take the catalogue's memory bandwidth for what was measured."""
    file, sold = tmp_path / "h200_machine.json", parse_cluster("h200x16").device
    replace(MACHINE, name="NVIDIA H200", gpu=True).write(file)
    one, many = parse_cluster(str(file)), parse_cluster(f"{file}x16")
    assert (one.devices, many.devices, many.per_node, many.domain) == (1, 16, 8, 8)
    found = many.device
    assert (found.name, found.peak("bf16"), found.memory_bandwidth) == ("H200", 4e11, 2e10)
    assert found.peak("fp8") == sold.peak("fp8") and found.nic_bandwidth == sold.nic_bandwidth
    assert dict(dict(found.rates)["bf16"]) == RATES
    replace(MACHINE, name="NVIDIA T4", gpu=True).write(file)
    other = parse_cluster(str(file)).device
    assert (other.name, software_overheads(other)) == ("NVIDIA T4", GPU_OVERHEADS), (
        "no CPU, though without links"
    )
    with pytest.raises(ValueError, match="no link rate is known"):
        parse_cluster(f"{file}x2")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"form": 0, "name": "x"}', '{"form": 1}', "\udcff", "[" * 20_000],
)
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="moefold bench"):
        Machine.read(file)


@pytest.mark.parametrize(
    "wrong", [{"fp32": 0.0}, {"bandwidth": -1.0}, {"bf16": "fast"}, {"rates": [1]}], ids=str
)
def test_a_file_with_no_rates_in_it_is_refused(tmp_path: Path, wrong: dict) -> None:
    file = tmp_path / "machine.json"
    replace(MACHINE, **wrong).write(file)
    with pytest.raises(ValueError, match="moefold bench"):
        Machine.read(file)


@pytest.mark.parametrize(("name", "rate"), [("gemm", 0.0), ("link", -1.0), ("step_s", -1.0)])
def test_a_rate_that_work_cannot_be_divided_by_is_named(
    tmp_path: Path, name: str, rate: float
) -> None:
    file = tmp_path / "machine.json"
    replace(MACHINE, rates={"bf16": {**RATES, name: rate}}).write(file)
    with pytest.raises(ValueError, match=rf"machine\.json: rates\.bf16\.{name} {rate} must be fin"):
        parse_cluster(str(file))


def test_a_rate_that_no_plan_knows_is_refused() -> None:
    other = replace(MACHINE, rates={"bf16": {**RATES, "gemms": 0.5}})
    with pytest.raises(ValueError, match="gemms; run `moefold bench`"):
        estimate_time(case(other, recipe="bf16"))


def test_the_usual_file_lies_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_machine_file() == Path("/somewhere/moefold/machine.json")


def test_plans_take_the_machine_s_rates() -> None:
    seconds = {form: estimate_time(case(recipe=form)).parts for form in RECIPES}
    # Products take the peak of their format.
    assert seconds["fp32"]["experts"] == pytest.approx(4 * seconds["bf16"]["experts"])
    slower = {**RATES, "gemm": 0.5, "kernel_s": 3e-6, "step_s": 0.25}
    other = replace(MACHINE, rates={"fp32": slower, "bf16": RATES})
    took = estimate_time(case(other, recipe="fp32")).parts
    assert took["experts"] == pytest.approx(2 * seconds["fp32"]["experts"])
    assert took["launch"] == pytest.approx(3 * seconds["fp32"]["launch"])
    assert took["step"] == 0.25
    assert took["host"] == 0, "a CPU launches nothing ahead"


RECIPES = ("fp32", "bf16")


def test_orthogonal_updates_take_their_products_by_hand() -> None:
    """Five iterations of two products s * s * l and one s cubed for each matrix, at the peak."""
    one = case(optimizer=Muon())
    rates = constants().rates("CPU", "moefold", "", tuple(RATES.items()))
    flops = 0
    matrices = [(128, 96), (192, 96), (128, 80), (256, 64), (128, 128)]  # MLA's five
    for sides, count in [*((sides, 1) for sides in matrices), ((128, 128), 24)]:
        short, long = sorted(sides)
        flops += count * (4 * short * short * long + 2 * short**3)
    assert newton_schulz_seconds(one, 0, rates) == pytest.approx(2 * 5 * flops / 4e11)
    assert newton_schulz_seconds(case(optimizer=AdamW(lr=1e-3)), 0, rates) == 0


@pytest.mark.parametrize("bf16", [1.1e9, 4e11])
def test_auto_is_planned_as_what_the_machine_is_faster_in(bf16: float) -> None:
    """Plant: plan ``auto`` as bf16 whatever ``moefold bench`` measured."""
    run = load_run("demo")
    task, _ = task_from_run(run, replace(MACHINE, bf16=bf16).cluster)
    assert task.number_formats.recipe == ("bf16" if bf16 > MACHINE.fp32 else "fp32")
    task, _ = task_from_run(run, parse_cluster("a100x1"))
    assert task.number_formats.recipe == "bf16"
