"""Products on codes: beside loops in fp64, bit for bit, dense and grouped."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import moefold
from moefold.kernels.gradients import AUTOGRAD_SINK, DeferredSink
from moefold.kernels.quantise.blocks import encode, format_of
from moefold.kernels.quantise.hadamard import matrix
from moefold.kernels.quantise.philox import chance
from moefold.kernels.rows import CPU_CHUNK
from moefold.kernels.scaled.ffn import scaled_ffn
from moefold.kernels.scaled.products import (
    QuantisedOperand,
    QuantisedWeight,
    Recipe,
    RoundingSeed,
    scaled_product,
)
from moefold.kernels.scaled.rows import RowRuns
from tests.quantise_loop import decoded

KINDS = [
    Recipe("fp8_tensor"),
    Recipe("fp8_block"),
    Recipe("fp8_block", block=4),
    Recipe("fp8_block", block=4, narrow_dw=False),
    Recipe("mxfp8"),
    Recipe("mxfp8", "floor", block=4),
    Recipe("nvfp4"),
]
DRAW = RoundingSeed((11, 5), 7)
FIRST = 1000
"""Number of the first row."""


def numbers(seed: int, *shape: int) -> Tensor:
    """Over 2^±12: on normal numbers many faults of blocks move no bit."""
    drawn = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-12, 13, shape, generator=drawn).float()
    return (torch.randn(shape, generator=drawn) * sizes.exp2()).double()


def read(x: Tensor, recipe: Recipe, role: str, drawn: Tensor | None = None) -> tuple[Tensor, float]:
    """What a loop makes of a matrix, blocks along its last dim, and the scale of all of it."""
    form = recipe.format(role)
    if drawn is not None:  # what chance does is tested beside the elements
        made = encode(x, format_of(recipe.kind, role, block=recipe.block), -1, drawn)
        assert made.matrix_scale is not None
        return made.factors(torch.float64), made.matrix_scale.item()
    _, values, after = decoded(x.float().contiguous(), form)
    return torch.from_numpy(values), after if recipe.kind in ("fp8_tensor", "nvfp4") else 1.0


def summed(a: tuple[Tensor, float], b: tuple[Tensor, float]) -> Tensor:
    """Element by element; the scales of whole matrices come last."""
    rows = [[(x * y).sum().item() for y in b[0]] for x in a[0]]
    return torch.tensor(rows, dtype=torch.float64).view(len(a[0]), len(b[0])) * a[1] * b[1]


def turned(x: Tensor) -> Tensor:
    """Runs of 16 rows by the transform, term by term."""
    rows = torch.nn.functional.pad(x.float(), (0, 0, 0, -len(x) % 16))
    out = torch.zeros_like(rows)
    for at in range(len(rows)):
        for k in range(16):
            out[at] += rows[at // 16 * 16 + k] * matrix()[k, at % 16]
    return out


def expected(
    x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The three products of one group."""
    place = torch.arange(64) + FIRST + (group << 40)
    up = [None, None]
    last = [dy.mT, x.mT]
    if recipe.kind == "nvfp4":
        last = [turned(dy).mT, turned(x).mT]
        keys = (11, 10), (11, 11)
        up = [chance(place[: len(dy)], range(dy.shape[1]), keys[0], 7)]
        up.append(chance(place[: last[0].shape[1]], range(dy.shape[1]), keys[1], 7).mT)
    square = recipe.kind in ("fp8_block", "nvfp4", "fp8_tensor")
    w_in, after = read(w, recipe, "weight")
    w_out = (w_in.mT, after) if square else read(w.mT, recipe, "weight")
    y = summed(read(x, recipe, "rows"), (w_in, after))
    dx = summed(read(dy, recipe, "gradient", up[0]), w_out)
    if not recipe.narrow_dw:
        return y, dx, dy.mT @ x
    dw = summed(read(last[0], recipe, "gradient", up[1]), read(last[1], recipe, "rows"))
    return y, dx, dw


