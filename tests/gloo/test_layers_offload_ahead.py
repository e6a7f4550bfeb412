"""Activations that left are there again when backward takes them, on a clock that counts layers."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moefold.comm.world import World
from moefold.data.batch import from_ids
from moefold.layers import offload
from moefold.layers.kinds.dense import Dense
from moefold.layers.offload import OffloadedLayers, OffloadedStorage
from moefold.mesh.folding import Folding
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.training.step import gradients
from tests.cpu import small
from tests.gloo.harness import run_ranks

MICRO_BATCHES, LAYERS = 16, 3
"""Of a step, and of each chunk."""


class Clock:
    """Each layer's forward or backward takes one, and so does each copy, whoever waits for it."""

    def __init__(self) -> None:
        self.begun, self.taking = 0, False
        self.running: tuple[OffloadedLayers, int] | None = None
        self.copies: list[TimedCopy] = []

    @property
    def now(self) -> int:
        """Where a layer has just begun the time of that, else of its end."""
        return self.begun - self.taking

    def runs(self, layers: int) -> None:
        """Let so many layers begin, one after another, and copies end that end before the last."""
        self.begun += layers
        while self.copies and self.copies[0].ends <= self.begun - 1:
            self.copies.pop(0).result()

    def enter(self, departed: OffloadedLayers, layer: int) -> None:
        """Begin a layer's forward."""
        self.runs(1)
        entered(departed, layer)

    def take(
        self, away: OffloadedStorage, departed: OffloadedLayers, layer: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Begin a layer's backward, if this is the first of its takes."""
        same, above = self.running is not None and self.running[0] is departed, LAYERS
        if same and self.running is not None:
            above = self.running[1]
        self.running = departed, layer
        self.runs(above - layer)
        self.taking = True
        try:
            return taken(away, departed, layer, dtype)
        finally:
            self.taking = False


class TimedCopy(Future[Any]):
    """A copy that is made when its time has come, or when something waits for it."""

    def __init__(self, copy: Callable[[], Any], ends: int) -> None:
        super().__init__()
        self._copy, self.ends = [copy], ends

    def result(self, timeout: float | None = None) -> Any:
        """Return what the copy does."""
        if self._copy:
            self.set_result(self._copy.pop()())
        return super().result(timeout)


entered, taken = OffloadedLayers.wait_for_copies, OffloadedStorage.load


def present(rank: int, given: dict[str, Any]) -> tuple[int, int]:
    """Return how much of what left this rank's backwards took, and what of that was there."""
    layout = Layout.model_validate(given)
    world = World.open(Folding(layout.split, 2), "cpu", 60)
    clock = Clock()

    class Copies:
        """Begins copies on the clock."""

        def __init__(self, *_: Any) -> None: ...

        def start(self, copy: Callable[[], Any]) -> TimedCopy:
            found = TimedCopy(copy, clock.now + 1)
            clock.copies.append(found)
            return found

    with (
        mock.patch.object(offload, "AsyncCopies", Copies),
        mock.patch.object(OffloadedLayers, "wait_for_copies", lambda *of: clock.enter(*of)),
        mock.patch.object(OffloadedStorage, "load", lambda *of: clock.take(*of)),
    ):
        ffns = [Dense(width=16)] * LAYERS * layout.split.pp * layout.split.vpp
        parts = build_parts(small.decoder(small.GQA, *ffns), "fp32", layout, world)
        for parameter in parts.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        rows = from_ids(torch.arange(16).view(1, 16) % small.VOCAB)
        gradients(ShardedState(parts), [rows] * MICRO_BATCHES, 16)
    assert parts.offload is not None
    (place,) = parts.offload.stores.values()
    assert place.stats.held == 0
    return place.stats.reads, place.stats.prefetched


@pytest.mark.parametrize(
    ("sizes", "schedule", "at"),
    [("pp2 vpp2", "interleaved", "host"), ("pp2", "1f1b", "disk")],
)
def test_of_twenty_takes_nineteen_find_their_block_there(
    sizes: str, schedule: str, at: str, tmp_path: Path
) -> None:
    """Where a copy takes as long as a layer; the first layer of a backward behind another waits."""
    to = {"modules": ["ffn", "attention"]} | ({"folder": str(tmp_path)} if at == "disk" else {})
    given = {"sizes": sizes, "schedule": {"kind": schedule}, "offload": {at: to}}
    for takes, there in run_ranks(present, 2, given):
        assert takes > 10 * MICRO_BATCHES and there >= 0.95 * takes, (takes, there)
