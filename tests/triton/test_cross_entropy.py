"""Cross-entropy's kernels against fp64: the whole vocabulary, and a share of it."""

from functools import partial

import pytest
import torch
from torch import Tensor

from moefold.comm.group import SELF_GROUP
from moefold.kernels.cross_entropy import chunked, fused
from moefold.kernels.fused import force_triton
from moefold.kernels.operand import Operand
from moefold.layers import loss
from tests.triton.values import DTYPES, assert_rounded, watched

SHAPES = ((0, 8), (1, 1), (5, 300), (3, 4097), (7, 5000))
IGNORED = -100


def drawn(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits and labels, of which the first of several is none."""
    g = torch.Generator().manual_seed(rows + width)
    labels_C = torch.randint(0, width, (rows,), generator=g)
    labels_C[: rows // 2] = IGNORED
    return torch.randn(rows, width, generator=g).mul_(4).to(dtype), labels_C


def gradient(logits_CV: Tensor, *rest: object) -> Tensor:
    into_CV = logits_CV.clone()
    fused.gradient(into_CV, *rest)
    return into_CV


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("first", (0, 3))
def test_loss_and_gradient_are_those_of_fp64(
    shape: tuple[int, int], dtype: torch.dtype, first: int
) -> None:
    logits_CV, labels_C = drawn(*shape, dtype)
    wide_CV, column_C = logits_CV.double(), labels_C - first
    mine_C = column_C >= 0
    stats_2C = watched(lambda: fused.statistics(logits_CV, labels_C, first), waste=3)
    picked_C1 = wide_CV.gather(1, column_C.clamp(min=0)[:, None])
    want_C = torch.where(mine_C, picked_C1[:, 0], 0)
    assert_rounded(stats_2C, torch.stack([wide_CV.logsumexp(1), want_C]))
    weight_C = torch.where(labels_C != IGNORED, 0.125, 0.0)
    hot_CV = torch.zeros_like(wide_CV).scatter_(1, column_C.clamp(min=0)[:, None], 1.0)
    want_CV = (wide_CV.softmax(1) - hot_CV * mine_C[:, None]) * weight_C[:, None]
    given = logits_CV, labels_C, stats_2C[0], weight_C, first
    assert_rounded(watched(lambda: gradient(*given), whole=False, waste=3), want_CV)


def test_a_row_without_weight_reads_as_zero_whatever_is_in_it() -> None:
    logits_CV, labels_C = drawn(6, 40, torch.bfloat16)
    logits_CV[0], weight_C = torch.nan, (labels_C != IGNORED).float()
    stats_2C = watched(lambda: fused.statistics(logits_CV, labels_C, 0), waste=3)
    given = logits_CV, labels_C, stats_2C[0], weight_C, 0
    found_CV = watched(lambda: gradient(*given), whole=False, waste=3)
    assert not found_CV[:3].any() and not found_CV.isnan().any() and found_CV[3:].all(1).all()


@pytest.mark.parametrize("chunk", (16, 7))
def test_the_chunked_loss_goes_through_kernels_where_rows_do(chunk: int) -> None:
    g = torch.Generator().manual_seed(0)
    x_TD, w_VD = (torch.randn(n, 6, generator=g) for n in (20, 50))
    labels_T = torch.arange(20) % 50
    labels_T[3:9], x_TD[4] = IGNORED, torch.nan
    found = []
    for way in (False, True):
        master = w_VD.clone().requires_grad_()
        for _ in range(2):
            with force_triton(way):
                total, dx_TD = chunked.loss_and_gradients(
                    x_TD, Operand(master, w_VD), labels_T, scale=torch.tensor(0.1), chunk=chunk
                )
        found.append((total, dx_TD, master.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_torch_knows_the_operations() -> None:
    logits_CV, labels_C = drawn(5, 40, torch.bfloat16)
    torch.library.opcheck(fused.statistics.overload, (logits_CV, labels_C, 3))
    weight_C, normaliser_C = torch.rand(5), logits_CV.float().logsumexp(1)
    torch.library.opcheck(fused.gradient.overload, (logits_CV, labels_C, normaliser_C, weight_C, 3))


def test_shares_of_the_vocabulary_add_up_to_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = torch.Generator().manual_seed(0)
    x_TD, w_VD = (torch.randn(n, 6, generator=g) for n in (20, 50))
    labels_T, cut = torch.arange(20) * 2, 30
    labels_T[3:9] = IGNORED
    shares = [(0, w_VD[:cut]), (cut, w_VD[cut:])]
    everyone = [fused.statistics(x_TD @ w.t(), labels_T, first) for first, w in shares]
    monkeypatch.setattr(loss, "gather", lambda stats_2C, ranks: torch.stack(everyone))
    how = {"scale": 0.1, "chunk": 20}
    masters = [w.clone().requires_grad_() for w in (w_VD, w_VD[:cut], w_VD[cut:])]
    with force_triton(True):
        total, dx_TD = chunked.loss_and_gradients(x_TD, Operand(masters[0], w_VD), labels_T, **how)
        parts = [
            chunked.loss_and_gradients(
                x_TD,
                Operand(master, w),
                labels_T,
                vocab_start=first,
                combine=partial(loss._combine_stats, ranks=SELF_GROUP),
                **how,
            )
            for (first, w), master in zip(shares, masters[1:], strict=True)
        ]
    for part, _ in parts:
        torch.testing.assert_close(part, total)
    torch.testing.assert_close(parts[0][1] + parts[1][1], dx_TD)
    torch.testing.assert_close(torch.cat([m.grad for m in masters[1:]]), masters[0].grad)
