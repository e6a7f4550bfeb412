"""What measures a GPU runs to its end without one, in a smoke size, and its files are read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import tables
from gpu.device import RESULTS, Bench
from gpu.steps import busy_share

from moefold.planner.hardware import Machine, parse_cluster

ROOT = Path(__file__).parents[2]


ALL_PARTS = """
import sys
import moefold  # before torch
from tests.triton import exact
exact.install()
from on_gpu import PARTS, main
sys.exit(max(main([part, "--smoke", "--folder", sys.argv[1]]) for part in PARTS))
"""


@pytest.mark.slow
def test_each_part_runs_to_its_end_and_plans_and_tables_read_it(tmp_path: Path) -> None:
    """In one process, which has chosen Triton's interpreter."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "bench")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ALL_PARTS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    ceilings, operations = (
        json.loads(next(tmp_path.glob(f"*_{part}.json")).read_text())
        for part in ("ceilings", "operations")
    )
    assert {"chip", "driver", "torch", "commit", "smoke"} <= ceilings.keys()
    rows = operations["rows"]
    assert isinstance(rows, list) and len(rows) > 25
    state = json.loads(next(tmp_path.glob("*_state.json")).read_text())["rows"]
    assert all(any(row[name] for row in state) for name in ("host_bytes", "disk_bytes"))
    errors = [e for row in rows for e in row.get("error_of", {}).values() if e is not None]
    assert len(errors) > 25 and max(errors) < 1e-5, errors
    if not torch.cuda.is_available():
        owns = [row["name"] for row in rows if any("own" in form for form in row["seconds"])]
        assert len(owns) > 12, "own kernels were interpreted"
    (file,) = tmp_path.glob("*_machine.json")
    machine = Machine.read(file)
    assert machine.gpu and machine.rates["bf16"]["launch_s"] > 0
    assert dict(parse_cluster(str(file)).device.rates).keys() == machine.rates.keys()
    text = (tmp_path / "tables.md").read_text()
    for said in ("norm and rotation of heads forward", "qwen3 ep8 merged", "memory copy"):
        assert said in text
    assert len(list(tmp_path.glob("roofline_*.png"))) == 1


def test_a_smoke_run_leaves_the_results_alone() -> None:
    with pytest.raises(ValueError, match="mean nothing"):
        Bench("ceilings", RESULTS, smoke=True)
    assert Bench("ceilings", smoke=True).folder != RESULTS


def test_an_error_is_a_row_and_the_status(tmp_path: Path) -> None:
    bench = Bench("trial", tmp_path, smoke=True)
    bench.tried("fails", lambda: {"rate": 1 / 0})
    bench.tried("runs", lambda: {"rate": 2.0})
    assert [row.get("rate", "error" in row) for row in bench.rows] == [True, 2.0]
    assert json.loads(bench.file.read_text())["rows"] == bench.rows
    assert bench.end() == 1


def test_the_page_says_what_the_results_say() -> None:
    """None today, which the page says; a file of results changes it."""
    text = tables.PAGE.read_text()
    assert tables.page(text, tables.results(RESULTS)) == text
    facts = {"chip": "NVIDIA H999", "driver": "1", "torch": "2"}
    found = {"h999": {"steps": facts | {"rows": []}}}
    assert tables.NOTHING in tables.page(text, {}) and "H999" in tables.page(text, found)


def test_time_under_several_streams_counts_once() -> None:
    assert busy_share([(0, 4), (2, 6), (8, 10)]) == pytest.approx(0.8)
    assert busy_share([(0, 4), (1, 2)]) == 1.0
