"""What all ranks decide together: bad steps, replays, signals, and what must be the same."""

import errno
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.comm.agree import Disagreement
from moefold.comm.collectives import sum_
from moefold.comm.environment import RankInfo
from moefold.comm.launch import launch_all
from moefold.comm.world import World
from moefold.config.load import load
from moefold.data.config import DataError
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.run import Run
from moefold.training import resume, trainer
from moefold.training.distributed import open_world
from moefold.training.nonfinite import LargeGradients, NonFiniteStep
from moefold.training.step import StepFigures
from moefold.training.trainer import Interrupted, Trainer
from tests.cpu.runs import corpus, raw_run
from tests.gloo.harness import one_at_a_time

Told = dict[str, str]
TIME_OUT_S = 60.0


def run_of(folder: Path, **changes: Any) -> Run:
    train = {"steps": 4, "batch": 4, "micro_batch": 1, "precision": "fp64"}
    watch = {"time_out_s": TIME_OUT_S}
    return load(Run, raw_run(folder, **{"train": train, "watch": watch, **changes})).record


def policy(skip_norm: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    train = {"steps": 4, "batch": 4, "micro_batch": 1, "precision": "fp64"}
    return {"train": {**train, "on_nonfinite": {"kind": "stop", **fields}, "skip_norm": skip_norm}}


def on_two(function: Callable[..., Told], folder: Path) -> list[Told]:
    """Run a function on two data ranks and return what each has to tell."""
    with one_at_a_time():
        return launch_all(function, 2, (str(folder),), TIME_OUT_S, limit_s=4 * TIME_OUT_S)


def error_of(job: Trainer, kind: type[BaseException] = NonFiniteStep) -> str:
    with pytest.raises(kind) as caught:
        job.train()
    return str(caught.value)


def spoil(job: Trainer) -> None:
    """Let this rank's share of the weights be no numbers."""
    for held in job.state.weights():
        if held.tensor.is_floating_point():
            held.tensor.detach().fill_(torch.nan)


def bad_steps(info: RankInfo, folder: str) -> Told:
    told: Told = {}
    home = Path(folder)
    run = run_of(home, **policy(replay=True))
    with open_world(run, info, home / "out") as world:
        with Trainer(run, home / "out", world=world) as job:
            named = {f"{o.name} {o.document}" for b in job.loader.load_step(0) for o in b.sources}
            told["documents"] = "; ".join(sorted(named))
            if info.rank == 1:
                spoil(job)
            job.state.refresh_weights()
            told["data"] = error_of(job)
        with Trainer(run, home / "machine", world=world) as job:
            compute, calls = trainer.gradients, [0]

            def flaky(*args: Any, **more: Any) -> StepFigures:
                figures = compute(*args, **more)
                calls[0] += 1
                if info.rank == 1 and calls[0] == 2:
                    grad = next(held for held in job.state.gradients() if held.tensor.numel())
                    grad.tensor.view(torch.int64).reshape(-1)[0] ^= 1
                return StepFigures(float("nan"), figures.grad_norm, {}, figures.tokens)

            trainer.gradients = flaky
            try:
                told["machine"] = error_of(job)
            finally:
                trainer.gradients = compute
        run = run_of(home, **policy({"above": 1e-9, "limit": 1}))
        with Trainer(run, home / "large", world=world) as job:
            told["large"] = error_of(job, LargeGradients)
            told["skipped"] = f"{job.progress.skipped} of {job.step_number}"
    return told


def signals(info: RankInfo, folder: str) -> Told:
    home = Path(folder)
    run = run_of(home)
    with (
        open_world(run, info, home / "out") as world,
        Trainer(run, home / "out", world=world) as job,
    ):
        step = job.reader.read

        def warned(place: int) -> Any:
            if place == 1 and info.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(place)

        job.reader.read = warned  # type: ignore[method-assign]
        told = {"text": error_of(job, Interrupted), "step": str(job.step_number)}
        for place in (2, 0):  # read ahead, and as the first of a process
            folder_of_run = home / f"unread-{place}"
            with Trainer(run, folder_of_run, world=world) as unread:
                if info.rank == 1:
                    disk_that_fails(unread, place)
                told[f"unread {place}"] = error_of(unread, DataError)
            with Trainer(run, folder_of_run, world=world) as resumed:
                told[f"resumed {place}"] = str(resumed.step_number)
        return told


def disk_that_fails(job: Trainer, place: int) -> None:
    """Let this rank's reads of a place of the data's order fail as a broken disk's do."""
    step = job.loader.load_step

    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def load_step(at: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if at == place:
                patch.setattr(os, "pread", fail)
            return step(at)

    job.loader.load_step = load_step  # type: ignore[method-assign]


def differing(info: RankInfo, folder: str) -> Told:
    home, told = Path(folder), {}
    odd = info.rank == 1
    with open_world(run_of(home), info, home / "out") as world:

        def refused(run: Run) -> str:
            with pytest.raises(Disagreement) as caught:
                Trainer(run, home / "out", world=world, cache=home / f"cache-{info.rank}")
            return str(caught.value)

        told["config"] = refused(run_of(home, seed=2 if odd else 1))
        version = resume.code_version
        resume.code_version = lambda: "another" if odd else version()  # type: ignore[assignment]
        told["code"] = refused(run_of(home))
        resume.code_version = version
        vocabulary = {"kind": "bpe", "vocab": 280 if odd else 300}
        source = {"source": "text", "files": [str(home / "corpus" / "*.txt")], "holdout": 0.2}
        data = {"seq": 16, "tokenizer": vocabulary, "train": [source]}
        told["tokenizer"] = refused(run_of(home, data=data))
        if odd:
            corpus(home / "other", documents=10)
        files = [str(home / ("other" if odd else "corpus") / "*.txt")]
        other = {**source, "files": files}
        kept = {"seq": 16, "tokenizer": {"kind": "bpe", "vocab": 300}, "train": [other]}
        told["data"] = refused(run_of(home, data=kept))
    return told


def waits(info: RankInfo, folder: str) -> Told:
    import time

    with World.open(Folding(Sizes(), 2), "cpu", TIME_OUT_S) as world:
        ranks = world.group("world")
        sum_(torch.ones(1), ranks)
        before = world.recorder.waited_s
        if info.rank == 1:
            time.sleep(1.5)
        sum_(torch.ones(1), ranks)
        return {"waited": str(world.recorder.waited_s - before)}


def test_a_bad_step_is_reported_by_all_with_the_documents_of_all(tmp_path: Path) -> None:
    """Cases 14 and 16."""
    told = on_two(bad_steps, tmp_path)
    assert told[0]["data"] == told[1]["data"]
    assert told[0]["documents"] != told[1]["documents"], "ranks have the same data: shows nothing"
    for rank in told:
        for document in rank["documents"].split("; "):
            assert document in rank["data"]
    assert "Replay: a fault of the data or the model" in told[0]["data"]
    assert "Gradients not finite on rank" in told[0]["data"]
    assert "Replay: a machine fault: rank 1 got different bits" in told[0]["machine"]
    assert told[0]["machine"] == told[1]["machine"]
    assert told[0]["large"] == told[1]["large"]
    assert told[0]["skipped"] == told[1]["skipped"] == "1 of 1"


def test_a_signal_or_a_failed_read_on_any_rank_ends_all_at_one_step(tmp_path: Path) -> None:
    """Case 20. What fails is told by all ranks, and what was trained is saved."""
    told = on_two(signals, tmp_path)
    assert told[0]["step"] == told[1]["step"] == "2"
    assert "another rank was asked to stop; saved step 2" in told[0]["text"]
    for place in (2, 0):
        message = told[0][f"unread {place}"]
        assert message == told[1][f"unread {place}"]
        assert re.match(r"rank 1: .*\.bin: byte \d+ cannot be read: .*restore the file", message)
        assert told[0][f"resumed {place}"] == told[1][f"resumed {place}"] == str(place)


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return on_two(differing, tmp_path_factory.mktemp("differing"))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("config", "run.seed: 1 on rank 0; 2 on rank 1"),
        ("code", 'moefold: "'),
        ("tokenizer", "run.data: "),
        ("data", "data: "),
    ],
)
def test_ranks_that_differ_stop_with_the_key(
    differences: list[Told], what: str, named: str
) -> None:
    """Case 18."""
    assert differences[0][what] == differences[1][what]
    assert named in differences[0][what]
    assert "on rank 0" in differences[0][what] and "on rank 1" in differences[0][what]


def test_waiting_for_others_is_told_from_being_busy(tmp_path: Path) -> None:
    """Case 19."""
    told = on_two(waits, tmp_path)
    assert float(told[0]["waited"]) > 0.5 + float(told[1]["waited"])
