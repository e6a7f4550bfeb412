"""A job that hooks can be tried on: it has a folder and counts steps, and trains nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moefold.config.base import Record
from moefold.training.config import Train
from moefold.training.hooks.base import Figures, Hook, hook_states, load_hook_states


class Trial(Record):
    """A run that has a name and a loss."""

    name: str = "trial"
    train: Train = Train(steps=10, batch=1)


class Empty:
    """A tokenizer without tokens."""

    def save(self, file: Path) -> None:
        file.write_text("{}")


EMPTY = Empty()


class FakeJob:
    """Runs hooks as the loop does."""

    def __init__(
        self,
        folder: Path,
        hooks: Sequence[Hook],
        last_step: int = 10,
        states: dict[int, str] | None = None,
    ) -> None:
        self.states: dict[int, str] = {} if states is None else states
        """JSON of the hooks' states by step, as in checkpoints."""
        self.run: Any = Trial()
        self.folder = folder
        self.hooks = hooks
        self.step_number = 0
        self.last_step = last_step
        self.tokens = 0
        self.recovered: dict[str, Any] = {}
        self.hook_states: dict[str, Any] = {}
        self.model = self.loader = None
        self.tokenizer: Any = EMPTY
        self.layers: list[dict[str, Any]] = []
        self.calls: list[tuple[str, Any]] = []

    def health(self) -> list[dict[str, Any]]:
        return self.layers

    def evaluate(self) -> Figures:
        self.calls.append(("evaluate", self.step_number))
        figures: Figures = {"val_loss": 2.0, "val/code/bits_per_byte": 1.5}
        for hook in self.hooks:
            hook.on_evaluate(self, figures)
        return figures

    def save(self) -> Path:
        self.calls.append(("save", self.step_number))
        return self.folder / "checkpoints" / str(self.step_number)

    def request_stop(self, reason: str) -> None:
        self.calls.append(("stop", reason))

    def go(self, steps: int | None = None, start: int = 0) -> list[Figures]:
        """Start at a step, run some, end; return each step's figures as the hooks left them."""
        self.step_number = start
        self.hook_states = json.loads(self.states.get(start, "{}"))
        load_hook_states(self.hooks, self.hook_states)
        for hook in self.hooks:
            hook.on_start(self)
        seen = []
        for _ in range(self.last_step - start if steps is None else steps):
            self.step_number += 1
            self.tokens += 100
            metrics: Figures = {"step": self.step_number, "lm_loss": 3.0 / self.step_number}
            for hook in self.hooks:
                hook.on_step(self, metrics)
            self.states[self.step_number] = json.dumps(hook_states(self.hooks))
            seen.append(metrics)
        self.end()
        return seen

    def end(self) -> None:
        """Tell the hooks that the run ends."""
        for hook in self.hooks:
            hook.on_stop(self, None)


def layer(number: int, load: Sequence[float], top_k: int = 2) -> dict[str, Any]:
    """Figures of one layer's routing, as the loop gives them."""
    return {
        "layer": number,
        "load_max_over_mean": max(load) * len(load),
        "dead_experts": sum(share == 0 for share in load),
        "load_entropy": 1.0,
        "probability_entropy": 1.0,
        "drop_rate": 0.0,
        "bias_range": 0.0,
        "load": list(load),
        "top_k": top_k,
    }
