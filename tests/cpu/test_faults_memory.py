"""A rank without memory left says what it held and what was to be expected."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.training import trainer
from moefold.training.memory import OutOfMemory
from tests.cpu.runs import job_of


def refuse(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(("precision", "said"), [("fp32", "activations 0.0"), ("fp64", "fp64 is")])
def test_no_memory_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, said: str
) -> None:
    """Case 39."""
    monkeypatch.setattr(trainer, "gradients", refuse)
    train = {"steps": 8, "batch": 4, "micro_batch": 2, "precision": precision}
    with job_of(tmp_path, train=train) as job, pytest.raises(OutOfMemory) as caught:
        job.train()
    text = str(caught.value)
    assert "rank 0 has no memory left: CUDA out of memory. Tried to allocate 2.00 GiB" in text
    assert "planned: " in text and said in text and "train.micro_batch" in text


def test_no_memory_to_begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "build_parts", refuse)
    with pytest.raises(OutOfMemory, match="rank 0 has no memory left"):
        job_of(tmp_path)
    monkeypatch.undo()
    job_of(tmp_path).close()  # whoever failed gave the folder back
