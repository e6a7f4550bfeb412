"""Moments in few bits: codes beside a loop's, real ones, parts of parameters, and what is saved."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moefold.config.slot import build
from moefold.kernels.quantise.expanded import decode, encode, extremes, factors
from moefold.optim import moments
from moefold.optim.adamw import AdamWOptimizer
from moefold.optim.config import AdamW
from moefold.optim.moments import Bf16Moment, ElementRun, Fp8Moment, MomentPosition
from moefold.run import load_run
from tests.cpu.test_optim_adamw import parameters, run

STORED = np.load(Path(__file__).parents[1] / "data" / "moments.npz")
"""16 rows of four weights, half of them the worst without expansion: AdamW on the run of
``bench/precision_curves.py`` after 300 steps."""
E4M3 = sorted(
    {abs(torch.tensor(c, dtype=torch.uint8).view(torch.float8_e4m3fn).item()) for c in range(127)}
)


def placed(shape: tuple[int, ...], *box: tuple[int, int], first: int = 0) -> MomentPosition:
    """Where elements stand of a piece of a parameter, all of it unless a box is given."""
    return MomentPosition("w", first, box or tuple((0, size) for size in shape), shape, seed=3)


def kept(x: Tensor, size: int = 128, *cuts: int) -> list[Fp8Moment]:
    """A tensor as parts, each written by itself and settled with what the others have."""
    flat, ends, place = x.reshape(-1), [0, *cuts, x.numel()], placed(tuple(x.shape))
    parts, found = list[Fp8Moment](), dict[int, list[Tensor]]()
    for start, stop in pairwise(ends):
        part = Fp8Moment(flat[start:stop], ElementRun(start, stop - start, x.shape[-1], size))
        for a, b in part.run.chunks():
            drawn, _ = place.uniform(part.run.subrun(a, b), x.device, 1)
            part.write(a, b, flat[start + a : start + b], drawn)
        for group in part.run.partial_groups:
            found.setdefault(group, []).append(extremes(part.pending[group][:1])[0])
        parts.append(part)
    for part in parts:
        for group in part.run.partial_groups:
            part.encode_group(group, torch.stack(found[group]).amax(0))
    return parts


def read(parts: list[Fp8Moment], like: Tensor) -> Tensor:
    found = [part.read(a, b) for part in parts for a, b in part.run.chunks()]
    return torch.cat(found).view_as(like)


def looped(group: list[float]) -> list[float]:
    """What a group's codes stand for, by COAT's formulas in Python's numbers."""
    sizes = [abs(x) for x in group if x]
    if not sizes:
        return group
    high, low = max(sizes), min(sizes)
    power, middle = 1.0, math.sqrt(high) * math.sqrt(low)
    if high > low:
        power = min(math.floor(math.log2(448 * 448 / 2) / math.log2(high / low) * 16) / 16, 1024)
    scale = (high / middle) ** power / 448
    near = [
        min(E4M3, key=lambda code: abs(code - (abs(x) / middle) ** power / scale)) for x in group
    ]
    return [
        math.copysign((c * scale) ** (1 / power) * middle, x)
        for c, x in zip(near, group, strict=True)
    ]


def test_codes_stand_for_what_a_loop_says() -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(-14, 14, (6, 40), generator=draw).float().exp2()
    x = torch.randn(6, 40, generator=draw) * sizes
    x[1], x[2, :20], x[3], x[4, 1:] = 0, 0, 3e-9, -1e30
    for group, mine in zip(
        x.tolist(), decode(encode(x, f := factors(extremes(x))), f), strict=True
    ):
        torch.testing.assert_close(mine, torch.tensor(looped(group)), rtol=1e-5, atol=0)


