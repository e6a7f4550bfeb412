"""Integers of a running step: what indexes or multiplies is int64, whatever made it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefold.moe.config import Capacity
from tests.cpu.small import GQA, decoder, gradients, model_of, moe, padded_rows

NARROW = {torch.int32, torch.int16, torch.int8, torch.uint8}
INDEXES = ("index", "gather", "scatter", "take", "embedding", "mul", "pow", "shift", "mm")


class Narrow(TorchDispatchMode):
    """Collects operations that index by, or multiply, a narrow integer."""

    def __init__(self) -> None:
        super().__init__()
        self.misused: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        if any(isinstance(t, Tensor) and t.dtype in NARROW for t in given):
            self.seen += 1
            name = func.overloadpacket.__name__
            if name != "_grouped_mm" and any(word in name for word in INDEXES):
                self.misused.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", ["loop", "grouped"])
def test_a_step_indexes_by_int64_alone(kernel: str) -> None:
    """Capacity, padding, every balance term. Plant: keep row numbers as int32 for a gather."""
    record = decoder(GQA, moe(capacity=Capacity(factor=0.75)), moe())
    model = model_of(record, "bf16", experts=kernel)
    with Narrow() as narrow:
        gradients(model, [padded_rows((20, 9), 3), padded_rows((7,), 0)], None, 16)
    assert narrow.misused == [] and narrow.seen > 8


def test_a_narrow_index_is_noticed() -> None:
    rows = torch.tensor([1, 0], dtype=torch.int32)
    with Narrow() as narrow:
        torch.ones(2, 3).index_select(0, rows)
        rows * 3
        rows + 3
    assert narrow.misused == ["index_select", "mul"] and narrow.seen == 3
