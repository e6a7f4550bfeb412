"""``moefold train``, ``sample``, ``report`` and ``explain`` as a person types them."""

import json
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from moefold.cli.main import main
from moefold.planner.hardware import default_machine_file
from moefold.training import banner
from moefold.training.run_folder import History, StepLines
from moefold.training.state import iter_state
from moefold.training.trainer import Trainer
from tests.cpu.runs import job_of, raw_run, run_of
from tests.pure.test_planner_machine import MACHINE
from tests.pure.test_training_history import Page

WATCH = {
    "evaluate": {"every": 4, "baselines": ["bigram", "xz"]},
    "sample": {"every": 5, "prompts": ["token", "expert"], "tokens": 6},
    "profile": {"steps": [2]},
    "health": {"every": 2},
    "experts_page": {"tokens": 64},
    "metrics": {"tensorboard": "auto"},
    "checkpoint": {"every": 4},
}

BARE = {
    "evaluate": None,
    "health": None,
    "plots": None,
    "experts_page": None,
    "metrics": {"tensorboard": "off"},
    "checkpoint": {"every": None},
}


def run_file(folder: Path, **changes: Any) -> Path:
    """Write a tiny run on a tiny corpus."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(raw_run(folder, **{"watch": WATCH, **changes})))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained to its end: its folder, with ``run.yaml`` beside it."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["train", str(run_file(folder)), "--folder", str(folder / "out"), "watch.plots={}"]
    assert main(words) == 0
    return folder / "out"


def test_the_folder_holds_what_was_asked_for(trained: Path) -> None:
    """Every file a person looks for, and no draft."""
    found = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    wanted = {
        "run.yaml", "metrics.jsonl", "expert_load.jsonl", "events.jsonl", "baselines.json",
        "samples.txt", "loss.png", "expert_load.png", "experts.html", "profile/step_2.json",
    }  # fmt: skip
    assert wanted <= found, wanted - found
    assert not [name for name in found if ".part" in name]
    assert {path.name for path in trained.glob("step-*")} == {"step-00000004", "step-00000008"}


def test_the_figures_have_their_names(trained: Path) -> None:
    """Flat keys that programs rely on; each step once."""
    lines = History.read(trained).lines
    assert [line["step"] for line in lines] == list(range(1, 9))
    always = {
        "tokens",
        "lm_loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "mfu",
        "step_time_s",
        "router/z",
    }
    assert all(always <= line.keys() for line in lines)
    assert {line["step"] for line in lines if "val/text/bits_per_byte" in line} == {4, 8}
    assert "moe/1/load_max_over_mean" in lines[1] and "moe/1/load_max_over_mean" not in lines[2]


def test_the_resolved_run_file_runs_as_it_is(trained: Path, tmp_path: Path, capsys: Any) -> None:
    """Defaults are written out, so a later version of the defaults changes nothing."""
    assert main(["explain", str(trained / "run.yaml"), "--json"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    given = str(trained.parent / "run.yaml")
    assert main(["explain", given, "--json", "watch.plots={}"]) == 0
    assert resolved["run"] == json.loads(capsys.readouterr().out)["run"]


def test_samples_are_told_by_step_and_prompt(trained: Path) -> None:
    """At the step that is due, and at the end."""
    text = (trained / "samples.txt").read_text()
    heads = re.findall(r"^=== step (\d+) · '(\w+)'\n(\w+)", text, re.MULTILINE)
    assert [head[:2] for head in heads] == [
        ("5", "token"), ("5", "expert"), ("8", "token"), ("8", "expert"),
    ]  # fmt: skip
    assert all(start.startswith(prompt) for _, prompt, start in heads)


def test_a_trace_opens(trained: Path) -> None:
    """Chrome's format: a list of events, forward and backward among them."""
    trace = json.loads((trained / "profile" / "step_2.json").read_text())
    assert any("backward" in str(event.get("name")).lower() for event in trace["traceEvents"])


