"""Tensors that are read only when they are written: one at a time, and the same bytes."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moefold.checkpoint.errors import CheckpointError
from moefold.checkpoint.save import save
from moefold.checkpoint.tensors import LazyTensor
from tests.cpu.checkpoint_tools import load


def test_unread_tensors_are_read_one_at_a_time(tmp_path: Path) -> None:
    held: list[weakref.ref[Tensor]] = []
    most = 0

    def read(seed: int) -> Tensor:
        nonlocal most
        fresh = torch.randn(30, 7, generator=torch.Generator().manual_seed(seed))
        held.append(weakref.ref(fresh))
        most = max(most, sum(r() is not None for r in held))
        return fresh

    sources = {f"t{n}": LazyTensor(torch.float32, (30, 7), lambda n=n: read(n)) for n in range(5)}
    path = save(tmp_path, 3, {**sources, "plain": torch.arange(4)}, {})
    assert most == 1
    assert len(held) == 5
    tensors, _ = load(path)
    assert set(tensors) == {*sources, "plain"}
    for n in range(5):
        assert torch.equal(tensors[f"t{n}"], read(n))


def test_an_unread_tensor_of_no_known_type_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'bad one' is torch\.complex128"):
        save(
            tmp_path, 1, {"bad one": LazyTensor(torch.complex128, (1,), lambda: torch.ones(1))}, {}
        )
