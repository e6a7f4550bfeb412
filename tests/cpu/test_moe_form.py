"""Experts with biases and a bounded gate, beside the same written out expert by expert."""

import pytest
import torch
from torch import Tensor

from moefold.data.batch import from_ids
from moefold.layers.config import Activation, Selective
from moefold.layers.flow import Flow
from moefold.layers.precision import PrecisionPolicy
from moefold.layers.saved_tensors import SavedTensors
from moefold.moe.config import Moe, Router
from moefold.moe.experts import Experts

RECORD = Moe(
    width=4,
    router=Router(experts=4, top_k=2, order="topk_first", bias=True),
    expert_bias=True,
    activation=Activation(alpha=1.7, limit=0.5, offset=1.0),
)
ENDS = (3, 3, 7, 8)
"""Where the rows of each expert end: the second has none, and the last rows belong to none."""


def written_out(experts: Experts, x_RD: Tensor, p_R: Tensor, on_input: bool) -> Tensor:
    """Return the outputs of rows that have an expert, in the words of the formula."""
    outs, start = [], 0
    for e, end in enumerate(ENDS):
        x, p = x_RD[start:end], p_R[start:end, None]
        x, p = (x * p, torch.ones_like(p)) if on_input else (x, p)
        gate, up = (
            x @ experts.w_in[e, half].t() + experts.in_bias[e, half]  # type: ignore[index]
            for half in (0, 1)
        )
        gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
        a = (up + 1) * gate * torch.sigmoid(1.7 * gate)
        outs.append(p * (a @ experts.w_out[e].t() + experts.out_bias[e]))  # type: ignore[index]
        start = end
    return torch.cat(outs)


@pytest.mark.parametrize("weigh", ["output", "input"])
@pytest.mark.parametrize("policy", [None, Selective(modules=("experts",))])
def test_rows_of_no_expert_read_no_bias_and_leak_nothing(
    policy: Selective | None, weigh: str
) -> None:
    torch.manual_seed(0)
    experts = Experts(RECORD.model_copy(update={"weigh": weigh}), 8, "loop").double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    x_RD, p_R = torch.randn(11, 8, dtype=torch.float64), torch.rand(11, dtype=torch.float64)
    dy_RD = torch.randn(11, 8, dtype=torch.float64)
    for poisoned in (x_RD, p_R, dy_RD):
        poisoned[ENDS[-1] :] = torch.nan
    x_RD, p_R = x_RD.requires_grad_(), p_R.requires_grad_()
    given = (x_RD, p_R, *experts.parameters())
    rows = from_ids(torch.zeros(1, 8, dtype=torch.int64))
    flow = Flow(rows, PrecisionPolicy("fp64"), saved_tensors=SavedTensors(policy))
    live = slice(ENDS[-1])
    y_RD = experts(x_RD, torch.tensor(ENDS, dtype=torch.int32), p_R, flow)
    expected = written_out(experts, x_RD, p_R, weigh == "input")
    torch.testing.assert_close(y_RD[live], expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(y_RD, given, dy_RD)
    wanted = torch.autograd.grad(expected, given, dy_RD[live])
    for mine, theirs in zip(found, wanted, strict=True):
        mine, theirs = (g[live] if len(g) == 11 else g for g in (mine, theirs))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
