"""What the time model reaches on published runs, with the constants that come with the package.

The script prints more, and fits; here are the figures that need no fit, and the rules that keep
them honest.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from plan_accuracy import effects, leave_out, line, parts_of, report
from planning.ablations import right
from planning.fit import priors_for
from planning.recipes import said
from planning.rows import FILE, Row, read
from planning.score import held_out, predicted, published, summary, twin_key
from published_layouts import FILE as LAYOUTS
from published_layouts import fastest

from moefold.planner.curves import constants

BENCH = Path(__file__).parents[2] / "bench"
STORED = json.loads((BENCH / "results" / "plan_accuracy.json").read_text("utf-8"))


@cache
def rows() -> tuple[Row, ...]:
    """Return every published row."""
    return tuple(read())


@cache
def found() -> dict:
    """Return the figures of the shipped constants."""
    return report(rows(), constants())


def test_fitted_rows_are_near():
    assert found()["fitted"]["rows"] > 150
    assert found()["fitted"]["median"] <= 0.06
    assert found()["fitted"]["p80"] <= 0.12


def test_rows_without_a_fitted_twin_are_near():
    assert found()["held_out"]["rows"] >= 30
    assert found()["held_out"]["median"] <= 0.13
    assert found()["held_out"]["p80"] <= 0.25


def test_plans_show_the_layouts_of_these_rows():
    """The file in the package once said less of them than rows do by now."""
    assert json.loads(LAYOUTS.read_text("utf-8")) == fastest(rows())


LEFT_OUT = {"model": ("Qwen3-235B-A22B", 30, 0.1), "stack": ("megatron 26.02", 25, 0.06)}
"""What is left out and fitted again here, its rows, and how far off half of them may be."""


@pytest.mark.parametrize("key", ["model", pytest.param("stack", marks=pytest.mark.matrix)])
def test_rows_left_out_of_the_fit_are_near(key):
    """Fitted again without the largest but one; the file's figures are those of such fits."""
    name, count, most = LEFT_OUT[key]
    fitted, _ = parts_of(rows())
    shipped = {n: v for n, v in constants().values.items() if n in priors_for(fitted)}
    out, wrong = leave_out(fitted, key, shipped, 4, [name])
    assert len(out) == len(wrong) == count
    stored = STORED[f"leave_one_{key}_out"]
    assert summary(wrong)["median"] == pytest.approx(stored["each"][name]["median"], abs=0.005)
    assert summary(wrong)["median"] <= most
    assert stored["rows"] == sum(one["rows"] for one in stored["each"].values()) == len(fitted)
    assert stored["median"] <= 0.12


def test_errors_are_to_both_sides():
    """No side has them all: half of the rows are planned neither too fast nor too slow."""
    for part in parts_of(rows()):
        signed = [
            rate / published(row) - 1
            for row, rate in zip(part, predicted(part, constants()), strict=True)
        ]
        assert abs(median(signed)) <= 0.03


def test_stored_figures_are_those_of_the_shipped_constants():
    for name in ("fitted", "held_out", "sweeps", "ablations", "fits"):
        assert STORED[name] == found()[name]


def test_held_out_layouts_are_not_fitted():
    fitted, held = parts_of(rows())
    assert not {twin_key(row) for row in fitted} & {twin_key(row) for row in held}
    assert all(held_out(row) for row in held)


def test_the_model_beats_both_baselines_where_they_have_no_twin():
    mine, theirs = found()["held_out"], found()["held_out"]["baselines"]
    for name in ("nearest_twin", "constant_rate"):
        assert mine["median"] < theirs[name]["median"]
        assert mine["p80"] < theirs[name]["p80"]


def test_layouts_of_each_sweep_are_ranked_and_the_pick_is_good():
    assert len(found()["sweeps"]) >= 4
    for name, one in found()["sweeps"].items():
        assert one["spearman"] >= 0.75, name
        assert one["regret"] <= 0.10, name