@pytest.mark.parametrize("recipe", KINDS, ids=str)
@pytest.mark.parametrize("outputs", [20, 36])
def test_the_three_products_equal_loops(
    recipe: Recipe, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense with padding, and groups with empty ones; square, and oblong some rows at a time.

    Plants: blocks along features for the weight's gradient; across groups; codes of codes; one
    direction of a weight's blocks; no transform of one operand; padding in the largest of a matrix;
    draws and largest numbers of pieces of a run.
    """
    monkeypatch.setattr("moefold.kernels.rows.CPU_CHUNK", 1 if outputs == 36 else CPU_CHUNK)
    inputs = 20
    for ends in (21, [3, 3, 20, 21]):
        groups = 1 if isinstance(ends, int) else len(ends)
        x, dy = numbers(1, 24, inputs), numbers(2, 24, outputs)
        x[21:], dy[21:] = torch.nan, 1e30
        w = numbers(3, *(() if isinstance(ends, int) else (groups,)), outputs, inputs)
        rows, master = x.clone().requires_grad_(), w.clone().requires_grad_()
        made = QuantisedWeight.of(w, recipe)
        where = RowRuns.dense(21, torch.arange(24) + FIRST)
        if not isinstance(ends, int):
            where = RowRuns.of_groups(torch.tensor(ends, dtype=torch.int32), FIRST)
        sink = DeferredSink()
        y = scaled_product(
            rows, QuantisedOperand(master, lambda made=made: made, DRAW), where, sink
        )
        y.backward(dy)
        assert sink.drain() == 1 and rows.grad is not None and master.grad is not None
        assert not y[21:].any() and not rows.grad[21:].any()
        cuts = [0, ends] if isinstance(ends, int) else [0, *ends]
        matrices, gradients = w.view(groups, outputs, -1), master.grad.view(groups, outputs, -1)
        for group, (start, end) in enumerate(pairwise(cuts)):
            if start == end:
                assert not gradients[group].any()
                continue
            part = slice(start, end)
            one = expected(x[part], matrices[group], dy[part], recipe, group)
            got = y[part], rows.grad[part], gradients[group]
            for name, mine, loop in zip(("y", "dx", "dw"), got, one, strict=True):
                if recipe.narrow_dw or name != "dw":
                    assert torch.equal(mine, loop), (name, ends, group)
                else:
                    torch.testing.assert_close(mine, loop)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("fp8_block", "fp32", hidden=128),
        Recipe("mxfp8", hidden=16),
        Recipe("nvfp4", hidden=4),
    ],
    ids=str,
)
def test_backward_reads_codes_of_pre_activations(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward reads what they are; gate and up have blocks of their own. Some rows at a time.

    Plants: blocks of whole rows; forward reads codes; what is made again is wide.
    """
    monkeypatch.setattr("moefold.kernels.rows.CPU_CHUNK", 160)
    width, form = 20, recipe.hidden_format
    assert form is not None
    ends = torch.tensor([3, 3, 20, 21], dtype=torch.int32)
    x_ND, p_N, dy_ND = numbers(1, 24, 16), numbers(2, 24), numbers(3, 24, 16)
    w_in, w_out = numbers(4, 4, 2, width, 16), numbers(5, 4, 16, width)
    where = RowRuns.of_groups(ends, FIRST)
    codes = [QuantisedWeight.of(w.flatten(1, -2), recipe) for w in (w_in, w_out)]

    def leaves(*tensors: Tensor) -> list[Tensor]:
        return [one.clone().requires_grad_() for one in tensors]

    def operands(*masters: Tensor) -> list[QuantisedOperand]:
        pairs = zip(masters, codes, strict=True)
        return [QuantisedOperand(one, lambda made=made: made, DRAW) for one, made in pairs]

    def both(again: bool) -> tuple[Tensor, ...]:
        given = leaves(x_ND, p_N, w_in, w_out)

        def ffn(x_ND: Tensor, p_N: Tensor) -> Tensor:
            first, last = operands(*given[2:])
            return scaled_ffn(x_ND, first, last, where, AUTOGRAD_SINK, p_N, form)

        y_ND = checkpoint(ffn, *given[:2], use_reentrant=False) if again else ffn(*given[:2])
        y_ND.backward(dy_ND)
        return y_ND.detach(), *(one.grad for one in given)  # type: ignore[misc]

    x, w_first, w_last = leaves(x_ND, w_in, w_out)
    first, last = operands(w_first, w_last)
    h_N2F = scaled_product(x, first, where, AUTOGRAD_SINK)
    gate, up = h_N2F.detach().chunk(2, 1)
    (a,) = leaves(silu(gate) * up * p_N[:, None])
    y = scaled_product(a, last, where, AUTOGRAD_SINK)
    y.backward(dy_ND)
    assert a.grad is not None
    rule = {"scales": recipe.scales} if recipe.kind == "fp8_block" else {}
    blocks = [block for half in (gate, up) for block in half.split(form.columns or 0, 1)]
    made = [moefold.quantise(one, "fp8_block", **rule) for one in blocks]
    # Strided as it is: an exponential of rows that lie apart may differ in the last bit.
    read = [one.dequantise(torch.float64) for one in made]
    h, p = leaves(torch.cat(read, 1), p_N)
    gate, up = h.chunk(2, 1)
    (silu(gate) * up * p[:, None]).backward(a.grad)
    h_N2F.backward(h.grad)
    expected = y.detach(), x.grad, p.grad, w_first.grad, w_last.grad
    for again in (False, True):
        for name, mine, plain in zip("yxpio", both(again), expected, strict=True):
            if name == "p":  # a sum over features
                torch.testing.assert_close(mine, plain)
            else:
                assert plain is not None and torch.equal(mine, plain), name


def test_sums_do_not_depend_on_their_order() -> None:
    """Scales of few bits, and a matrix's own after the sum: fp64 adds without rounding."""
    for kind in ("fp8_block", "mxfp8", "nvfp4"):
        a, b = (encode(numbers(seed, 4, 4096), format_of(kind, "rows")) for seed in (1, 2))
        one, other = a.factors(torch.float64), b.factors(torch.float64)
        order = torch.randperm(4096, generator=torch.Generator().manual_seed(0))
        whole = one @ other.mT
        assert torch.equal(whole, one[:, order] @ other[:, order].mT)
        halves = zip(one.chunk(2, 1), other.chunk(2, 1), strict=True)
        assert torch.equal(whole, sum((x @ y.mT for x, y in halves), torch.zeros(4, 4)))


def test_chance_differs_by_step_weight_and_use() -> None:
    """And is the same for the same place. Plant: the same numbers for rows and for columns."""
    at = torch.arange(8) + FIRST
    made = DRAW.draw(at, 8, 0)
    assert torch.equal(made, DRAW.draw(at, 8, 0))
    assert torch.equal(made[:, 2:5], DRAW._replace(columns=(range(2, 5),)).draw(at, 3, 0))
    others = (
        DRAW.draw(at, 8, 1),
        DRAW.draw(at + (1 << 40), 8, 0),
        DRAW._replace(step=8).draw(at, 8, 0),
        DRAW._replace(key=(11, 6)).draw(at, 8, 0),
        DRAW._replace(columns=(range(8, 16),)).draw(at, 8, 0),
        DRAW.draw(at + 8, 8, 0),
    )
    assert all((made != other).float().mean() > 0.9 for other in others)
