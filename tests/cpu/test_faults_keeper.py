"""Copies in memory: which step is whole, what stays, and that bits come back as they were."""

from typing import Any

import pytest
import torch
from fault_injection import tear

from moefold.training import resume
from moefold.training.nonfinite import digest
from moefold.training.recover import Past, _room, last_whole, pack, packed, unpack
from moefold.training.state import Progress


def says(own: tuple[int, ...], held: dict[int, int] | None = None, needs: int = 8) -> Any:
    held = held or {}
    return {
        "own": {str(step): {} for step in own},
        "held": {str(step): size for step, size in held.items()},
        "needs": needs,
    }


BOTH = says((4, 5), {4: 8, 5: 8})


@pytest.mark.parametrize(
    ("said", "step"),
    [
        ([BOTH, BOTH, BOTH, BOTH], 5),
        ([BOTH, says((4,), {4: 8, 5: 8}), says((4, 5), {4: 8}), BOTH], 5),  # 3 keeps 1's copy of 5
        ([BOTH, says(()), BOTH, BOTH], 5),
        ([BOTH, says(()), BOTH, says((4, 5), {4: 8})], 4),  # 1's copy of 5 had not arrived
        ([BOTH, says(()), BOTH, says(())], None),  # both copies lost
        ([BOTH, says(()), BOTH, says((4, 5), {4: 8, 5: 7})], 4),  # of another size
        ([says(())] * 4, None),
    ],
)
def test_the_last_step_that_all_have(said: list[Any], step: int | None) -> None:
    assert last_whole(said, 2) == step


def test_two_steps_stay_and_a_past_that_was_left_goes() -> None:
    kept = {3: torch.zeros(4), 4: torch.ones(4)}
    oldest = kept[3]
    room = _room(kept, 5, 4, lambda copy: copy)
    assert list(kept) == [4] and room is oldest
    kept[5] = room
    assert _room(kept, 3, 6, lambda copy: copy).numel() == 6
    assert not kept, "steps after the one gone back to belong to another past"


def test_bits_come_back_as_they_were() -> None:
    odd = torch.tensor([float("nan"), -0.0, 1e-310, float("inf")], dtype=torch.float64)
    tensors = [odd, torch.randn(3, 5).bfloat16(), torch.arange(7), torch.tensor(2.5), odd[:0]]
    copy = torch.empty(packed(tensors), dtype=torch.uint8)
    pack(tensors, copy)
    back = [torch.zeros_like(tensor) for tensor in tensors]
    unpack(copy, back)
    assert digest(back) == digest(tensors)
    assert digest(back) != digest([torch.zeros_like(tensor) for tensor in tensors])


def test_how_far_a_run_is_comes_back() -> None:
    past = Past(Progress(7, 900, (2, 5)), 2, 6)
    assert Past.of(past.plain()) == past


def test_there_is_nothing_to_tear_without_checkpoints(tmp_path: Any) -> None:
    import random

    assert tear(tmp_path, random.Random(0)) is None


def test_ranks_that_fork_later_say_the_code_that_is_loaded() -> None:
    """Files may change while a run lasts; a rank started anew must still agree with the others."""
    assert resume.code_version.cache_info().currsize == 1