FAR = {
    "DSV3 GB200: CUDA graphs": 21,
    "DSV3 GB200: CPU binding": 9,
    "Qwen3-235B GB200: TP2 EP16 to TP1 EP64": 65,
    "Qwen3-235B H800: experts five times as full": 47,
    "GPT-OSS-20B TP2 PP4 EP4 H100: CUDA graphs": 20,
    "Qwen3-30B B200, torchtitan: all-to-all to DeepEP": 26.5,
}
"""Effects whose size is not planned right, and by how many points they may be off."""


def test_published_effects_have_the_right_sign_and_size():
    changed = effects(constants())
    assert len(changed) == 27 and all(one["sign"] for one in changed)
    assert {one["name"] for one in changed if not one["right"]} <= set(FAR)
    for one in changed:
        assert one["points"] <= FAR.get(one["name"], 12), one


def test_an_effect_of_the_wrong_size_is_not_right():
    assert right(0.15, 0.2) and right(-0.33, -0.2) and right(0.02, 0.09)
    assert not right(0.15, 0.8), "planned +80 % for a published +15 %"
    assert not right(0.15, -0.01) and not right(0.4, 0.1)


def test_rows_that_ran_fit_and_those_that_did_not_do_not():
    memory = found()["fits"]
    assert memory["out_of_memory"]["rows"] >= 2
    assert not memory["out_of_memory"]["wrong"]
    assert memory["ran"]["rows"] >= 190
    assert memory["ran"]["right"] >= 0.97 * memory["ran"]["rows"]


def test_a_row_takes_what_its_recipe_says():
    row = {"model": "DeepSeek-V3", "gpu": "GB200", "pp": 4, "vpp": 4, "ep": 64}
    assert said(row, "26.02", "mxfp8", "recompute") == "mla_up_proj"
    assert said(row, "26.04.01", "mxfp8", "recompute") == "mlp"
    assert said(row, "26.06", "mxfp8", "cuda_graph") == "full"
    assert said(row, "25.09", "mxfp8", "ep_overlap") is False, "the next release that has recipes"
    assert said(row, "guide", "mxfp8", "recompute") is None
    assert said(row | {"model": "Unknown"}, "26.02", "mxfp8", "recompute") is None
    unlike = {"model": "GPT-OSS-120B", "gpu": "GB200"}
    assert said(unlike, "26.04", "bf16", "dispatcher") is None, "its layouts differ in this"


def test_rows_are_left_out_by_rule_alone():
    reasons = {row.left_out.split(":")[0].split(" ")[0] for row in rows() if row.left_out}
    assert reasons == {"no", "incomplete", "conflict"}
    assert any(row.marks for row in rows() if not row.left_out)


@pytest.mark.parametrize("wanted", ["mb-26.08-dsv3-GB300", "zoo-mixtral8x22b-h100-dropless"])
def test_a_row_becomes_a_line(wanted):
    row = next(row for row in rows() if row.id.startswith(wanted))
    said = line(row, constants())
    assert said["id"] == row.id
    assert said["published"] == pytest.approx(published(row), abs=0.01)
    assert 0.5 < said["predicted"] / said["published"] < 2
    assert {"memory_gb", "fits"} <= set(said)


def test_other_files_of_the_form_are_scored(tmp_path):
    some = json.loads(FILE.read_text("utf-8"))[:2]
    strange = {"id": "x-1", "model": "Unknown-1B", "gpu": "H100", "num_gpus": 8, "seq_len": 4096,
               "gbs": 8, "pp": 1, "ep": 1, "tflops_per_gpu": 300}  # fmt: skip
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([*some, strange]))
    done = subprocess.run(
        [sys.executable, str(BENCH / "plan_accuracy.py"), "--rows", str(file), "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(BENCH.parent), "PATH": "/usr/bin:/bin"},
    )
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert [one["id"] for one in lines] == [*(row["id"] for row in some), "x-1"]
    assert "left_out" in lines[2]