def test_what_is_far_apart_stays_finite_and_what_is_not_finite_reads_back_as_nan() -> None:
    x = torch.tensor([[1e38, 1e-45, 1.0], [math.inf, 1.0, 1.0], [math.nan, 1.0, 0.0]])
    found = decode(encode(x, f := factors(extremes(x))), f)
    assert found[0].isfinite().all() and found[0, 2] > 0
    assert found[1:].isnan().all()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_moments_decay_and_grow_at_any_beta(kind: Any) -> None:
    """After one large gradient the second moment falls to that of the small ones that follow.

    In each group of FP8 one element's gradient stays large, so that no scale falls with the rest.
    To nearest, bf16 times 0.999 is the number before.
    """
    record = AdamW(lr=0.0, betas=(0.99, 0.999), moments=kind, moment_group=16)
    p = torch.nn.Parameter(torch.zeros(64, 32))
    optimizer = AdamWOptimizer(record, {"w": p})
    first, second = torch.zeros(64, 32), torch.zeros(64, 32)
    for step in range(300):
        p.grad = torch.full_like(p, 0.1 if step else 1.0)
        p.grad[:, ::16] = 2
        first.lerp_(p.grad, 1 - 0.99)
        second.lerp_(p.grad.square(), 1 - 0.999)
        optimizer.step()
    steady = torch.arange(32) % 16 == 0
    for moment, exact in zip(optimizer.low_precision["w"], (first, second), strict=True):
        found = moment.read(0, p.numel()).view_as(p)
        for some in (steady, ~steady):
            assert found[:, some].mean().item() == pytest.approx(
                exact[:, some].mean().item(), rel=0.03
            )


def test_what_is_drawn_for_an_element_is_the_same_wherever_it_is() -> None:
    """In pieces that axes cut, and runs of them; other moments, steps, names and seeds draw others.

    Plant: rows are numbered as in the piece.
    """
    shape, device = (4, 60, 20), torch.device("cpu")
    everything = ElementRun(0, math.prod(shape), 20, 4)

    def drawn(place: MomentPosition, run: ElementRun, step: int = 7) -> Tensor:
        return torch.stack(place.uniform(run, device, step))

    whole = drawn(placed(shape), everything).view(2, *shape)
    for box in (((1, 3), (0, 60), (0, 20)), ((0, 4), (3, 6), (0, 20)), ((2, 4), (0, 3), (8, 16))):
        piece = whole[:, *(slice(*one) for one in box)]
        row, flat = piece.shape[-1], piece.flatten(1)
        for start, stop in pairwise((0, 3, 5, 2 * row, 3 * row + 1, flat.shape[1])):
            found = drawn(placed(shape, *box), ElementRun(start, stop - start, row, 4))
            assert torch.equal(found, flat[:, start:stop])
    others = [placed(shape)._replace(**change) for change in ({"name": "v"}, {"seed": 4})]
    all_of = [whole.view(2, -1), drawn(placed(shape), everything, 8)]
    all_of += [drawn(other, everything) for other in others]
    rows = torch.cat(all_of)
    assert ((rows - 0.5).mean(1).abs() < 0.02).all()
    assert ((rows.var(1) - 1 / 12).abs() < 0.005).all()
    together = rows.corrcoef().fill_diagonal_(0)
    assert together.abs().max() < 0.06
    assert torch.stack([rows[:, 1:], rows[:, :-1]]).view(2, -1).corrcoef()[0, 1].abs() < 0.03


