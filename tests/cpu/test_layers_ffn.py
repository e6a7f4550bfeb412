"""Dense feed-forwards of a low rank and of blocks, beside the same with the zeros written out."""

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import silu

from moefold.config.check import check
from moefold.data.batch import pack
from moefold.layers.config import Selective
from moefold.layers.ffn import LowRankFfn, dense_ffn
from moefold.layers.flow import Flow
from moefold.layers.kinds.dense import Dense
from moefold.layers.precision import PrecisionPolicy
from moefold.layers.saved_tensors import SavedTensors
from moefold.model.config import Decoder


def diagonal(blocks_BOI: Tensor) -> Tensor:
    return torch.block_diag(*blocks_BOI) if blocks_BOI.dim() == 3 else blocks_BOI


@pytest.mark.parametrize("policy", [None, Selective(modules=("ffn",))])
@pytest.mark.parametrize("latent, blocks", [(6, 1), (None, 4), (6, 2)])
def test_a_low_rank_and_blocks_are_those_matrices(
    latent: int | None, blocks: int, policy: Selective | None
) -> None:
    """Plants: blocks exchanged; padding in the weights' gradients."""
    torch.manual_seed(0)
    ffn = dense_ffn(Dense(width=12, latent=latent, blocks=blocks), 8).double()
    for parameter in ffn.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    rows = pack([list(range(7))], pad_to=4)
    x_TD, dy_TD = torch.randn(2, 8, 8, dtype=torch.float64)
    x_TD.requires_grad_()
    given = (x_TD, *ffn.parameters())
    flow = Flow(rows, PrecisionPolicy("fp64"), saved_tensors=SavedTensors(policy))
    y_TD = ffn(x_TD, flow)
    z_TD = x_TD @ ffn.down.weight.t() if isinstance(ffn, LowRankFfn) else x_TD
    gate, up = (z_TD @ diagonal(ffn.w_in.select(-3, half)).t() for half in (0, 1))
    want_TD = (silu(gate) * up) @ diagonal(ffn.w_out).t()
    want_TD = want_TD @ ffn.up.weight.t() if isinstance(ffn, LowRankFfn) else want_TD
    torch.testing.assert_close(y_TD, want_TD, rtol=1e-12, atol=1e-12)
    # The last row is padding, which weights do not learn from.
    got = grad((y_TD * dy_TD).sum(), given)
    wanted = grad((want_TD * dy_TD)[:7].sum(), given)
    for one, other in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[0][:7], wanted[0][:7], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changed", "path", "nearest"),
    [
        ({"blocks": 3}, ("stacks", 0, "blocks", 0, "ffn", "blocks"), 2),
        ({"blocks": 4, "width": 10}, ("stacks", 0, "blocks", 0, "ffn", "width"), 12),
        ({"blocks": 4, "latent": 6}, ("stacks", 0, "blocks", 0, "ffn", "blocks"), 3),
    ],
)
def test_blocks_of_unequal_size_are_refused_with_the_nearest(
    changed: dict[str, int], path: tuple[str | int, ...], nearest: int
) -> None:
    heads = {"kind": "gqa", "heads": 2, "kv_heads": 2, "head_dim": 4}
    block = {"attention": heads, "ffn": {"kind": "dense", "width": 12} | changed}
    decoder = {"vocab": 8, "hidden": 8, "stacks": [{"blocks": [block]}]}
    found = check(Decoder, decoder).violations
    assert [(one.path, one.nearest) for one in found] == [(path, nearest)]
