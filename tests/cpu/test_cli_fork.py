"""``moefold train`` on checkpoints: continued, forked, imported; and what is said before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from moefold.api import load_model, train
from moefold.cli.main import main
from moefold.data.batch import SegmentOrigin
from moefold.run import load_run
from moefold.training.fork import fork
from moefold.training.model_checkpoint import MODEL_PREFIX
from moefold.training.run_folder import RUN_FILE, History
from moefold.training.trainer import Trainer
from tests.cpu.checkpoint_tools import load
from tests.cpu.hubs import MODELS, decoder_of, on_disk, weights_of, write_hub, write_tokenizer
from tests.cpu.runs import WORDS, corpus, raw_run

SMALL = [
    "data.seq=16", "train.steps=4", "train.batch=2", "train.precision=fp32", "watch.evaluate=null",
    "watch.plots=null", "watch.experts_page=null",
]  # fmt: skip


def run_file(folder: Path, **changes: Any) -> Path:
    """Write a tiny run of four steps."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"train": {"steps": 4}, **changes}
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump(raw_run(folder, **changes)))
    return path


def other_data(folder: Path) -> str:
    """Return an override that names text in which other words are frequent."""
    text = " ".join(f"{number:04d}" for number in range(3000))
    for name in "ab":
        (folder / f"{name}.txt").write_text(text + name)
    source = {"source": "text", "files": [str(folder / "*.txt")]}
    return f"data.train={json.dumps([source])}"


def hub(folder: Path, family: str = "qwen3_moe", mtp: bool = False) -> Path:
    """Write a Hugging Face folder with a tokenizer of as many words as its model knows."""
    decoder = decoder_of(family)
    stored = on_disk(decoder, weights_of(decoder))
    if mtp:
        stored["model.layers.3.embed_tokens.weight"] = torch.zeros(3)
    write_hub(folder, decoder, stored, **({"num_nextn_predict_layers": 1} if mtp else {}))
    return write_tokenizer(folder, WORDS)


def own_data(folder: Path) -> str:
    """Return an override that names text of the hub's words."""
    source = {"source": "text", "files": [str(corpus(folder / "corpus"))]}
    return f"data.train={json.dumps([source])}"


def fork_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "fork.json").read_text())


def model_in(checkpoint: Path) -> dict[str, Tensor]:
    """Return the model's tensors in a checkpoint."""
    tensors, _ = load(checkpoint)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX)}


def same_model(one: Path, other: Path) -> bool:
    first, second = model_in(one), model_in(other)
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", str(run_file(folder)), "--folder", str(folder / "out")]) == 0
    return folder / "out"


