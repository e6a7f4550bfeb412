"""The loop: resuming, signals, non-finite steps, accumulation, identity, determinism."""

import errno
import gc
import json
import math
import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.disk import Disk
from moefold.checkpoint.errors import SaveError
from moefold.checkpoint.folder import find_newest
from moefold.checkpoint.lock import LockError
from moefold.config.base import to_dict
from moefold.config.dump import identity, to_portable_dict
from moefold.config.load import load
from moefold.data.config import FileTokenizer
from moefold.moe.config import Bias
from moefold.run import Run
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.checkpoint import CheckpointHook
from moefold.training.hooks.config import Profile
from moefold.training.hooks.logs import MetricsHook
from moefold.training.hooks.profile import ProfileHook, ProfileStart
from moefold.training.nonfinite import NonFiniteStep
from moefold.training.resume import differences, with_current_defaults
from moefold.training.run_folder import traced_walls
from moefold.training.state import restore
from moefold.training.step import gradients
from moefold.training.trainer import Interrupted, Trainer
from tests.cpu.checkpoint_tools import start_child
from tests.cpu.hubs import decoder_of, on_disk, weights_of, write_hub
from tests.cpu.runs import Notes, equal, job_of, raw_run, run_of, weights

OPTIMIZERS = {
    "adamw": {"kind": "adamw", "lr": 0.01, "schedule_lr": {"kind": "wsd", "warmup": 2}},
    "muon": {"kind": "muon", "lr": 0.01, "schedule_lr": {"kind": "cosine", "warmup": 2}},
}
DEEPSEEK = {
    "family": "deepseek_v3",
    "shape": {
        "hidden": 16,
        "layers": 2,
        "heads": 2,
        "kv_rank": 8,
        "nope_dim": 8,
        "rope_dim": 4,
        "v_dim": 8,
        "experts": 4,
        "top_k": 2,
        "expert_width": 16,
        "shared_width": 16,
        "dense_layers": 1,
        "dense_width": 24,
    },
    "groups": {"count": 2, "keep": 1},
    "balance": [{"kind": "bias"}, {"kind": "aux", "over": "sequence"}],
}


def finished(folder: Path, out: str, **changes: Any) -> dict[str, torch.Tensor]:
    with job_of(folder, out, **changes) as job:
        job.train()
        return weights(job)


def test_training_learns(tmp_path: Path) -> None:
    notes = Notes()
    with job_of(tmp_path, "out", notes, train={"steps": 30}) as job:
        job.train()
        held_out = job.evaluate()
    assert notes.steps[-1]["lm_loss"] < notes.steps[0]["lm_loss"] - 1
    assert [m["step"] for m in notes.steps] == list(range(1, 31))
    assert notes.steps[-1]["tokens"] == 30 * 4 * 16
    loss, bits = held_out["val/text/loss"], held_out["val/text/bits_per_byte"]
    assert 0 < bits < 8 and loss == held_out["val_loss"]


