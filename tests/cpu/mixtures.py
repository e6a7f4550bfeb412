"""Mixture layers of every kind of routing, and one run of their segments forward and backward."""

from typing import Any

import torch
from torch import Tensor

from moefold.data.batch import MicroBatch
from moefold.kernels.gradients import AccumulatingSink
from moefold.layers.flow import Flow
from moefold.layers.precision import PrecisionPolicy
from moefold.moe.config import Capacity, Moe, Shared
from moefold.moe.layer import MoeFfn
from moefold.moe.rows import MoeInput
from tests.cpu.small import DEEP, moe

MIXTURES: dict[str, Moe] = {
    "dropless": moe(shared=Shared(width=16, gate=True)),
    "capacity": moe(capacity=Capacity(factor=0.75)),
    "capacity by position": moe(capacity=Capacity(factor=0.75, drop="position")),
    "groups and bias": moe(router=DEEP),
}


def run_mixture(mixture: MoeFfn, recipe: PrecisionPolicy, rows: MicroBatch, x_TD: Tensor) -> Tensor:
    """Run the four segments forward and backward; returns the gradient of the rows."""
    flow = Flow(rows, recipe, AccumulatingSink())
    mixture.balance.start_step()
    x_TD = x_TD.detach().requires_grad_()
    state: Any = MoeInput(x_TD, x_TD)
    for segment in mixture.segments():
        state = segment(state, flow)
    kept = [t for t in state if t.requires_grad]
    torch.autograd.backward(kept, [torch.ones_like(t) for t in kept])
    assert x_TD.grad is not None
    return x_TD.grad
