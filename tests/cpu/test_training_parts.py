"""Training from a folder's weights, parts from outside, and one's own loop."""

from pathlib import Path

import pytest
import torch

import moefold
from moefold.comm.world import World
from moefold.config.errors import RunError
from moefold.config.load import load
from moefold.layers.config import Full, Selective
from moefold.moe.config import BALANCE
from moefold.run import Run, load_run
from moefold.training.hooks.config import HOOKS
from moefold.training.memory import resolve_recompute
from moefold.training.trainer import Trainer
from tests.cpu.runs import corpus, equal, job_of, raw_run, run_of, weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder of a tiny trained model."""
    with job_of(tmp_path) as job:
        job.train()
    moefold.export(tmp_path / "out", tmp_path / "hf")
    return tmp_path / "hf"


def test_a_folder_is_trained_further_from_its_weights(tmp_path: Path, folder: Path) -> None:
    pattern = corpus(tmp_path / "corpus")
    run = load_run(
        folder,
        [
            f"data.train=[{{source: text, files: ['{pattern}'], holdout: 0.2}}]",
            "data.seq=16",
            "train={steps: 3, batch: 2, precision: fp32}",
            "watch={evaluate: null, plots: null, experts_page: null}",
        ],
    )
    assert run.name == "hf"
    with Trainer(run, tmp_path / "further", cache=tmp_path / "prepared") as job:
        start = {name: t.clone() for name, t in job.model.state_dict().items()}
        source = moefold.load_model(folder)
        assert all(torch.equal(start[name], t) for name, t in source.state_dict().items())
        before = job.evaluate()["val_loss"]
        job.train()
        assert job.evaluate()["val_loss"] < before + 0.05
        assert not torch.equal(job.model.state_dict()["head.weight"], start["head.weight"])
        assert job.tokenizer.encode("expert token") == moefold_tokens(tmp_path, "expert token")


def moefold_tokens(tmp_path: Path, text: str) -> list[int]:
    with job_of(tmp_path, "again") as job:
        return job.tokenizer.encode(text)


OUTSIDE = """
from typing import Annotated, Literal
from pydantic import Field
from moefold.config.base import Record
from moefold.moe.balance import Term
from moefold.comm.world import World
from moefold.layers.config import Full, Selective
from moefold.moe.config import BALANCE
from moefold.training.hooks.base import Hook
from moefold.training.hooks.config import HOOKS

class LogitNorm(Term):
    def __init__(self, record):
        self.name, self.coefficient = "logit_norm", record.coefficient
    def __call__(self, observed):
        return observed.logits_TE.square().mean()

@BALANCE.register
class LogitNormRecord(Record):
    kind: Literal["logit_norm"] = "logit_norm"
    coefficient: Annotated[float, Field(ge=0)] = 0.001
    owner = LogitNorm

SEEN = []

class Watcher(Hook):
    def __init__(self, record):
        self.every = record.every
    def on_step(self, job, metrics):
        if job.step_number % self.every == 0:
            metrics["outside"] = job.step_number
            SEEN.append(dict(metrics))

@HOOKS.register
class WatcherRecord(Record):
    kind: Literal["watcher"] = "watcher"
    every: Annotated[int, Field(ge=1)] = 1
    owner = Watcher
"""


def test_parts_from_outside_are_chosen_like_ours(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(OUTSIDE)
    raw = raw_run(tmp_path, uses=[str(tmp_path / "parts.py")])
    raw["model"]["balance"] = [{"kind": "aux"}, {"kind": "logit_norm", "coefficient": 0.01}]
    raw["watch"]["hooks"] = [{"kind": "watcher", "every": 2}]
    raw["watch"] |= {"plots": None, "experts_page": None}
    result = moefold.train(load(Run, raw).record, folder=tmp_path / "out")
    assert result.final["router/logit_norm"] > 0 and result.final["outside"] == 8
    raw["watch"]["hooks"][0]["every"] = 0
    raw["model"]["balance"][1]["kind"] = "logit_norms"
    with pytest.raises(RunError) as refused:
        load(Run, raw)
    said = {".".join(map(str, v.path)): v.nearest for v in refused.value.violations}
    assert said == {"watch.hooks.0.every": 1, "model.balance.1.kind": "logit_norm"}


def test_parts_of_one_test_are_unknown_to_the_next() -> None:
    """Of the test before: what is tested of every kind would be tested of them too."""
    assert "logit_norm" not in BALANCE.kinds and "watcher" not in HOOKS.kinds


def test_a_changed_part_from_outside_is_another_computation(tmp_path: Path) -> None:
    parts = tmp_path / "parts.py"
    parts.write_text("# nothing registered\n")
    changes = {"uses": [str(parts)]}
    with job_of(tmp_path, **changes) as job:
        job.last_step = 1
        job.train()
    job_of(tmp_path, **changes).close()
    parts.write_text("# nothing registered, in other words\n")
    with pytest.raises(ValueError, match=r"uses: .*parts\.py"):
        job_of(tmp_path, **changes)


def test_one_can_write_the_loop_oneself(tmp_path: Path) -> None:
    run = run_of(tmp_path, watch={"plots": None, "experts_page": None})
    with moefold.open(run, tmp_path / "own") as job:
        while job.step_number < 4:
            metrics = job.step(job.loader.load_step(job.progress.next_batch_index()))
            assert metrics["lm_loss"] > 0
        job.save()
        mine = weights(job)
    with job_of(tmp_path, "loop") as job:
        job.last_step = 4
        job.train()
        assert equal(weights(job), mine) == []


def test_output_never_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path, watch={"plots": None, "experts_page": None}, train={"steps": 3})
    folders = [moefold.train(run).folder.name for _ in range(3)]
    assert folders == ["test", "test-2", "test-3"]


def test_load_model_reads_folders_checkpoints_and_runs(tmp_path: Path, folder: Path) -> None:
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    step = next((tmp_path / "out").glob("step-*"))
    found = [moefold.load_model(p, "float64").logits(ids) for p in (folder, tmp_path / "out", step)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    narrow = moefold.load_model(folder, "bfloat16")
    assert narrow.head_weight.dtype == torch.float32
    assert narrow.logits(ids).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="not a checkpoint"):
        moefold.load_model(tmp_path / "corpus")


def test_what_is_made_again_is_settled_when_a_run_begins() -> None:
    """Within a limit by its plan; one that nothing fits is refused with what it would take."""
    world, auto = World.single(), "layout.recompute={kind: auto, limit: %s MB}"
    given = ["train.precision=fp32", "train.micro_batch=4"]
    kept, tight = (
        resolve_recompute(load_run("tiny", [*given, auto % limit]), world).layout.recompute
        for limit in ("100", "2.6")
    )
    assert kept is None and isinstance(tight, Selective | Full)
    with pytest.raises(ValueError, match=r"limit 0.001 GB: .* needs 0\.00\d+ GB"):
        resolve_recompute(load_run("tiny", [*given, auto % "1"]), world)
