"""Routers' choices on disk, between layouts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moefold.api import train
from moefold.training.routing_trace import read_step, step_files
from moefold.training.run_folder import History
from tests.cpu.runs import run_of
from tests.cpu.test_training_routing import MODEL, TRAIN, rewritten

SHAPE = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 2}
SHAPE |= {"experts": 4, "top_k": 2, "expert_width": 16}


def losses(folder: Path, name: str, routing: dict[str, str], sizes: str, ranks: int) -> list[float]:
    """Return the losses of a run in a layout."""
    how = {"train": {**TRAIN, "batch": 8, "routing": routing}, "layout": {"sizes": sizes}}
    train(run_of(folder, model=MODEL | {"shape": SHAPE}, **how), nproc=ranks, folder=folder / name)
    return [line["lm_loss"] for line in History.read(folder / name).lines if "lm_loss" in line]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sizes", "ranks"), [("tp2 cp2 pp2", 8), ("ep4", 4), ("ep2 etp2", 4), ("cp2 pp2", 4), ("", 2)]
)
def test_any_layout_reads_what_another_wrote(tmp_path: Path, sizes: str, ranks: int) -> None:
    """Ranks write what one does; of choices drawn by layer and token they make the same losses."""
    one, some = tmp_path / "one", tmp_path / "some"
    losses(tmp_path, "a", {"record": str(one)}, "", 1)
    losses(tmp_path, "b", {"record": str(some)}, sizes, ranks)
    for step in range(TRAIN["steps"]):
        name = f"step-{step:08d}"
        alone, together = (read_step(step_files(at / name)) for at in (one, some))
        assert alone.keys() == together.keys()
        for key, layer in alone.items():
            np.testing.assert_array_equal(layer.chosen_NK, together[key].chosen_NK)
            np.testing.assert_array_equal(layer.id_N, together[key].id_N)
    draws = torch.rand(10_000, 4, generator=torch.Generator().manual_seed(0))
    rewritten(one, lambda chosen_NK: draws[: len(chosen_NK)].argsort(1)[:, :2].to(torch.int32))
    want = losses(tmp_path, "c", {"replay": str(one)}, "", 1)
    assert losses(tmp_path, "d", {"replay": str(one)}, sizes, ranks) == pytest.approx(
        want, rel=1e-12
    )