def test_the_last_evaluation_can_read_everything(tmp_path: Path) -> None:
    watch = {"evaluate": {"every": 1, "tokens": 32, "at_end": "all"}}
    with job_of(tmp_path, watch=watch, train={"steps": 3}) as job:
        whole = job.evaluate(tokens=10**6)
        assert job.evaluate() != whole
        job.train()
        assert job.evaluate() == job.evaluate(tokens=10**6) != job.evaluate(tokens=32)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights after an unbroken run of each optimizer in bf16."""
    where = tmp_path_factory.mktemp("wholes")
    return {
        name: finished(where, name, optim=optim, train={"precision": "bf16"})
        for name, optim in OPTIMIZERS.items()
    }


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize(
    "at", [1, *(pytest.param(n, marks=pytest.mark.matrix) for n in (2, 3, 5, 6)), 4, 7]
)
def test_a_resumed_run_ends_bit_for_bit_as_the_unbroken_one(
    tmp_path: Path, wholes: dict[str, dict[str, torch.Tensor]], optim: str, at: int
) -> None:
    changes = {"optim": OPTIMIZERS[optim], "train": {"precision": "bf16"}}
    with job_of(tmp_path, "broken", **changes) as job:
        job.last_step = at
        job.train()
    with job_of(tmp_path, "broken", **changes) as job:
        assert job.step_number == at and job.resumed_from is not None
        job.train()
        assert equal(weights(job), wholes[optim]) == []


def test_bias_and_latent_models_resume_bit_for_bit(tmp_path: Path) -> None:
    # An odd number of moves of one size never ends at zero.
    changes = {"model": DEEPSEEK, "train": {"steps": 7, "precision": "fp32"}}
    whole = finished(tmp_path, "whole", **changes)
    assert any("selection_bias" in name and tensor.any() for name, tensor in whole.items())
    with job_of(tmp_path, "broken", **changes) as job:
        job.last_step = 4
        job.train()
    with job_of(tmp_path, "broken", **changes) as job:
        job.train()
        assert equal(weights(job), whole) == []


@pytest.mark.slow
def test_killed_at_any_moment_a_run_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    """SIGKILL at different moments, a checkpoint after each step."""
    steps = 40
    whole = finished(tmp_path, "whole", train={"steps": steps, "precision": "fp32"})
    changes = {"train": {"steps": steps, "precision": "fp32"}}
    kills, (told, tell) = 0, os.pipe()

    def work() -> None:
        hooks = MetricsHook(), CheckpointHook(CheckpointPolicy(every=1), Console(quiet=True))
        with job_of(tmp_path, "killed", *hooks, **changes) as job:
            os.write(tell, b"ready")
            job.train()

    for delay in (0.05, 0.2, 0.11):
        process = start_child(work)
        assert os.read(told, 5) == b"ready"
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)
        kills += os.waitpid(process, 0)[1] == signal.SIGKILL
    os.close(told)
    os.close(tell)
    assert kills >= 1
    with job_of(tmp_path, "killed", MetricsHook(), **changes) as job:
        job.train()
        assert job.step_number == steps
        assert equal(weights(job), whole) == []
    lines = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))


def test_a_signal_saves_and_ends_the_run(tmp_path: Path) -> None:
    class Signal(Notes):
        def on_step(self, job: Any, metrics: Any) -> None:
            super().on_step(job, metrics)
            if job.step_number == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    notes = Signal()
    with (
        job_of(tmp_path, "out", notes) as job,
        pytest.raises(Interrupted, match=r"SIGTERM.*step 3"),
    ):
        job.train()
    assert len(notes.steps) == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with job_of(tmp_path, "out") as job:
        assert job.step_number == 3
        job.train()
        resumed = weights(job)
    assert equal(resumed, finished(tmp_path, "whole")) == []


class Poison:
    """Makes the final norm give NaN at chosen places in the data's order, and nowhere else."""

    def __init__(self, job: Trainer, places: set[int], value: float = math.nan) -> None:
        self.seen: list[int] = []
        plain = job.reader.read

        def step(place: int) -> Any:
            self.seen.append(place)
            return plain(place)

        def spoil(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
            return out * value if self.seen[-1] in places else out

        job.reader.read = step  # type: ignore[method-assign]
        job.model.norm.register_forward_hook(spoil)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_step_stops_the_run_before_the_update(tmp_path: Path, value: float) -> None:
    with job_of(tmp_path) as job:
        Poison(job, {2}, value)
        job.step()
        job.step()
        before = weights(job)
        with pytest.raises(NonFiniteStep, match=r"(?s)step 3 .*Documents of the step: text \d+"):
            job.step()
        assert equal(weights(job), before) == [] and job.step_number == 2


def test_skip_leaves_the_update_out_and_goes_on_up_to_its_limit(tmp_path: Path) -> None:
    notes = Notes()
    changes = {"train": {"on_nonfinite": {"kind": "skip", "limit": 2}}}
    with job_of(tmp_path, "out", notes, **changes) as job:
        Poison(job, {1, 4, 5, 6})
        job.step()
        before = weights(job)
        job.step()
        assert equal(weights(job), before) == []
        with pytest.raises(NonFiniteStep, match="limit of 2 is used up"):
            job.train()
    assert [m.get("skipped", 0) for m in notes.steps] == [0, 1, 0, 0, 1, 1]


def test_rewind_goes_back_and_leaves_the_data_out(tmp_path: Path) -> None:
    notes = Notes()
    changes = {"train": {"on_nonfinite": {"kind": "rewind", "limit": 2}, "steps": 5}}
    with job_of(tmp_path, "out", notes, **changes) as job:
        poison = Poison(job, {3})
        job.step()
        job.step()
        job.save()
        job.train()
        assert poison.seen == [0, 1, 2, 3, 2, 4, 5]
        assert job.progress.excluded == (3,) and notes.rewinds == 1
    with job_of(tmp_path, "out", **changes) as job:
        assert job.progress.excluded == (3,) and job.step_number == 5


@pytest.mark.parametrize("quantise", [None, "mxfp8"])
def test_what_products_read_goes_back_with_the_weights(
    tmp_path: Path, quantise: str | None
) -> None:
    """Copies in 16 bits, and codes: the step after a checkpoint is the same once it is read again.

    Plant: what is read in place is no change.
    """
    with job_of(tmp_path, train={"precision": "bf16", "quantise": quantise}) as job:
        job.step()
        path = job.save()
        job.saver.wait()
        seen = [job.step()["lm_loss"]]
        gradients(job.state, job.loader.load_step(2), 16)  # of a step that is given up
        job.progress = restore(path, job.state, job.optimizer)
        job.state.refresh_weights()
        seen.append(job.step()["lm_loss"])
    assert seen[0] == seen[1]


def test_rewinds_end_where_other_data_does_not_help(tmp_path: Path) -> None:
    """A step that fails on any data: good steps made again before it must not reset the limit."""
    notes = Notes()
    changes = {"train": {"on_nonfinite": {"kind": "rewind", "limit": 2}}}
    with job_of(tmp_path, "out", notes, **changes) as job:

        def spoil(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
            assert len(notes.steps) < 20, "rewinds without end"
            return out * math.nan if job.step_number == 3 else out

        job.model.norm.register_forward_hook(spoil)
        with pytest.raises(NonFiniteStep, match="limit of 2 is used up"):
            job.train()
    assert notes.rewinds == 2 and [m["step"] for m in notes.steps] == [1, 2, 3] * 3


def test_a_rewind_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    changes = {"train": {"on_nonfinite": {"kind": "rewind"}, "steps": 6}}
    with job_of(tmp_path, "out", **changes) as job:
        Poison(job, {4})
        for step in (2, 4):
            job.last_step = step
            job.train()
        damage(tmp_path / "out" / "step-00000004")
        job.step()
        assert job.step_number == 2 and job.progress.excluded == (4,)


@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_save_behind_the_steps_that_failed_keeps_no_later_one_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_failure: str
) -> None:
    """The disk refuses for a moment; what failed then is no reason to leave out what can be."""
    watch = {"checkpoint": {"every": None, "asynchronous": True, "on_failure": on_failure}}
    with job_of(tmp_path, watch=watch) as job:
        job.step()
        with monkeypatch.context() as refusing:
            refused = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
            refusing.setattr(Disk, "write", refused)
            job.save()
            job.saver._thread.join()  # type: ignore[union-attr]
        with pytest.raises(SaveError, match="Read-only") if on_failure == "stop" else nullcontext():
            job.save()
    assert refused.called and (find_newest(tmp_path / "out") is None) == (on_failure == "stop")


def test_a_hook_that_fails_at_the_end_costs_no_save_behind_the_steps(tmp_path: Path) -> None:
    class Failing(Hook):
        def on_stop(self, job: Any, error: BaseException | None) -> None:
            raise RuntimeError("failed")

    watch = {"checkpoint": {"every": None, "asynchronous": True}}
    job = job_of(tmp_path, "out", Failing(), watch=watch)
    job.step()
    job.save()
    with pytest.raises(RuntimeError, match="failed"):
        job.close()
    assert find_newest(tmp_path / "out") == tmp_path / "out" / "step-00000001"


def test_copies_of_steps_that_a_rewind_left_are_void(tmp_path: Path) -> None:
    """A run that is broken off after it went back goes on from there, and leaves the data out."""
    local = {"folder": str(tmp_path / "copies"), "every": 1}
    changes: dict[str, Any] = {"train": {"on_nonfinite": {"kind": "rewind"}, "steps": 6}}
    changes["watch"] = {"checkpoint": {"every": None, "local": local}}
    with job_of(tmp_path, "out", **changes) as job:
        Poison(job, {4})
        job.last_step = 2
        job.train()
        for _ in range(3):
            job.step()
        assert job.step_number == 2
    with job_of(tmp_path, "out", **changes) as job:
        assert job.step_number == 2 and job.progress.excluded == (4,)


def test_a_trace_is_of_its_own_step_after_a_rewind(tmp_path: Path) -> None:
    changes = {"train": {"on_nonfinite": {"kind": "rewind"}, "steps": 4}}
    end = ProfileHook(Profile(steps=(1, 4)))
    notes = Notes()
    with job_of(tmp_path, "out", end, notes, ProfileStart(end), **changes) as job:
        Poison(job, {3})
        for _ in range(3):
            job.step()
        of_the_fourth = job._trace
        job.step()
        assert job.step_number == 0 and job._trace not in (None, of_the_fourth)
        job.train()
    traces = sorted(path.name for path in (tmp_path / "out" / "profile").iterdir())
    written = [f"step_{step}{suffix}" for step in (1, 4) for suffix in (".json", ".walls.json")]
    assert traces == written
    walls = traced_walls(tmp_path / "out")
    assert [traced["step"] for traced in walls] == [1, 4]
    times = {figures["step"]: figures["step_time_s"] for figures in notes.steps}
    for traced in walls:
        parts = sum(traced["parts"].values())
        assert parts == pytest.approx(times[traced["step"]], rel=0.03)


def test_a_rewind_to_the_start_finds_the_biases_of_the_start(tmp_path: Path) -> None:
    changes = {"model": DEEPSEEK, "train": {"on_nonfinite": {"kind": "rewind"}}}
    with job_of(tmp_path, "out", **changes) as job:
        before = weights(job)
        Poison(job, {3})
        for _ in range(3):
            job.step()
        assert any("bias" in name for name in equal(weights(job), before))
        job.step()
        assert job.step_number == 0 and equal(weights(job), before) == []


def test_a_run_that_was_stopped_can_go_on_in_the_same_process(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.step()
        job.request_stop("asked")
        with pytest.raises(Interrupted, match="asked; saved step 1"):
            job.train()
        assert job.train()["step"] == 8


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_was_built_is_not_searched_for_cycles_while_steps_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: int
) -> None:
    """Else each rank does so at another step, and all others wait; what others froze stays so."""
    calls = list[str]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))

    class Steps(Hook):
        def on_step(self, job: JobView, metrics: Figures) -> None:
            calls.append("step")

    with job_of(tmp_path, "out", Steps()) as job:
        job.train()
    steps = ["step"] * job.last_step
    assert calls == (steps if frozen else ["freeze", *steps, "unfreeze"])


