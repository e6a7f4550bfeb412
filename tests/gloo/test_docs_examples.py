"""Every example of docs/extending.md is trained, planned and proved in a layout that cuts it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moefold.api import train
from moefold.checkpoint.folder import find_newest
from moefold.cli.main import main
from moefold.config.slot import build
from moefold.run import load_run
from moefold.training.hooks.config import HOOKS
from moefold.training.run_folder import History
from tests.examples import EXAMPLES, written

LAYOUTS = {
    "entropy.py": ["tp2"],
    "router_norm.py": ["ep2"],
    "signum.py": ["tp2", "layout.zero=1"],
    "focal.py": ["tp2"],
    "csv_notes.py": ["cp2"],
    "plain_dispatch.py": ["cp2"],
    "centred.py": ["tp2"],
    "shared_qwen.py": ["ep2"],
    "gated_attention.py": ["tp2 cp2"],
}
"""Sizes that cut what the example is about, and what else goes with them."""


def verified(path: Path, sizes: str, capsys: Any, *overrides: str) -> dict[str, Any]:
    """Return what the command says of a run in a layout."""
    capsys.readouterr()
    status = main(["verify", str(path), "--layout", sizes, "--json", *overrides])
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] == (status == 0)
    return found["layouts"][0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_computes_in_a_layout_what_one_rank_does(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    """Its parts reach the ranks, which load what is made of them."""
    sizes, *overrides = LAYOUTS[name]
    found = verified(written(tmp_path, name), sizes, capsys, *overrides)
    assert found["passed"], found["problems"] or found["max_relative_error"]
    assert name != "entropy.py" or found["max_relative_error"]["router/entropy"] < 1e-12


def test_a_term_divided_by_the_rows_of_a_rank_is_noticed(tmp_path: Path, capsys: Any) -> None:
    """Only a proof tells it from the right one: on one rank both are the same."""
    path, right = (
        written(tmp_path, "entropy.py"),
        "observed.mean(entr(observed.probability_TE).sum(1))",
    )
    wrong = "entr(observed.valid(observed.probability_TE)).sum(1).mean()"
    code = EXAMPLES["entropy.py"][0]
    assert code.count(right) == 1
    (tmp_path / "entropy.py").write_text(code.replace(right, wrong))
    found = verified(path, "tp2", capsys)
    assert not found["passed"] and found["max_relative_error"]["router/entropy"] > 0.5


@pytest.mark.parametrize(
    "name", ["entropy.py", pytest.param("centred.py", marks=pytest.mark.matrix)]
)
def test_a_run_in_its_own_format_reaches_the_ranks_too(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    """As the layout's reference does, and the shuffled ones."""
    assert verified(written(tmp_path, name), "ep2", capsys, "--as-run")["passed"]


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "plain_dispatch.py"])
def test_an_example_is_planned(name: str, tmp_path: Path, capsys: Any) -> None:
    """All but the dispatcher, of which the planner does not know what it sends."""
    status = main(["plan", str(written(tmp_path, name)), "--cluster", "h100x2", "--json"])
    assert status == 0 and json.loads(capsys.readouterr().out)


def test_a_hook_from_a_file_reaches_the_ranks(tmp_path: Path) -> None:
    """Given in Python, it is loaded by a process that has read no run file yet.

    What it sees of weights is what one rank sees, whichever ranks have which part of them.
    """
    path, steps = written(tmp_path, "router_norm.py"), ["train.steps=2", "watch.hooks=[]"]
    found = list[list[float]]()
    for nproc, *layout in ((1,), (2, "layout.zero=3"), (2, "layout.sizes=pp2")):
        run = load_run(path, [*steps, "train.precision=fp32", *layout])
        hook = build(HOOKS.kinds["router_norm"]())
        out = tmp_path / "-".join(map(str, (nproc, *layout)))
        train(run, nproc=nproc, hooks=[hook], folder=out)
        names = [f"norm/layers.{layer}.moe.router.weight" for layer in (0, 1)]
        found.append([line[name] for line in History.read(out).lines for name in names])
    assert len(found[0]) == 4
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.matrix
def test_a_mixer_from_a_file_goes_on_in_another_layout(tmp_path: Path) -> None:
    """From the same checkpoint, with the losses of the layout that it began in."""
    path, out = written(tmp_path, "gated_attention.py"), tmp_path / "out"
    found = list[list[float]]()
    for sizes in ("tp2", "ep2"):
        words = ["train.steps=4", "watch.checkpoint.every=2", "watch.checkpoint.keep=9"]
        train(load_run(path, [*words, f"layout.sizes={sizes}"]), nproc=2, folder=out)
        found.append([line["lm_loss"] for line in History.read(out).lines])
        last = find_newest(out)
        assert last is not None
        shutil.rmtree(last)  # as if killed before
    assert len(found[0]) == len(found[1]) == 4 and found[0][:2] == found[1][:2]
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[1] != found[0]
