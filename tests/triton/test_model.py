"""A whole step of a small model through own kernels is the plain one."""

import pytest
import torch
from torch import Tensor

from moefold.config.base import Record
from moefold.kernels.fused import force_triton
from moefold.layers.config import Selective
from moefold.layers.kinds.dense import Dense
from tests.cpu.small import GQA, decoder, gradients, model_of, moe, padded_rows, same
from tests.triton.watch import Watch

KEPT = {"all kept": None, "norms made again": Selective(modules=("norms",))}


def step(through: bool, recompute: Record | None) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of an fp32 step, with padding rows."""
    model = model_of(decoder(GQA, Dense(width=24), moe()), "fp32")
    with force_triton(through), Watch(3) as watch:
        figures = gradients(model, [padded_rows((9, 6), 3)], recompute, 16)
    assert bool(watch.launches) == through
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return figures.lm_loss, found


@pytest.mark.parametrize("kept", KEPT)
def test_a_step_through_kernels_is_the_plain_one(kept: str) -> None:
    (loss, found), (want, plain) = step(True, KEPT[kept]), step(False, KEPT[kept])
    assert loss == pytest.approx(want, rel=1e-6)
    same(found, plain, 1e-5)
    assert all(torch.isfinite(grad).all() for grad in found.values())