def test_a_failure_in_a_loop_of_ones_own_reaches_the_hooks(tmp_path: Path) -> None:
    ends: list[BaseException | None] = []

    class Ends(Notes):
        def on_stop(self, job: Any, error: BaseException | None) -> None:
            ends.append(error)

    with pytest.raises(KeyError, match="mine"), job_of(tmp_path, "out", Ends()) as job:
        job.step()
        raise KeyError("mine")
    with job_of(tmp_path, "other", Ends()) as job:
        job.step()
    assert [type(error) for error in ends] == [KeyError, type(None)]


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    found = []
    for micro_batch in (1, 2, 4):
        changes = {
            "train": {"precision": "fp64", "micro_batch": micro_batch},
            "model": {
                **raw_run(tmp_path)["model"],
                "balance": [{"kind": "aux", "over": "sequence"}, {"kind": "z"}],
            },
        }
        with job_of(tmp_path, f"m{micro_batch}", **changes) as job:
            job.step()
            found.append({n: p.grad for n, p in job.model.named_parameters() if p.grad is not None})
    for other in found[1:]:
        for name, grad in found[0].items():
            assert torch.allclose(other[name], grad, rtol=1e-9, atol=1e-13), name


def test_the_bias_moves_once_a_step_whatever_runs_in_between(tmp_path: Path) -> None:
    """Three micro-batches and an evaluation. Plant: update per micro-batch."""
    changes = {"model": DEEPSEEK, "train": {"batch": 3, "micro_batch": 1, "precision": "fp32"}}
    with job_of(tmp_path, **changes) as job:
        (_, mixture), *_ = job.model.moe_layers()
        bias = mixture.router.selection_bias
        assert bias is not None
        rates = [term.rate for term in mixture.record.balance if isinstance(term, Bias)]
        before = bias.clone()
        job.step()
        load_E = mixture.balance.counters.load_E.clone()
        moved = bias - before
        assert int(load_E.sum()) == 3 * 16 * mixture.record.router.top_k
        want = (load_E.double().mean() - load_E).sign().float() * rates.pop()
        assert torch.allclose(moved, want)
        job.evaluate()
        assert torch.equal(bias, before + moved)
        assert torch.equal(mixture.balance.counters.load_E, load_E)


