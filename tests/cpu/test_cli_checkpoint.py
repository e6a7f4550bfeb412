"""``moefold checkpoint``: answers, exit status, JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress, TaskID

from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.save import save
from moefold.cli.main import main
from tests.cpu.checkpoint_tools import state


def moefold(*words: str | Path) -> int:
    """Run the command line ``moefold checkpoint …`` and return its exit status."""
    return main(["checkpoint", *map(str, words)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a checkpoint with names that a terminal or a markup might take for commands."""
    tensors = state(1) | {"[bold]name[/]": torch.ones(3000)}
    save(tmp_path, 3, state(3), {})
    return save(tmp_path, 4, tensors, {"run": "[red]x"}, CheckpointPolicy(shard_bytes=1024))


def damage(path: Path) -> None:
    raw = bytearray((path / "shard-00000.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "shard-00000.safetensors").write_bytes(raw)


def test_inspect(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moefold("inspect", saved) == 0
    out = capsys.readouterr().out
    assert "step 4 · 5 tensors · 12." in out and "2 shards" in out
    assert "[bold]name[/]" in out and "[3000]" in out and '"[red]x"' in out
    assert "layers.0.bias" in out and "BF16" in out


def test_inspect_shows_all_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, 1, {f"t{i:03d}": torch.ones(1) for i in range(100)}, {})
    assert moefold("inspect", path) == 0
    out = capsys.readouterr().out
    assert "t039" in out and "t040" not in out and "60 more" in out
    assert moefold("inspect", "--all", path) == 0
    assert "t099" in capsys.readouterr().out


def test_inspect_spares_people_a_tokenizer_s_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "begins" + "x" * 5000
    path = save(tmp_path, 1, {"t": torch.ones(1)}, {"tokenizer": {"text": text}, "all": [text]})
    assert moefold("inspect", path) == 0
    out = capsys.readouterr().out
    assert out.count("begins") == 2 and "5,006 characters" in out and len(out) < 1500
    assert moefold("inspect", "--json", path) == 0
    assert json.loads(capsys.readouterr().out)["meta"]["tokenizer"]["text"] == text


def test_inspect_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moefold("inspect", "--json", saved) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 4 and facts["version"] == 1 and facts["meta"] == {"run": "[red]x"}
    entry = facts["tensors"]["layers.0.w"]
    assert entry["dtype"] == "F32" and entry["shape"] == [6, 5] and entry["bytes"] == 120
    assert entry["slices"][0]["shard"] == "shard-00000.safetensors"
    assert facts["bytes"] == sum(p.stat().st_size for p in saved.glob("*.safetensors"))


def test_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moefold("verify", saved) == 0
    assert "every byte is as written" in capsys.readouterr().out
    damage(saved)
    assert moefold("verify", saved) == 1
    out = capsys.readouterr().out
    assert "shard-00000.safetensors, tensor 'layers.0.bias'" in out and "1 problem\n" in out
    assert moefold("inspect", saved) == 0, "the manifest is whole"


def test_verify_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moefold("verify", "--json", saved) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"path": str(saved), "whole": True, "problems": []}
    damage(saved)
    (saved / "more").touch()
    assert moefold("verify", "--json", saved) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [(p["file"], p["tensor"]) for p in problems] == [
        ("more", None),
        ("shard-00000.safetensors", "layers.0.bias"),
    ]


def test_a_folder_stands_for_its_newest(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moefold("verify", saved.parent) == 0
    assert str(saved) in capsys.readouterr().out
    (saved / "shard-00000.safetensors").unlink()
    assert moefold("inspect", saved.parent) == 0
    answer = capsys.readouterr()
    assert "step 3" in answer.out and "Falling back to step-00000003" in answer.err
    (run := saved.parent.parent / "run").mkdir()
    (run / "checkpoints").symlink_to(saved.parent)
    assert moefold("inspect", run) == 0
    assert "step 3" in capsys.readouterr().out


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moefold("inspect", tmp_path / "nowhere") == 2
    assert "no such checkpoint folder" in capsys.readouterr().err
    assert moefold("verify", tmp_path) == 1
    assert "save was interrupted" in capsys.readouterr().out
    (tmp_path / "manifest.json").write_text('{"format": "other", "version": 3}')
    assert moefold("verify", "--json", tmp_path) == 2
    assert "other version 3" in json.loads(capsys.readouterr().out)["error"]


def test_a_long_verify_shows_a_bar(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar counts every byte once, and comes on a terminal only."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    shown: list[tuple[float, float]] = []
    update = Progress.update

    def showing(self: Progress, task: TaskID, **what: Any) -> None:
        update(self, task, **what)
        shown.append((self.tasks[task].completed, self.tasks[task].total or 0))

    monkeypatch.setattr(Progress, "update", showing)
    assert moefold("verify", saved) == 0
    size = sum(p.stat().st_size for p in saved.glob("*.safetensors"))
    assert shown[-1] == (size, size)
    assert "verifying" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    assert moefold("verify", saved) == 0
    assert not capsys.readouterr().err
