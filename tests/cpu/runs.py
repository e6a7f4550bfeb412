"""Tiny runs on a tiny corpus, for tests of the loop."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from moefold.config.load import load
from moefold.run import Run
from moefold.training.hooks.base import Figures, Hook
from moefold.training.trainer import Trainer

WORDS = ["expert", "token", "router", "load", "bias", "gate", "layer", "norm", "rope", "fold"]


def corpus(folder: Path, documents: int = 12) -> Path:
    """Write text files of drawn words below ``folder``, and return a pattern that finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(0)
    for i in range(documents):
        words = draws.choices(WORDS, k=draws.randint(60, 160))
        (folder / f"{i:02d}.txt").write_text(" ".join(words) + "\n")
    return folder / "*.txt"


def own_data(folder: Path) -> list[str]:
    """Return overrides that let a recipe train on a tiny corpus: to prepare its own takes longer
    than to train on it.
    """
    source = {"source": "text", "files": [str(corpus(folder / "corpus"))], "holdout": 0.2}
    return [f"data.train={json.dumps([source])}", "data.tokenizer={kind: bpe, vocab: 300}"]


def raw_run(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a run's raw data; ``changes`` replace top-level parts, or keys inside them."""
    source = {"source": "text", "files": [str(corpus(folder / "corpus"))], "holdout": 0.2}
    raw: dict[str, Any] = {
        "name": "test",
        "model": {
            "family": "qwen3_moe",
            "shape": {
                "hidden": 16,
                "layers": 2,
                "heads": 2,
                "kv_heads": 1,
                "experts": 4,
                "top_k": 2,
                "expert_width": 16,
            },
            "balance": [{"kind": "aux"}, {"kind": "aux", "over": "global_batch"}, {"kind": "z"}],
        },
        "data": {"seq": 16, "tokenizer": {"kind": "bpe", "vocab": 300}, "train": [source]},
        "optim": {"kind": "adamw", "lr": 0.01, "schedule_lr": {"kind": "wsd", "warmup": 2}},
        "train": {"steps": 8, "batch": 4, "micro_batch": 2, "precision": "fp32"},
        # What is drawn at a run's end takes longer than its steps: tests of it ask for it.
        "watch": {
            "evaluate": None,
            "plots": None,
            "experts_page": None,
            "checkpoint": {"every": None},
        },
    }
    for key, value in changes.items():
        held = raw.get(key)
        merged = isinstance(held, dict) and isinstance(value, dict) and "kind" not in value
        raw[key] = {**held, **value} if merged else value
    return raw


def run_of(folder: Path, **changes: Any) -> Run:
    """Return a tiny run."""
    return load(Run, raw_run(folder, **changes)).record


def job_of(folder: Path, out: str = "out", *hooks: Hook, **changes: Any) -> Trainer:
    """Open a tiny run in ``folder/out``, with only the hooks given."""
    return Trainer(run_of(folder, **changes), folder / out, hooks, cache=folder / "prepared")


def weights(job: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of everything a checkpoint would hold."""
    from moefold.training.state import iter_state

    return {name: held.tensor.clone() for name, held in iter_state(job.state, job.optimizer)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors differ in a bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


class Notes(Hook):
    """Remembers every step's figures."""

    def __init__(self) -> None:
        self.steps: list[Figures] = []
        self.rewinds = 0

    def on_step(self, job: Any, metrics: Figures) -> None:
        """Note a step."""
        self.steps.append(dict(metrics))

    def on_rewind(self, job: Any) -> None:
        """Note a rewind."""
        self.rewinds += 1