def test_the_page_shows_the_model_s_routing(trained: Path) -> None:
    """Two layers of 4 experts, two a token; the text is the held-out text."""
    found = Page((trained / "experts.html").read_text())
    text = "".join(found.data["tokens"])
    corpus = [path.read_text() for path in (trained.parent / "corpus").glob("*.txt")]
    assert len(text) > 60 and any(document.startswith(text) for document in corpus)
    assert [(x["name"], x["experts"], x["top_k"]) for x in found.data["layers"]] == [
        ("0", 4, 2), ("1", 4, 2),
    ]  # fmt: skip
    assert all(sum(x["load"]) == pytest.approx(1, abs=1e-3) for x in found.data["layers"])


def test_a_finished_run_says_so_and_goes_on_when_asked(trained: Path, capsys: Any) -> None:
    """More steps are no other run; its past stays as it is."""
    again = ["train", str(trained.parent / "run.yaml"), "--folder", str(trained)]
    before = History.read(trained).lines
    assert main(again) == 0
    assert "step 8 is done already" in capsys.readouterr().out
    assert main(["train", "--folder", str(trained), "train.steps=5"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "step 8 is done already; to train further" in said
    assert "train.steps=16 train.extend=constant" in said
    assert "0 steps to go, 0 tokens" in said and "(kept from the run's start;" in said
    assert main([*again, "train.steps=10"]) == 2
    said = capsys.readouterr().err
    assert "from 0.005 at step 8 to 0.01 at step 9" in said and "train.extend" in said
    assert main([*again, "train.steps=10", "train.extend=decay", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step"] == 10 and answer["restarts"] == 1 and answer["status"] == 0
    lines = History.read(trained).lines
    assert lines[:8] == before and [line["step"] for line in lines[8:]] == [9, 10]
    rates = [line["lr"] for line in lines[7:]]
    assert rates == pytest.approx([0.005, 0.005, 0.0025])


def test_another_run_is_refused_and_can_be_forked(
    trained: Path, tmp_path: Path, capsys: Any
) -> None:
    """The refusal names what differs; the fork starts from the weights and says where from."""
    other = ["train", str(trained.parent / "run.yaml"), "--folder", str(trained), "optim.lr=0.02"]
    assert main(other) == 2
    said = capsys.readouterr().err
    assert "optim.lr: 0.01 -> 0.02" in said and "--fork" in said
    steps = ["train.steps=14", "train.extend=constant", "--until", "12"]
    assert main([*other, *steps, "--fork", str(tmp_path / "new")]) == 0
    fork = json.loads((tmp_path / "new" / "fork.json").read_text())
    first = History.read(tmp_path / "new").lines[0]
    assert fork["changed"] == ["optim.lr: 0.01 -> 0.02"] and fork["step"] == first["step"] - 1
    assert History.read(tmp_path / "new").lines[-1]["step"] == 12
    # Killed before its first own checkpoint, it would otherwise start from nothing.
    assert (tmp_path / "new" / f"step-{fork['step']:08d}").is_dir()
    assert main([*other, "--fork", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "name a new folder" in said and f"--folder {tmp_path / 'new'} without --fork" in said


def test_a_checkpoint_is_no_runs_folder_and_can_be_forked(
    trained: Path, tmp_path: Path, capsys: Any
) -> None:
    """A run that began at step 0 inside it would pass for one that goes on from it."""
    run, early = str(trained.parent / "run.yaml"), trained / "step-00000004"
    before = sorted(early.iterdir())
    for words in ([run], [], [run, "--dry-run"]):
        assert main(["train", *words, "--folder", str(early)]) == 2
        said = capsys.readouterr().err
        assert f"--folder {trained}," in said and f"--folder {early} --fork NEW" in said
    assert sorted(early.iterdir()) == before
    words = ["--folder", str(early), "--fork", str(tmp_path / "new"), "--until", "5"]
    assert main(["train", *words]) == 0, "the run of a checkpoint is that of its folder"
    assert [line["step"] for line in History.read(tmp_path / "new").lines] == [5]


def test_a_dry_run_leaves_no_trace(trained: Path, tmp_path: Path, capsys: Any) -> None:
    """The banner, in words and as figures; the folder it would write is not made."""
    run = [
        "train",
        str(trained.parent / "run.yaml"),
        "--folder",
        str(tmp_path / "dry"),
        "--dry-run",
    ]
    assert main(run) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("parameters", "aux_micro_batch: 0.01 in each of 2 layers, 0.02", "grouped_mm"):
        assert words in said, words
    assert main([*run, "--json", "train.steps=20", "--until", "15"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"] == str(tmp_path / "dry") and facts["resumed_from"] is None
    assert facts["last_step"] == 15 and facts["tokens_per_step"] == 64
    assert not list(tmp_path.iterdir())


def test_data_prepared_in_advance_is_found_beside_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    run, runs = str(run_file(tmp_path)), tmp_path / "runs"
    assert main(["data", "prepare", run, "--folder", str(runs / ".prepared")]) == 0
    monkeypatch.setattr("moefold.data.prepare._write", None)
    assert main(["train", run, "--folder", str(runs / "x"), "--dry-run"]) == 0


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_dry_run_writes_nothing_anywhere(
    trained: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, nproc: int
) -> None:
    """Its data is prepared in the system's temporary folder, and that is empty again."""
    scratch, work = tmp_path / "scratch", tmp_path / "work"
    scratch.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    layout = ["layout.zero=3", "--nproc", "2", "--layout", "ep2"] if nproc == 2 else []
    layout += ["layout.state={at: disk, folder: a/b}"]
    layout += ["layout.offload={disk: {modules: [experts], folder: c}}"]
    assert main(["train", str(trained.parent / "run.yaml"), *layout, "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().out or nproc == 2
    assert not list(work.rglob("*")) and not list(scratch.rglob("moefold*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--folder", "file/x"], "Not a directory: file/x"),
        (["--folder", "n" * 300], "File name too long"),
        (["--folder", "loop/x"], "Too many levels of symbolic links: loop/x"),
        (["--folder", "new/x", "data.train=[{source: text, files: [empty]}]"], "has no document"),
        (["--folder", "new/x", "--until", "99"], "most 8"),
    ],
)
@pytest.mark.parametrize(("dry", "nproc"), [(False, 1), (True, 1), (False, 2)])
def test_a_run_that_is_refused_leaves_no_folder(
    trained: Path,
    tmp_path: Path,
    monkeypatch: Any,
    capfd: Any,
    words: list[str],
    said: str,
    dry: bool,
    nproc: int,
) -> None:
    """The error is worded once, however many ranks meet it; what is prepared whole is kept."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("empty").touch()
    Path("loop").symlink_to("loop")
    layout = ["--nproc", "2", "--layout", "ep2"] if nproc == 2 else []
    run = ["train", str(trained.parent / "run.yaml"), *words, *layout, *["--dry-run"] * dry]
    assert main(run) == 2
    err = capfd.readouterr().err
    assert (err.count("error: "), err.count(said), err.count("Traceback")) == (1, 1, 0), err
    prepared = ["new"] if "--until" in words and not dry else []
    assert sorted(path.name for path in Path().iterdir()) == ["empty", "file", "loop", *prepared]
    assert not Path("new/x").exists()


def test_a_dry_run_of_a_begun_run_says_where_it_goes_on(trained: Path, capsys: Any) -> None:
    """And changes nothing there."""
    before = sorted(path.name for path in trained.iterdir())
    run = [
        "train",
        str(trained.parent / "run.yaml"),
        "--folder",
        str(trained),
        "--dry-run",
        "--json",
    ]
    assert main([*run, "train.steps=99", "train.extend=rewarm"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] >= 8 and "step-" in facts["resumed_from"]
    assert sorted(path.name for path in trained.iterdir()) == before


def test_balancing_is_said_of_all_layers_where_a_rank_has_some(tmp_path: Path) -> None:
    """A pipeline's first rank tells of the whole model."""
    with job_of(tmp_path) as job:
        sizes = SimpleNamespace(folding=SimpleNamespace(sizes=SimpleNamespace(pp=2)))
        held = SimpleNamespace(moe_layers=lambda: list(job.model.moe_layers())[:1])
        part: Any = SimpleNamespace(model=held, world=sizes, precision=job.precision, run=job.run)
        assert banner._balance(part) == dict(banner.banner_rows(job))["balance"]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_run_that_is_looked_at_says_the_same_without_values(tmp_path: Path, kind: str) -> None:
    """Plant: materialise its tensors, or leave out what the optimizer says of its device."""
    changes: Any = {"optim": {"kind": kind, "lr": 0.01}}
    with job_of(tmp_path, **changes) as job:
        job.step()
        job.save()
    with job_of(tmp_path, **changes) as job:
        whole = banner.banner_facts(job)
    run, places = run_of(tmp_path, **changes), {"cache": tmp_path / "prepared"}
    with Trainer(run, tmp_path / "out", scratch=tmp_path / "scratch", **places) as job:
        assert banner.banner_facts(job) == whole and whole["step"] == 1
        held = [held.tensor for _, held in iter_state(job.state, job.optimizer)]
        assert held and all(tensor.untyped_storage().device.type == "meta" for tensor in held)


def test_a_dry_run_of_what_no_machine_holds(trained: Path, tmp_path: Path, capsys: Any) -> None:
    """A trillion parameters, counted and not made."""
    run = ["train", str(trained.parent / "run.yaml"), "--folder", str(tmp_path / "dry")]
    shape = {"hidden": 8192, "layers": 48, "experts": 64, "expert_width": 16384}
    changes = [f"model.shape.{name}={size}" for name, size in shape.items()]
    assert main([*run, "--dry-run", "--json", *changes]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] > 1.2e12 and answer["state_bytes"] > 16 * 1.2e12
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc", "0"], "at least 1"),
        (["--layout", "ep2"], "such as 2"),
        (["--layout", "ep2", "--nproc", "3"], "such as 2"),
        (["--layout", "xp2"], "layout.sizes"),
        (["--until", "99"], "most 8"),
        (["--fork", "x"], "--folder OLD"),
        (["train.step=9"], "steps"),
        (["layout.recompute={kind: auto, limit: 1 MB}"], "raise the limit, or"),
        (["layout.state={at: disk, folder: /dev/null/x}"], "in /dev/null/x cannot be created"),
        (
            ["layout.offload.disk={modules: [attention], folder: /dev/null/x}"],
            "a file in /dev/null/x cannot be created",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, words: list[str], said: str
) -> None:
    """With status 2 and a sentence that says what to do."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(trained.parent / "run.yaml"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("step-*"))


def test_a_launchers_ranks_are_not_multiplied(trained: Path, monkeypatch: Any, capsys: Any) -> None:
    """Each process that a launcher started is one rank already."""
    place = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "MASTER_ADDR": "-", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    assert main(["train", str(trained.parent / "run.yaml"), "--nproc", "2"]) == 2
    assert "started 4 ranks already" in capsys.readouterr().err


def test_collapsed_routing_stops_with_its_own_status(tmp_path: Path, capsys: Any) -> None:
    """Alarm at a load that every step exceeds; the run is saved and can go on."""
    health = {"every": 1, "patience": 2, "load_ratio": 1.0001, "action": "stop"}
    run = run_file(tmp_path, watch={**BARE, "health": health})
    command = ["train", str(run), "--folder", str(tmp_path / "out")]
    assert main(command) == 3
    said = capsys.readouterr().out
    assert "routing alarm" in said and "watch.health.action is stop" in said
    assert (tmp_path / "out" / "step-00000002").is_dir()
    assert [line["step"] for line in History.read(tmp_path / "out").lines] == [1, 2]
    assert main([*command, "watch.health.action=warn"]) == 0


def test_a_step_that_is_not_finite_stops_with_that_status_too(tmp_path: Path, capsys: Any) -> None:
    """Nothing is updated; the report stands on the console."""
    huge = {"kind": "adamw", "lr": 1e30, "clip_norm": 1e30}
    run = run_file(tmp_path, optim=huge, watch=BARE)
    assert main(["train", str(run), "--folder", str(tmp_path / "out")]) == 3
    assert "is not finite" in capsys.readouterr().out


def test_text_from_a_checkpoint(trained: Path, capsys: Any) -> None:
    """Prompt and what follows; the same seed gives the same, another one another."""
    command = ["sample", str(trained), "--prompt", "token", "--tokens", "12", "--json"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*command, "--seed", seed]) == 0
        answer = json.loads(capsys.readouterr().out)
        (sample,) = answer["samples"]
        assert sample["prompt"] == "token" and 0 < sample["tokens"] <= 12 and answer["step"] >= 8
        texts.append(sample["text"])
    assert texts[0] == texts[1] != texts[2]
    assert (
        main(["sample", str(trained / "step-00000008"), "--prompt", "[red]x", "--tokens", "3"]) == 0
    )
    assert capsys.readouterr().out.startswith("[red]x")


@pytest.mark.parametrize(
    "words", [["--tokens", "0"], ["--temperature", "-1"], ["--top-p", "0"], ["--top-p", "1.5"]]
)
def test_odd_wishes_for_text_are_refused(trained: Path, words: list[str], capsys: Any) -> None:
    """With the range that is allowed."""
    assert main(["sample", str(trained), *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_a_report_of_a_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A page that needs nothing else; figures for programs; words for a wrong folder."""
    page = tmp_path / "report.html"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    MACHINE.write(default_machine_file())
    assert main(["report", str(trained), "--html", str(page)]) == 0
    found = Page(page.read_text())
    assert found.fetched == [] and found.data["charts"] and found.data["heat"]
    assert any(label.startswith("of step 2: ") for _, label in found.data["cards"])
    shown = capsys.readouterr().out
    assert "step 2" in shown and "wall: " in shown and "100.0%" in shown
    assert "the planner" in shown and "no plan" not in shown
    assert main(["report", str(trained), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    (traced,) = facts.pop("walls")
    assert sum(traced["parts"].values()) == pytest.approx(traced["seconds"], rel=0.03)
    assert facts["step"] >= 8 and set(facts["baselines"]) == {"bigram", "xz"}
    assert 0 < facts["goodput"] <= 1
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    capsys.readouterr()
    copy = tmp_path / "damaged"
    shutil.copytree(trained, copy)
    (copy / "profile" / "step_2.walls.json").write_text("{}")
    assert main(["report", str(copy)]) == 2
    assert "step_2.walls.json: is not what `watch.profile` writes" in capsys.readouterr().err


def test_explain_shows_where_values_come_from(trained: Path, capsys: Any) -> None:
    """File and line, override, default; and what follows from them."""
    run = trained.parent / "run.yaml"
    assert main(["explain", str(run), "train.steps=9", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["origins"]["train.steps"] == "override train.steps=9"
    assert answer["origins"]["train.loss_chunk"] == "default"
    assert re.search(r"run\.yaml:\d+$", answer["origins"]["data.seq"])
    derived = answer["derived"]
    assert derived["tokens_per_step"] == 64 and derived["tokens_in_all"] == 9 * 64
    assert derived["parameters"] == sum(derived["parts"].values())
    assert main(["explain", str(run), "--given", "--layout", "ep2"]) == 0
    said = capsys.readouterr().out
    assert "loss_chunk" not in said and "seq: 16" in said and "at least 2 ranks" in said


OUTSIDE = '''
"""A hook from outside that has the process stopped, as a cluster does."""
import os, signal
from typing import Literal
from moefold.config.base import Record
from moefold.training.hooks.base import Hook
from moefold.training.hooks.config import HOOKS

class Preempted(Hook):
    def __init__(self, record):
        self.step = record.step

    def on_step(self, job, metrics):
        metrics["outside/seen"] = job.step_number
        if job.step_number == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

@HOOKS.register
class PreemptedRecord(Record):
    kind: Literal["preempted"] = "preempted"
    step: int = 3
    owner = Preempted
'''


def test_a_signal_saves_and_has_its_own_status(tmp_path: Path, capsys: Any) -> None:
    """Sent by a hook of the run's own; the same command goes on to the end."""
    (tmp_path / "preempted.py").write_text(OUTSIDE)
    watch = {**BARE, "hooks": [{"kind": "preempted"}]}
    run = run_file(tmp_path, watch=watch, uses=["./preempted.py"])
    out = tmp_path / "an out"
    command = ["train", str(run), "--folder", str(out)]
    assert main(command) == 75
    said = capsys.readouterr().out
    assert "received SIGTERM; saved step 3" in said and f"with --folder '{out}'\n" in said
    assert (out / "step-00000003").is_dir()
    assert main(command) == 0
    lines = History.read(out).lines
    assert [line["outside/seen"] for line in lines] == list(range(1, 9))
    later = ["train.steps=12", "train.extend=decay", "watch.hooks=[{kind: preempted, step: 10}]"]
    assert main([*command, "--fork", str(tmp_path / "new"), *later]) == 75
    said = capsys.readouterr().out
    assert f"--folder {tmp_path / 'new'} and without --fork" in said


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_disk_that_fills_ends_the_run_with_a_message_or_costs_what_it_refuses(
    tmp_path: Path, monkeypatch: Any, capsys: Any, caplog: Any, on_failure: str
) -> None:
    """The figures' file meets ENOSPC at steps 3 and 4: the checkpoint of step 2 goes on, or all."""
    watch = {**BARE, "checkpoint": {"every": 2, "on_failure": on_failure}}
    run = ["train", str(run_file(tmp_path, watch=watch)), "--folder", str(tmp_path / "out")]
    append = StepLines.append

    def full(self: StepLines, step: int, values: Any) -> None:
        if step in (3, 4):
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"x")
        append(self, step, values)

    with monkeypatch.context() as while_full:
        while_full.setattr(StepLines, "append", full)
        assert main(run) == (2 if on_failure == "stop" else 0)
    if on_failure == "continue":
        assert [line["step"] for line in History.read(tmp_path / "out").lines] == [1, 2, 5, 6, 7, 8]
        assert caplog.text.count("metrics: [Errno 28] No space left on device") == 1
        return
    said = capsys.readouterr()
    assert f"error: No space left on device: {tmp_path / 'out'}; free some space" in said.err
    assert "step-00000002; to resume" in said.out and "Traceback" not in said.err
    assert main([*run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 8
    assert [line["step"] for line in History.read(tmp_path / "out").lines] == list(range(1, 9))


def test_a_folder_goes_on_from_anywhere_and_where_it_was_moved(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Paths of the run file begin at it, the kept run has them whole, moved data are the same."""

    def step(*command: str) -> int:
        assert main(["train", *command, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["step"]

    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home / "runs", elsewhere):
        folder.mkdir(parents=True)
    raw = raw_run(home, watch=BARE, train={"steps": 2})
    raw["optim"]["schedule_lr"]["warmup"] = 1
    (source,) = raw["data"]["train"]
    source["files"] = ["../corpus/*.txt"]
    (home / "runs" / "run.yaml").write_text(yaml.safe_dump(raw))
    monkeypatch.chdir(home)
    assert step("runs/run.yaml", "--folder", "out") == 2
    monkeypatch.chdir(elsewhere)
    assert step("--folder", "../home/out", "train.steps=3") == 3
    assert step("../home/runs/run.yaml", "--folder", "../home/out", "train.steps=4") == 4
    moved = home.rename(tmp_path / "moved")
    assert step(str(moved / "runs" / "run.yaml"), "--folder", str(moved / "out"),
                "train.steps=5") == 5  # fmt: skip
    kept = moved / "out" / "run.yaml"
    older = yaml.safe_load(kept.read_text())
    older["data"]["train"][0]["files"] = ["corpus/*.txt"]
    kept.write_text(yaml.safe_dump(older))
    monkeypatch.chdir(moved)
    assert step("--folder", "out", "train.steps=6") == 6
    (moved / "corpus" / "00.txt").write_text("another one")
    assert main(["train", "runs/run.yaml", "--folder", "out", "train.steps=7"]) == 2
    assert "data: the tokens" in capsys.readouterr().err
