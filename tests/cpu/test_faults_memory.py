"""A rank without memory left says what it held and what was to be expected."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moefold.failures import WORKING_BYTES, OutOfMemory
from moefold.training import memory, trainer
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


@pytest.mark.parametrize("place", ["prepare", "build_parts", "PrecisionChoice"])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 1.00 GiB for an array"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_memory_of_the_host_is_explained_wherever_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(trainer, place, SimpleNamespace(choose=refuse) if "P" in place else refuse)
    with pytest.raises(OutOfMemory) as caught:
        job_of(tmp_path)
    text = str(caught.value)
    assert text.startswith("rank 0 has no memory left: an allocation of ")
    assert "planned: peak" in text and "this process has" in text and "train.micro_batch" in text


def test_a_limit_below_the_plan_is_told_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int, purpose: str) -> None:
        assert size > WORKING_BYTES
        raise OutOfMemory(purpose)

    monkeypatch.setattr(memory, "require_address_space", refuse)
    monkeypatch.setattr(trainer, "prepare", lambda *_: pytest.fail("too late"))
    with pytest.raises(OutOfMemory, match=r"rank 0 of this run \(0.0\d GiB are planned"):
        job_of(tmp_path)


def test_a_plan_beyond_the_machine_is_refused_with_both_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "prepare", lambda *_: pytest.fail("too late"))
    monkeypatch.setattr(memory, "host_capacity", lambda: 2**10)
    said = (
        r"1 rank is planned to take 0.0\d GiB on .*, which has 0.00 GiB of memory and swap. Split"
    )
    with pytest.raises(OutOfMemory, match=said):
        job_of(tmp_path)


def test_no_memory_to_begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "build_parts", refuse)
    with pytest.raises(OutOfMemory, match="rank 0 has no memory left"):
        job_of(tmp_path)
    monkeypatch.undo()
    job_of(tmp_path).close()  # whoever failed gave the folder back
