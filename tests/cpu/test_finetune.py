"""The recipe of adapters on a folder, from conversations made of docstrings to an answer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from matplotlib.image import imread

from moefold.checkpoint.load import Reader
from moefold.cli.main import main
from moefold.data.config import DataError
from moefold.data.corpora.docstrings import write_chats
from moefold.data.corpora.sources import Document, StdlibReader
from moefold.run import load_run
from moefold.training.hooks.plots import adapter_changes
from moefold.training.model_checkpoint import ModelTensors
from moefold.training.run_folder import History
from tests.chats import write_chat_folder
from tests.cpu.families import reference
from tests.family_draws import draw

SOURCE = '''
class Shelf:
    """Holds books in the order of their names."""
    def take(self):
        """Takes the first
        book.

        Nothing else.
        """
    def _hidden(self):
        """Is not asked for by anyone at all."""
def short():
    """Too short."""
'''


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    def documents(*_: object) -> Iterator[Document]:
        yield Document("shop/shelves.py", SOURCE)
        yield Document("broken.py", "def (")

    monkeypatch.setattr(StdlibReader, "documents", documents)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without a chat template."""
    config = draw("qwen3_moe", Random("a recipe for folders")) | {"vocab_size": 352}
    reference("qwen3_moe", config, 0).save_pretrained(tmp_path / "theirs")
    return write_chat_folder(tmp_path / "theirs", None, eos_token="<|endoftext|>")


@pytest.mark.usefixtures("library")
def test_docstrings_become_questions_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    assert main(["data", "chats", str(file), "--number", "2"]) == 0
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    said = {asked["content"]: answer["content"] for asked, answer in rows}
    assert said == {
        "What does the class shop.shelves.Shelf do?": "Holds books in the order of their names.",
        "What does the function shop.shelves.Shelf.take do?": "Takes the first book.",
    }
    with pytest.raises(DataError, match="3 conversations: this Python"):
        write_chats(file, 3)
    assert write_chats(file, 2) == 2, "the same once more"
    with pytest.raises(DataError, match=r"chats\.jsonl: already exists"):
        write_chats(file, 1)
    assert len(file.read_text().splitlines()) == 2


def test_a_folder_is_tuned_by_the_recipe_and_answers(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of held-out answers falls, a picture has what moved, an adapter alone goes out."""
    chats, tuned, out = tmp_path / "chats.jsonl", tmp_path / "tuned", tmp_path / "adapter"
    names = [
        f"{first}{last}" for first in ("red", "blue", "grey") for last in ("box", "hat", "cup")
    ]
    asked = [{"role": "user", "content": f"What is a {name}?"} for name in names]
    answers = [{"role": "assistant", "content": f"It is a {name} again."} for name in names]
    lines = [{"messages": both} for both in zip(asked, answers, strict=True)]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"data.train[0].files=[{chats.as_posix()}]", "data.train[0].holdout=0.4"]
    small = ["data.seq=256", "train.steps=6", "train.batch=1", "train.micro_batch=1"]
    small += ["optim.lr=0.05"]
    words = [str(folder), "base=finetune_lora", *files, *small, "--folder", str(tuned)]
    assert main(["train", *words]) == 0
    first, *_, last = History.read(tuned).lines
    assert (first["step"], last["step"]) == (0, 6) and last["val_loss"] < 0.95 * first["val_loss"]
    assert main(["report", str(tuned)]) == 0
    assert imread(tuned / "moved.png").std() > 0.05
    with Reader(tuned / "step-00000006") as reader:
        tensors = ModelTensors(reader, reader.manifest.meta["adapters"])
        layers, shares = adapter_changes(tensors)
        for layer, share_E in zip(layers, torch.from_numpy(shares), strict=True):
            at = f"layers.{layer}.moe.experts."
            with_E, base_E = (
                torch.cat([of(at + name).double().flatten(1) for name in ("w_in", "w_out")], 1)
                for of in (tensors.__getitem__, tensors.stored)
            )
            want_E = (with_E - base_E).norm(dim=1) / base_E.norm(dim=1)
            torch.testing.assert_close(share_E[: len(want_E)], want_E, rtol=1e-3, atol=0)
    assert main(["export", str(tuned), str(out)]) == 0
    assert (out / "adapter_config.json").is_file() and not (out / "config.json").exists()
    start = f"adapter={{kind: lora, from: {out}, rank: stored}}"
    onwards = re.escape(f"moefold train {folder} '{start}'")
    with pytest.raises(ValueError, match=onwards):
        load_run(out)
    capsys.readouterr()
    speaks = ["sample", str(tuned), "--chat", "--prompt", "What is a shelf?", "--tokens", "4"]
    assert main([*speaks, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"][0]["prompt"] == "What is a shelf?"


def test_a_recipe_for_folders_is_one_for_folders(folder: Path) -> None:
    run = load_run(folder, ["base=finetune_lora"])
    assert run.adapter is not None
    template = getattr(run.data.tokenizer, "template", None)
    assert template is not None and Path(template).name == "plain.jinja"
    assert load_run(folder).adapter is None
    with pytest.raises(ValueError, match="moefold train FOLDER base=finetune_lora"):
        load_run("finetune_lora")