def damage(checkpoint: Path) -> None:
    """Flip one bit of a checkpoint's weights."""
    shard = next(checkpoint.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)


def test_another_computation_is_refused_with_a_diff(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.last_step = 2
        job.train()
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.01 -> 0\.02[\s\S]*--fork"):
        job_of(tmp_path, optim={**OPTIMIZERS["adamw"], "lr": 0.02})
    with pytest.raises(ValueError, match=r"seed: 1 -> 2"):
        job_of(tmp_path, seed=2)
    with pytest.raises(ValueError, match=r"train\.micro_batch: 2 -> 1"):
        job_of(tmp_path, train={"micro_batch": 1})
    with job_of(tmp_path, train={"steps": 12, "loss_chunk": 16}, layout={"experts": "loop"}) as job:
        assert job.step_number == 2


def test_a_difference_inside_a_list_is_named_by_its_place(tmp_path: Path) -> None:
    """Of sources that are weighed otherwise the tokens are the same, and none else is told."""
    with job_of(tmp_path) as job:
        job.last_step = 1
        job.train()
    run = run_of(tmp_path)
    (source,) = run.data.train
    heavy = {"train": [source.model_copy(update={"weight": 3.0}).model_dump()]}
    with pytest.raises(ValueError, match=r"data\.train\[0\]\.weight: 1\.0 -> 3\.0\nUse"):
        job_of(tmp_path, data=heavy)


def test_a_field_that_a_later_version_adds_refuses_no_old_folder(tmp_path: Path) -> None:
    """Plant: compare what was stored with today's records as they stand."""
    run = run_of(tmp_path)
    older = to_dict(run)
    del older["train"]["on_nonfinite"], older["optim"]["eps"]
    assert differences(with_current_defaults(older, run), to_dict(run)) == []
    older["optim"]["lr"] = 0.5
    assert differences(with_current_defaults(older, run), to_dict(run)) == ["optim.lr: 0.5 -> 0.01"]
    older["optim"]["kind"] = "gone"
    assert "optim.kind: gone -> adamw" in differences(
        with_current_defaults(older, run), to_dict(run)
    )


def test_a_path_that_moved_is_no_difference_and_another_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, paths were stored as they were written, from the working folder."""
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path)
    for before in ("corpus/*.txt", "/gone/*.txt", "*.txt"):
        older = to_dict(run)
        older["data"]["train"][0]["files"] = [before]
        del older["train"]["on_nonfinite"]
        assert differences(with_current_defaults(older, run), to_dict(run)) == []
    older["data"]["train"][0]["files"] = ["corpus/*.md"]
    (said,) = differences(with_current_defaults(older, run), to_dict(run))
    assert said.startswith("data.train[0].files[0]: corpus/*.md -> ")
    there = run_of(tmp_path / "there")
    assert to_portable_dict(there) == to_portable_dict(run) and identity(there) == identity(run)
    data = run.data.model_copy(update={"tokenizer": FileTokenizer(path="other")})
    assert identity(run.model_copy(update={"data": data})) != identity(run)


def test_a_model_folder_that_describes_another_model_is_refused(tmp_path: Path) -> None:
    """Its path is the same, its weights fit; one number of its config.json is another."""
    decoder, hub = decoder_of("mixtral").model_copy(update={"vocab": 300}), tmp_path / "hub"
    write_hub(hub, decoder, on_disk(decoder, weights_of(decoder)))

    def job() -> Trainer:
        raw = {**raw_run(tmp_path), "model": {"from": str(hub)}}
        return Trainer(load(Run, raw).record, tmp_path / "out", cache=tmp_path / "prepared")

    with job() as begun:
        begun.save()
    with job() as same:
        assert same.resumed_from is not None
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    with pytest.raises(ValueError, match=r"model: its description \(config\.json or code\)"):
        job()


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = finished(tmp_path, "whole")
    with job_of(tmp_path) as job:
        for step in (2, 4):
            job.last_step = step
            job.train()
    damage(tmp_path / "out" / "step-00000004")
    with job_of(tmp_path) as job:
        assert job.step_number == 2 and "Falling back to step-00000002" in caplog.text
        job.train()
        assert equal(weights(job), whole) == []


def test_changed_data_is_noticed(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.last_step = 2
        job.train()
    (tmp_path / "corpus").joinpath("00.txt").write_text("other words entirely\n")
    import tests.cpu.runs as runs

    plain = runs.corpus
    try:
        runs.corpus = lambda folder, documents=12: folder / "*.txt"  # type: ignore[assignment]
        with pytest.raises(ValueError, match="tokens or the tokenizer"):
            job_of(tmp_path)
    finally:
        runs.corpus = plain


def test_a_run_that_is_closed_makes_no_step(tmp_path: Path) -> None:
    """Its folder is no longer locked: another run may write to it."""
    with job_of(tmp_path) as job:
        job.step()
    with pytest.raises(ValueError, match="is closed; open it again"):
        job.step()
    assert job.evaluate(), "what writes nothing still works"


def test_two_runs_cannot_write_one_folder(tmp_path: Path) -> None:
    with job_of(tmp_path), pytest.raises(LockError):
        job_of(tmp_path)
    job_of(tmp_path).close()


def test_deterministic_runs_are_equal_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        found = [finished(tmp_path, out, deterministic=True) for out in ("a", "b")]
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
    assert equal(*found) == []


def test_more_than_one_rank_is_refused_clearly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="such as 4"):
        job_of(tmp_path, layout={"sizes": "ep4"})


def test_recompute_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    whole = finished(tmp_path, "none", model=DEEPSEEK)
    modules = ["norms", "attention", "mla_up", "ffn", "shared", "experts", "permute"]
    for name, record in (
        ("full", {"kind": "full"}),
        ("some", {"kind": "selective", "modules": modules}),
    ):
        assert (
            equal(finished(tmp_path, name, model=DEEPSEEK, layout={"recompute": record}), whole)
            == []
        )
