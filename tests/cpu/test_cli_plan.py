"""``moefold plan``: its table, its JSON, its page's text, what it refuses, and no torch."""

import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import yaml

import moefold
from moefold.cli.main import main
from moefold.cli.plan import _long_run_part
from moefold.config.check import check
from moefold.parallel.config import Layout
from moefold.planner.goodput import Faults

FAST = ["--cluster", "h100x2", "--batch", "32"]


def answer(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict:
    assert main(["plan", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def tiny() -> dict:
    """What is answered for a recipe."""
    out = StringIO()
    with redirect_stdout(out):
        assert main(["plan", "tiny", *FAST, "--json"]) == 0
    return json.loads(out.getvalue())


def test_a_recipe_in_figures(tiny: dict) -> None:
    found = tiny
    assert found["inputs"]["batch"] == 32 and found["cluster"]["devices"] == 2
    given, best = found["given"], found["best"]
    assert best["step_time_s"] <= given["step_time_s"] * (1 + 1e-9)
    for one in (given, best, found["today"]):
        assert one["fits"] and one["margin_gb"] > 0 and one["binds"] != "memory"
        assert sum(one["memory_parts_gb"].values()) == pytest.approx(one["memory_gb"], rel=1e-6)
        assert sum(one["time_parts_s"].values()) == pytest.approx(one["step_time_s"], rel=1e-6)
    assert found["today"]["not_yet"] == []
    assert 0 < found["goodput"]["ettr"] <= 1


def test_the_fragment_is_a_run_file(
    tiny: dict, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = tiny
    layout = check(Layout, found["run_file"]["layout"]).record
    assert layout is not None and layout.sizes == found["run_file"]["layout"]["sizes"]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"base": "tiny", **found["run_file"]}))
    again = answer(capsys, str(path), *FAST)
    assert again["given"]["layout"] == found["today"]["layout"]
    assert again["given"]["step_time_s"] == pytest.approx(found["today"]["step_time_s"])


def test_what_training_cannot_execute_is_said_and_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The fastest fits by what training lacks alone: stripped of it, it would not."""
    where = ["--cluster", "h100x1", "--memory", "300"]
    assert main(["plan", "Mixtral-8x7B", *where, "--batch", "4"]) == 0
    said = capsys.readouterr().out
    assert "package: optimizer on the host" in said and "precision" not in said
    assert "no layout that training supports fits in bf16" in said and "train:" not in said
    assert "not fitted to moefold on a GPU" in said


def test_what_training_executes_is_the_fastest_where_nothing_else_is_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """State on the host that the device updates is tried only for layouts of training."""
    where = ["--cluster", "h100x1", "--memory", "520", "--batch", "4"]
    found = answer(capsys, "Mixtral-8x7B", *where)
    assert found["today"]["step_time_s"] == found["best"]["step_time_s"]
    assert "updated by the device" in found["today"]["policies"]


def test_a_layout_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "tiny", *FAST, "--layout", "ep2 tp2")
    assert found["given"]["sizes"]["ep"] == found["given"]["sizes"]["tp"] == 2


def test_a_layout_of_data_ranks_alone_is_not_called_one_rank(tiny: dict) -> None:
    assert tiny["given"]["layout"] == "dp only"


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", *FAST, "--price", "2.5", "--tokens", "1e9"]) == 0
    said = capsys.readouterr().out
    for part in ("given", "fastest", "memory, GB", "time, s", "run file", "expert load 1.2"):
        assert part in said
    assert "cost " in said and "1.00B tokens" in said


def test_memory_is_the_wall(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--cluster", "h100x1", "--batch", "8", "--memory", "24"]
    found = answer(capsys, "olmoe_1b_7b", *where, status=1)
    assert found["nothing_fits"]["least_gb"] > 24
    assert not found["given"]["fits"] and found["given"]["binds"] == "memory"
    assert found["given"]["margin_gb"] < 0


def test_a_page_without_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    assert main(["plan", "tiny", *FAST, "--html", str(path)]) == 0
    text = path.read_text("utf-8")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "__DATA__" not in text and "tiny on 2 H100" in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["layout.graphs=partial", "layout.clones={slots: 1}",
             "layout.dispatch={kind: padded, max_rows: 512}"],
            "zero 1, padded, max_rows 512, clones 1, graphs partial",
        ),
        (["layout.state={at: host, step: device}"], "optimizer on the host, updated by the device"),
        (["layout.schedule=merged"], "zero 1, merged, alltoall"),
    ],
)  # fmt: skip
def test_the_page_says_what_the_console_says(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    words = ["plan", "tiny", *FAST, "--layout", "ep2", "--html", str(path)]
    assert main([*words, *given]) == 0
    page = path.read_text("utf-8")
    policies = [found for found in re.findall('"policies":"([^"]*)"', page) if said in found]
    assert "l.elsewhere_gb" in page and "l.away_gb" in page, "bytes of offloaded state and rows"
    told = " ".join(capsys.readouterr().out.split("\n"))
    assert [found for found in policies if f"given: ep2  {found}" in told]


def test_in_python() -> None:
    plan = moefold.plan(moefold.load_run("tiny"), cluster="h100x2", batch=32)
    assert plan.best is not None and plan.given is not None
    for one in (plan.best, plan.given):
        assert one.fits and one.memory_gb > 0 and one.tflops_per_gpu > 0
        assert isinstance(one.layout, str) and one.binds


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"batch": 0}, "batch 0: must be a finite number above 0"),
        ({"seq": -1}, "seq -1"),
        ({"load": float("nan")}, "load nan"),
        ({"memory_gb": -1.0}, "memory_gb -1"),
        ({"top": 0}, "top 0"),
        ({"seq": 64}, "data.seq=64"),
        ({"overrides": ["data.seq=64"]}, "not a loaded run"),
    ],
)
def test_python_refuses_what_the_command_does(given: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        moefold.plan(moefold.load_run("tiny"), cluster="h100x2", **given)


def test_a_cluster_that_only_fails_is_said_and_not_divided_by() -> None:
    found = moefold.plan(moefold.load_run("tiny"), cluster="h100x1", batch=32, top=1)
    (said,) = _long_run_part(replace(found, faults=Faults(restart_s=1e9)), 1e9)
    assert "no progress" in str(said)


WRONG = [
    (["nothing_like_it", "--cluster", "h100x8"], "published model"),
    (["tiny", "--cluster", "h1000x8"], "unknown device"),
    (["tiny", "--cluster", "h100"], "such as h100x8"),
    (["Mixtral-8x7B", "--cluster", "h100x8"], "--batch"),
    (["tiny", "--cluster", "h100x4", "--load", "0.5"], "load"),
    (["tiny", "--cluster", "h100x4", "--load", "nan"], "--load nan"),
    (["tiny", "--cluster", "h100x4", "--batch", "0"], "--batch 0"),
    (["tiny", "--cluster", "h100x4", "--memory", "-1"], "--memory -1"),
    (["tiny", "--cluster", "h100x4", "--tokens", "-5"], "--tokens -5"),
    (["tiny", "--cluster", "h100x4", "--price", "inf"], "price inf"),
    (["tiny", "--cluster", "h100x4", "--seq", "64"], "data.seq=64"),
]


@pytest.mark.parametrize(("words", "why"), WRONG, ids=lambda x: str(x)[:30])
def test_refused_in_words(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert why in capsys.readouterr().err


def test_no_torch() -> None:
    code = (
        "import sys, time; t = time.process_time(); import moefold.planner; import moefold; "
        "moefold.plan; assert 'torch' not in sys.modules; print(time.process_time() - t)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5  # half a second on an idle core
