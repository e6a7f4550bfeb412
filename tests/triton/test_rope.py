"""The kernels of rotation against fp64: of heads, of a head's last dims, of what latents give."""

import pytest
import torch
from torch import Tensor

from moefold.kernels.fused import force_triton
from moefold.kernels.rope import fused
from moefold.kernels.rope.rotate import expand, rotate
from tests.triton.values import DTYPES, assert_rounded, watched

SIZES = ((0, 2, 0, 4), (1, 1, 0, 3), (7, 3, 0, 20), (9, 4, 6, 4), (3, 2, 128, 32))
LAYOUTS = ("half", "interleaved")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g).to(dtype)


def angles(tokens: int, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle_Tp = drawn(tokens, pairs) * 3
    return angle_Tp.cos().to(dtype), angle_Tp.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_turned_heads_are_those_of_fp64(
    size: tuple[int, int, int, int], layout: str, dtype: torch.dtype
) -> None:
    tokens, heads, stay, pairs = size
    dims = stay + 2 * pairs
    # Heads may lie in wider rows.
    x_THd = drawn(tokens, heads + 1, dims, dtype=dtype)[:, :heads]
    dy_THd, turn = drawn(tokens, heads, dims, dtype=dtype), angles(tokens, pairs, dtype)
    wide = x_THd.double().requires_grad_()
    want = rotate(wide, *(part.double() for part in turn), layout)
    want.backward(dy_THd.double())

    def ours(back: bool) -> Tensor:
        given = dy_THd if back else x_THd
        return fused.rotate(given, *turn, layout == "interleaved", back)

    assert_rounded(watched(lambda: ours(False), waste=None), want.detach())
    assert wide.grad is not None
    assert_rounded(watched(lambda: ours(True), waste=None), wide.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "size", ((0, 2, 4, 3, 2), (1, 1, 1, 1, 1), (9, 3, 5, 6, 4), (2, 10, 128, 128, 32)), ids=str
)
def test_keys_and_values_of_latents_are_those_of_fp64(
    size: tuple[int, ...], layout: str, dtype: torch.dtype
) -> None:
    tokens, heads, stay, values, pairs = size
    kv_THx = drawn(tokens, heads, stay + values, dtype=dtype)
    rope_Tr, turn = drawn(tokens, 2 * pairs + 3, dtype=dtype)[:, 3:], angles(tokens, pairs, dtype)
    dk_THd = drawn(tokens, heads, stay + 2 * pairs, dtype=dtype)
    dv_THv = drawn(tokens, heads, values, dtype=dtype)
    wide, wide_rope = (x.double().requires_grad_() for x in (kv_THx, rope_Tr))
    want = expand(wide, wide_rope, *(part.double() for part in turn), stay, layout)
    torch.autograd.backward(want, (dk_THd.double(), dv_THv.double()))
    how = stay, layout == "interleaved"
    got = watched(lambda: fused.expand(kv_THx, rope_Tr, *turn, *how))
    for ours, theirs in zip(got, want, strict=True):
        assert_rounded(ours, theirs.detach())
    given = watched(lambda: fused.expand_backward(dk_THd, dv_THv, *turn, *how))
    for ours, leaf in zip(given, (wide, wide_rope), strict=True):
        assert leaf.grad is not None
        assert_rounded(ours, leaf.grad)


def test_gradients_come_through_the_kernels() -> None:
    turn = angles(6, 2, torch.float32)

    def found(through: bool) -> list[Tensor]:
        x_THd, kv_THx, rope_Tr = (drawn(6, 3, 7), drawn(6, 3, 5), drawn(6, 4))
        leaves = [x.requires_grad_() for x in (x_THd, kv_THx, rope_Tr)]
        with force_triton(through):
            k_THd, v_THv = expand(kv_THx, rope_Tr, *turn, 3, "half")
            whole = rotate(x_THd, *turn, "interleaved")
        (whole.square().sum() + k_THd.pow(3).sum() + v_THv.square().sum()).backward()
        assert all(leaf.grad is not None for leaf in leaves)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    torch.testing.assert_close(found(True), found(False))


def test_torch_knows_the_operations() -> None:
    x_THd, turn = drawn(5, 2, 7), angles(5, 2, torch.float32)
    torch.library.opcheck(fused.rotate.overload, (x_THd, *turn, True, False))
    torch.library.opcheck(fused.expand.overload, (x_THd, drawn(5, 4), *turn, 3, True))
    given = (x_THd, drawn(5, 2, 4), *turn, 3, False)
    torch.library.opcheck(fused.expand_backward.overload, given)