def test_rounding_keeps_the_mean_and_what_the_format_has() -> None:
    """Of bf16 and of FP8 codes; zeros, codes, infinities and NaN stay what they are."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, generator=draw) * torch.randn(8, 16, generator=draw).mul(4).exp2()
    x[0, :4] = 0
    many = x.repeat(1000, 1)
    (coded,) = kept(many, 16)
    narrow = Bf16Moment(many)
    drawn, _ = placed((8000, 16)).uniform(ElementRun(0, many.numel(), 16, 16), x.device, 1)
    narrow.write(0, many.numel(), many.flatten(), drawn)
    for found, bound in ((read([coded], many), 0.02), (narrow.values.float(), 4e-4)):
        mean = found.view(1000, 8, 16).mean(0)
        assert (mean - x).abs().max() <= bound * x.abs().max()
        assert torch.equal(mean[0, :4], x[0, :4])
        assert ((mean - x).abs() <= 20 * bound * x.abs()).all()
    chance_GN = drawn.view_as(many)
    codes = encode(many, f := factors(extremes(many)), chance_GN)
    assert torch.equal(encode(decode(codes, f), f, chance_GN).float(), codes.float())
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -1.0, 1e-45])
    narrow = Bf16Moment(odd)
    narrow.write(0, 6, odd, torch.full((6,), 1 - 2**-16))
    assert torch.equal(narrow.values.float()[:2], odd[:2]) and narrow.values[2].isnan()
    assert narrow.values[3] == 0 and narrow.values[4] == -1


def test_adams_update_of_real_moments_is_near() -> None:
    """Within 0.03, of bf16 within 0.005. Plant: codes without expansion of their range."""
    names = {key.split("/")[0] for key in STORED.files}
    for change, bound in (
        (lambda x: read(kept(x), x), 0.03),
        (lambda x: x.bfloat16().float(), 5e-3),
    ):
        apart = whole = 0.0
        for name in names:
            first, second = (
                torch.from_numpy(STORED[f"{name}/{w}"]) for w in ("exp_avg", "exp_avg_sq")
            )
            exact = first / (second.sqrt() + 1e-8)
            ours = change(first) / (change(second).sqrt() + 1e-8)
            apart += float((ours - exact).square().sum())
            whole += float(exact.square().sum())
        assert 1e-4 < (apart / whole) ** 0.5 < bound


@pytest.mark.parametrize(
    ("shape", "size"),
    [((4, 256), 128), ((3, 130), 128), ((7, 16), 4), ((5, 6), 4), ((2, 3, 70), 32)],
)
def test_parts_of_a_parameter_have_the_codes_of_the_whole(
    shape: tuple[int, ...], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut through groups and rows, in several pieces, and some elements at a time.

    Plant: the scale of a cut group is of the part that is here.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).exp()
    (whole,) = kept(x, size)
    exact, n = read([whole], x), x.numel()
    for cuts in ((n // 3, n // 2), (1, 2, n - 1), tuple(range(1, n, 5))):
        parts = kept(x, size, *cuts)
        assert torch.equal(read(parts, x), exact)
        for part in parts:
            groups = slice(part.run.groups[0], part.run.groups[-1] + 1)
            assert torch.equal(part.factors_G3, whole.factors_G3[groups])
    monkeypatch.setattr(moments, "CHUNK", 64)
    assert torch.equal(read(kept(x, size), x), exact)


@pytest.mark.parametrize(("kind", "apart"), [("bf16", 0.02), ("fp8", 0.1)])
def test_updates_are_near_those_with_wide_moments(kind: str, apart: float) -> None:
    """Of what has one dim they are the same; two numbers an element say how much is kept."""
    found = {}
    for moments_in in ("fp32", kind):
        record = AdamW(lr=0.01, moments=moments_in, moment_group=4)  # type: ignore[arg-type]
        params = parameters()
        optimizer = build(record, params)
        run(optimizer, range(5))
        found[moments_in] = params
        held = sum(t.nbytes for t in optimizer.state().values() if t.dim())
        shapes = [tuple(p.shape) for p in params.values() if p.numel()]
        each = (2 * math.prod(s) * record.moment_bytes(s, 4) for s in shapes)
        assert held == sum(each)
    start = parameters()
    for name, exact in found["fp32"].items():
        ours, was = found[kind][name], start[name]
        if exact.dim() < 2:
            assert torch.equal(ours, exact)
        elif exact.numel():
            error = (ours - exact).norm() / (exact - was).norm()
            assert 1e-5 < error.item() < apart, name


def test_a_run_says_what_its_moments_are_kept_in() -> None:
    run = load_run("tiny", ["optim={kind: adamw, moments: fp8}"])
    assert run.optim.group == 128 and run.optim.moment_bytes((8, 256), 4) == 1 + 12 / 128