def test_a_folder_alone_continues_the_run_in_it(tmp_path: Path, capsys: Any) -> None:
    """Its parts from outside too, wherever the command is given; overrides come on top."""
    part = tmp_path / "part.py"
    part.write_text("from moefold.config.base import Record\n")
    out = str(tmp_path / "out")
    assert main(["train", str(run_file(tmp_path, uses=[str(part)])), "--folder", out]) == 0
    assert main(["train", "--folder", out, "train.steps=6"]) == 0
    assert main(["train", "train.steps=7", "watch.seed=1", "--folder", out]) == 2
    assert "watch.seed" in capsys.readouterr().err
    assert main(["train", "--folder", out, "--json", "train.steps=7"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 7
    assert [line["step"] for line in History.read(Path(out)).lines] == list(range(1, 8))


def test_without_a_run_the_folder_must_hold_one(tmp_path: Path, capsys: Any) -> None:
    for words in ([], ["train.steps=6"]):
        assert main(["train", *words]) == 2
        assert "name a RUN" in capsys.readouterr().err
    assert main(["train", "--folder", str(tmp_path)]) == 2
    assert "moefold train RUN --folder" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--weights-only", "--new-tokenizer"])
def test_how_to_fork_goes_with_a_fork(trained: Path, flag: str, capsys: Any) -> None:
    assert main(["train", "--folder", str(trained), flag]) == 2
    assert "--fork NEW" in capsys.readouterr().err


def test_another_tokenizer_is_refused_unless_it_is_asked_for(
    trained: Path, tmp_path: Path, capsys: Any
) -> None:
    """What the refusal says keeps the old one; under it the new text's loss is no worse."""
    longer = ["train.steps=6", "train.extend=constant"]
    fork = ["train", "--folder", str(trained), other_data(tmp_path), *longer, "--fork"]
    assert main([*fork, str(tmp_path / "refused")]) == 2
    said = capsys.readouterr().err
    assert "TokenizerMismatch" in said and "--new-tokenizer" in said
    kept = next(line for line in said.split("'") if line.startswith("data.tokenizer="))
    assert main([*fork, str(tmp_path / "kept"), kept]) == 0
    assert "tokenizer: same" in capsys.readouterr().out
    assert fork_of(tmp_path / "kept")["tokenizer"] == "same"
    assert main([*fork, str(tmp_path / "asked"), "--new-tokenizer"]) == 0
    assert "tokenizer: new" in capsys.readouterr().out
    assert fork_of(tmp_path / "asked")["tokenizer"] == "new"


def test_a_fork_takes_all_or_weights_alone(trained: Path, tmp_path: Path, capsys: Any) -> None:
    """Another optimizer has no use for the state, and is told what to do."""
    newest = trained / "step-00000004"
    fork = ["train", "--folder", str(trained), "train.steps=6", "--fork"]
    assert main([*fork, str(tmp_path / "all")]) == 0
    said = capsys.readouterr().out
    assert "with its weights, optimizer state, progress;" in said
    assert fork_of(tmp_path / "all")["taken"] == ["weights", "optimizer state", "progress"]
    fewer = ["train", "--folder", str(tmp_path / "all"), "train.steps=3"]
    assert main(fewer) == 0  # what it says to type makes steps
    assert "step 6 is done already" in (said := capsys.readouterr().out) and "steps=12" in said
    assert "0 steps to go, 0 tokens" in " ".join(said.replace("│", " ").split())
    assert same_model(tmp_path / "all" / "step-00000004", newest)
    muon = ["optim={kind: muon, lr: 0.01}", "train.steps=6"]
    assert main(["train", "--folder", str(trained), *muon, "--fork", str(tmp_path / "no")]) == 2
    assert "optimizer states" in (said := capsys.readouterr().err) and "--weights-only" in said
    delayed = ["train.quantise={kind: fp8_tensor, scaling: delayed}", "train.steps=6"]
    assert main(["train", "--folder", str(trained), *delayed, "--fork", str(tmp_path / "no")]) == 2
    assert "different scaling histories" in (said := capsys.readouterr().err)
    assert "--weights-only" in said
    low = ["adapter={kind: lora, rank: 2}", "--fork", str(tmp_path / "no")]
    for more in ([], ["--weights-only"]):
        assert main(["train", "--folder", str(trained), *low, *more]) == 2
        assert f"moefold export {newest} HF_FOLDER --merged" in capsys.readouterr().err
    words = ["--fork", str(tmp_path / "weights"), "--weights-only", "--until", "2"]
    assert main(["train", "--folder", str(trained), *muon, *words]) == 0
    said = fork_of(tmp_path / "weights")
    assert said["taken"] == ["weights"] and said["step"] == 0 and said["from"] == str(newest)
    assert any(line.startswith("optim.kind: adamw -> muon") for line in said["changed"])
    assert same_model(tmp_path / "weights" / "step-00000000", newest)
    assert [line["step"] for line in History.read(tmp_path / "weights").lines] == [1, 2]


def test_a_fork_with_another_batch_reads_on_where_its_source_ended(
    trained: Path, tmp_path: Path
) -> None:
    """No sequence is left out or read again: not in a fork of a fork, nor where that goes on."""

    def opened(name: str, batch: int) -> Trainer:
        run = load_run(trained / RUN_FILE, [f"train.batch={batch}", "train.steps=9"])
        return Trainer(run, tmp_path / name)

    def read(job: Trainer, *places: int) -> list[SegmentOrigin]:
        return [
            o for place in places for batch in job.loader.load_step(place) for o in batch.sources
        ]

    with opened("reference", 4) as job:
        expected = read(job, 4, 5, 6)
    with opened("wide", 8) as job:
        fork(job, trained)
        assert read(job, job.progress.next_batch_index()) == expected[: len(read(job, 4))]
        job.last_step = 5
        job.train()
    with opened("narrow", 2) as job:
        fork(job, tmp_path / "wide")
        after = read(job, 5, 6)
    assert read(job, 5, 6) == after == expected[-len(after) :]
    with opened("narrow", 2) as job:
        assert job.resumed_from is not None and read(job, 5, 6) == after


def test_an_imported_checkpoint_is_no_run_and_can_become_one(tmp_path: Path, capsys: Any) -> None:
    """Both ways of asking for it as a run say the command that works."""
    folder, imported = hub(tmp_path / "hub"), tmp_path / "imported"
    assert main(["import", str(folder), str(imported)]) == 0
    small = [own_data(tmp_path), *SMALL]
    for words in (["train", "--folder", str(imported)], ["train", str(folder), *small]):
        assert main([*words, "--folder", str(imported)]) == 2
        assert f"moefold train RUN --folder {imported} --fork NEW" in capsys.readouterr().err
    new = tmp_path / "new"
    assert main(["train", str(folder), *small, "--folder", str(imported), "--fork", str(new)]) == 0
    assert fork_of(new)["taken"] == ["weights"] and fork_of(new)["tokenizer"] == "same"
    assert same_model(new / "step-00000000", imported / "step-00000000")
    assert not same_model(new / "step-00000004", new / "step-00000000")
    longer = ["train.steps=5", "train.extend=decay"]
    assert main(["train", "--folder", str(new), *longer, "--json"]) == 0
    capsys.readouterr()
    assert main(["demo", "--folder", str(imported)]) == 2
    assert f"--folder {imported} --fork NEW" in capsys.readouterr().err


def test_weights_of_another_program_are_trained_on(tmp_path: Path) -> None:
    """The folder itself has none that are read; the imported ones are what the run starts from."""
    folder, imported = hub(tmp_path / "hub"), tmp_path / "imported"
    decoder = decoder_of("qwen3_moe")
    torch.save(on_disk(decoder, weights_of(decoder)), tmp_path / "model.pt")
    (folder / "model.safetensors").unlink()
    weights = ["--weights", str(tmp_path / "model.pt")]
    assert main(["import", str(folder), str(imported), *weights]) == 0
    words = [own_data(tmp_path), *SMALL, "--folder", str(imported), "--fork", str(tmp_path / "new")]
    assert main(["train", str(folder), *words]) == 0
    assert same_model(tmp_path / "new" / "step-00000000", imported / "step-00000000")


LEFT_OUT = "tensors left out (layers for multi-token prediction)"


def test_weights_that_are_left_out_are_said_once_wherever_they_are(
    tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    folder = hub(tmp_path / "hub", "deepseek_v3", mtp=True)
    words = [own_data(tmp_path), *SMALL]
    assert main(["train", str(folder), *words, "--folder", str(tmp_path / "out")]) == 0
    assert caplog.text.count(LEFT_OUT) == 1 and str(folder) in caplog.text
    caplog.clear()
    load_model(folder)
    assert caplog.text.count(LEFT_OUT) == 1
    caplog.clear()
    train(load_run(folder, words), folder=tmp_path / "api")
    assert caplog.text.count(LEFT_OUT) == 1
    capsys.readouterr()
    assert main(["import", str(folder), str(tmp_path / "imported")]) == 0
    assert capsys.readouterr().err.count(LEFT_OUT) == 1


@pytest.mark.parametrize("family", MODELS)
def test_a_folder_without_data_says_what_it_trains_on(
    tmp_path: Path, family: str, caplog: Any, capsys: Any
) -> None:
    """Before the first step, and where a run is explained; with data of its own nothing is."""
    folder = hub(tmp_path / "hub", family)
    assert main(["explain", str(folder), "--json"]) == 0
    explained = "\n".join(json.loads(capsys.readouterr().out)["notes"])
    assert "standard library" in explained and "data.seq: 1024 tokens" in explained
    words = ["train", str(folder), "--folder", str(tmp_path / "out")]
    assert main([*words, own_data(tmp_path), *SMALL]) == 0
    assert "data." not in caplog.text
    capsys.readouterr()
    assert main(["explain", str(folder), own_data(tmp_path), *SMALL, "--json"]) == 0
    rate = f"{folder}: the update rate of the selection bias is 0.001, as in DeepSeek-V3"
    expected = [rate] if family == "deepseek_v3" else []
    assert json.loads(capsys.readouterr().out)["notes"] == expected


def test_notes_come_before_the_first_step_and_with_the_plan(
    tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    words = [str(run_file(tmp_path)), "model.context=8"]
    assert main(["train", *words, "--dry-run", "--folder", str(tmp_path / "dry")]) == 0
    assert caplog.text.count("data.seq: 16") == 1
    capsys.readouterr()
    for command in (["explain"], ["plan", "--cluster", "h100x8"]):
        assert main([*command, *words]) == 0
        said = capsys.readouterr().out
        assert "data.seq: 16 tokens" in said
