"""Codes and scales: beside loops, and bit for bit beside other projects' quantisers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import moefold
from moefold.kernels.quantise import elements
from moefold.kernels.quantise.blocks import BLOCKS, SCALES, Quantised, encode, format_of, quantise
from moefold.kernels.quantise.hadamard import SIGNS, matrix, transform
from moefold.kernels.quantise.philox import MASK, chance, philox
from moefold.kernels.quantise.rows import BlockCodec
from tests.quantise_inputs import SQUARE, families
from tests.quantise_loop import decoded

VECTORS = np.load(Path(__file__).parents[1] / "data" / "quantised.npz")
INPUTS = families()
EVEN = 160
RULES = [(kind, rule) for kind, rules in SCALES.items() for rule in rules]


def bits(x: Tensor) -> np.ndarray:
    x = x.contiguous()
    return (x if x.dtype == torch.float32 else x.view(torch.uint8)).numpy()


def stored(name: str, part: str) -> np.ndarray:
    return VECTORS[f"{name}/{part}"]


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    assert one.dtype == other.dtype and one.size == other.size
    return one.tobytes() == other.tobytes()


def unsigned(codes: np.ndarray) -> np.ndarray:
    """The sign of zero is no part of TransformerEngine's E2M1."""
    halves = np.stack((codes & 15, codes >> 4), -1)
    return np.where(halves == 8, 0, halves)


# ------------------------------------------------------------------ beside other projects


@pytest.mark.parametrize("family", INPUTS)
def test_codes_equal_those_of_other_projects(family: str) -> None:
    """Plants: ``448 / amax`` of a Python number; E8M0 by a logarithm; E4M3 for E5M2."""
    x = INPUTS[family]
    for word, role in (("e4m3", "rows"), ("e5m2", "gradient")):
        made = moefold.quantise(x, "fp8_tensor", role=role)
        assert equal(bits(made.codes), stored(f"te_tensor_{word}/{family}", "codes"))
        assert equal(bits(made.scales).ravel(), stored(f"te_tensor_{word}/{family}", "scales"))
    for name, kind, rule in (
        ("te_rows", "fp8_block", "power"),
        ("te_rows_fp32", "fp8_block", "fp32"),
        ("torchao_floor", "mxfp8", "floor"),
        ("torchao_up", "mxfp8", "up"),
        ("deepgemm_up", "mxfp8", "up"),
    ):
        made = moefold.quantise(x, kind, scales=rule)
        codes, scales = stored(f"{name}/{family}", "codes"), stored(f"{name}/{family}", "scales")
        read = made.scales.float() if name == "deepgemm_up" else made.scales
        if family == "subnormal" and name.startswith("torchao"):
            assert not equal(bits(made.codes), codes)  # it divides by no less than 2^-126
        elif name == "torchao_up" and family == "above":
            assert not equal(bits(read), scales)  # by a logarithm in fp32: one step too low
        elif family == "subnormal" and name == "deepgemm_up":
            assert not equal(bits(read), scales)  # it takes 1e-4 for the least amax
        elif family == "zeros" and name == "deepgemm_up":
            assert equal(bits(made.codes), codes)  # and so for blocks of zeros
        else:
            assert equal(bits(made.codes), codes), name
            assert equal(bits(read), scales), name
    numbers = stored(f"microxcaling_floor/{family}", "values")
    read = moefold.quantise(x, "mxfp8", scales="floor").dequantise()[: len(numbers)]
    assert equal(bits(read + 0.0), numbers + np.float32(0))


@pytest.mark.parametrize("family", INPUTS)
def test_nvfp4_equals_transformer_engine(family: str) -> None:
    """Plants: weights by 1 x 16; no signs."""
    x = INPUTS[family]
    rows = moefold.quantise(x, "nvfp4")
    square = moefold.quantise(x, "nvfp4", role="weight")
    turned = moefold.quantise(transform(x.mT), "nvfp4")
    for name, made in (("rows", rows), ("square", square), ("turned", turned)):
        said = f"te_nvfp4_{name}/{family}"
        assert (unsigned(bits(made.codes)) == unsigned(stored(said, "codes"))).all(), name
        scales = bits(made.scales).repeat(16 if name == "square" else 1, 0)
        assert equal(scales, stored(said, "scales")), name


@pytest.mark.parametrize("family", ["normal", "wide"])
def test_blocks_of_weights_equal_transformer_engine(family: str) -> None:
    """Of 128 x 128, in a matrix that they do not divide; either way along the same blocks."""
    x = families(SQUARE, SQUARE)[family]
    made = moefold.quantise(x, "fp8_block", role="weight")
    assert equal(bits(made.codes), stored(f"te_square/{family}", "codes"))
    assert equal(bits(made.scales), stored(f"te_square/{family}", "scales"))
    other = moefold.quantise(x, "fp8_block", -2, role="weight")
    assert torch.equal(made.dequantise(), other.dequantise())


# ------------------------------------------------------------------ beside loops


@pytest.mark.parametrize(("kind", "rule"), RULES)
@pytest.mark.parametrize("dim", [-1, -2])
def test_codes_equal_a_loop(kind: str, rule: str, dim: int) -> None:
    """Odd sizes, both orientations, each role. Plant: blocks along the other dim."""
    for family, x in families(5, 37).items():
        for role in ("rows", "gradient", "weight"):
            form = format_of(kind, role, rule, block=None if kind == "fp8_tensor" else 16)
            made = encode(x, form, dim)
            along = (x if dim == -1 else x.mT).contiguous()
            codes, read, after = decoded(along, form)
            mine = made if dim == -1 else made.mT
            held = elements.unpack(mine.codes) if form.element is None else mine.codes
            assert (bits(held)[:, : along.shape[1]] == codes).all(), (family, role)
            assert torch.equal(mine.factors(torch.float64), torch.from_numpy(read))
            assert mine.output_scale is None or mine.output_scale.item() == after


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 130), (129, 127), (2, 3, 40), (0, 8), (4, 0)])
def test_any_shape_keeps_its_shape(kind: str, shape: tuple[int, ...]) -> None:
    """One dim, matrices in a row, no elements; groups have their own scales."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for dim in (-1, -2)[: x.ndim]:
        made = moefold.quantise(x, kind, dim)
        read = made.dequantise()
        assert read.shape == x.shape and read.dtype == torch.float32
        worst = 0.27 if kind == "nvfp4" else 0.07
        assert (read - x).norm() <= worst * x.norm()
        if x.ndim == 3:
            alone = [moefold.quantise(one, kind, dim).dequantise() for one in x]
            assert torch.equal(read, torch.stack(alone))


@pytest.mark.parametrize(("kind", "rule"), RULES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_reads_back_as_nan(kind: str, rule: str, bad: float) -> None:
    """All of the block, or of the matrix that shares a scale, and no more. Plant: bare cast."""
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    x[1, 2, 5] = bad
    read = moefold.quantise(x, kind, scales=rule).dequantise()
    length = BLOCKS[kind]
    wrong = torch.zeros_like(x, dtype=torch.bool)
    if kind in ("fp8_tensor", "nvfp4"):
        wrong[1] = True
    else:
        wrong[1, 2, :length] = True
    assert torch.equal(read.isnan(), wrong) and not read.isinf().any()


def test_elements_equal_every_rounding() -> None:
    """All bf16 numbers, midpoints and their neighbours as E2M1; exponents as exact powers."""
    drawn = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    x = torch.cat([drawn[drawn.isfinite()], *(torch.nextafter(codes, codes + d) for d in (-9, 9))])
    x = torch.cat([x, codes, -codes])
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    gap = (x.double().abs().clamp(max=6)[:, None] - sizes).abs()
    even = torch.arange(8) % 2 * 1e-12  # of two that are as near, the even code
    expected = (gap + even).argmin(1) | (x.signbit().long() << 3)
    assert torch.equal(elements.cast_e2m1(x).long(), expected)
    assert torch.equal(elements.unpack(elements.pack(elements.cast_e2m1(x[:64]))), expected[:64])
    exponents = torch.arange(255)
    powers = elements.power_of_2(exponents.to(torch.uint8))
    assert torch.equal(powers.double(), torch.exp2(exponents.double() - 127))
    above = torch.nextafter(powers, powers * 2)
    assert torch.equal(elements.ceil_exponent(powers).long(), exponents)
    assert torch.equal(elements.ceil_exponent(above).long(), (exponents + 1).clamp(max=254))


def test_transform_is_orthogonal_and_in_order() -> None:
    """The matrix times itself turned is one; a run's bits do not depend on what is beside it."""
    assert torch.equal(matrix() @ matrix().t(), torch.eye(16))
    assert (matrix()[:, 0] * 4 == torch.tensor(SIGNS)).all()
    x = families(7, 40)["wide"]
    whole = transform(x)
    assert whole.shape == (7, 48)
    assert torch.equal(whole[2:3, 16:32], transform(x[2:3, 16:32]))
    torch.testing.assert_close(whole[:, :32].double().norm(), x[:, :32].double().norm())


# ------------------------------------------------------------------ chance


def test_philox_gives_its_known_answers() -> None:
    """The three of Random123, and numbers that depend on their place alone."""
    known: list[tuple[Any, Any, str]] = [
        ((0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((MASK,) * 4, (MASK, MASK), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, said in known:
        words = philox(tuple(torch.tensor(word) for word in counter), key)
        assert " ".join(f"{int(word):08x}" for word in words) == said
    rows = torch.arange(64) + (1 << 40)
    whole = chance(rows, range(100), (3, 4), 5)
    assert torch.equal(chance(rows[9:30], range(13, 77), (3, 4), 5), whole[9:30, 13:77])
    for other in ((rows - 1, (3, 4), 5), (rows, (3, 5), 5), (rows, (3, 4), 6)):
        assert (chance(other[0], range(100), *other[1:]) != whole).float().mean() > 0.99
    assert abs(whole.mean() - 0.5) < 0.02 and whole.max() < 1 and whole.min() >= 0


def drawn(x: Tensor, step: int) -> Quantised:
    up = chance(torch.arange(x.shape[0]), range(x.shape[1]), (1, 2), step)
    return moefold.quantise(x, "nvfp4", role="gradient", chance=up)


def test_stochastic_rounding_takes_neighbours_and_averages_out() -> None:
    """Plants: nearest in place of chance; one draw for all steps."""
    x = families(64, 256)["normal"]
    near = moefold.quantise(x, "nvfp4")
    one = drawn(x, 0)
    assert torch.equal(one.scales.view(torch.uint8), near.scales.view(torch.uint8))
    exact = (x / (near.scales.float().repeat_interleave(16, 1) * near.matrix_scale)).clamp(-6, 6)
    got = elements.decode_e2m1(elements.unpack(one.codes))
    sizes = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    below = sizes[(torch.searchsorted(sizes, exact, right=True) - 1).clamp(0, 14)]
    above = sizes[torch.searchsorted(sizes, exact).clamp(0, 14)]
    close = (exact - sizes[:, None, None]).abs().amin(0) < 1e-5
    assert ((got == below) | (got == above) | close).all()
    error = (one.dequantise() - x).norm()
    mean = sum(drawn(x, step).dequantise() for step in range(64)) / 64
    inside = exact.abs() < 5.99  # what saturates is rounded one way
    assert ((mean - x) * inside).norm() <= 0.2 * error
    exactly = one.dequantise()
    again = moefold.quantise(
        sizes.repeat(16, 2)[:, :16], "nvfp4", chance=torch.full((16, 16), 1 - 2**-16)
    )
    torch.testing.assert_close(again.dequantise(), sizes.repeat(16, 2)[:, :16], rtol=1e-6, atol=0)
    assert torch.equal(exactly, drawn(x, 0).dequantise())


def test_what_cannot_be_quantised_is_refused_by_name() -> None:
    """Kinds, roles, rules and dims; chance of other kinds and shapes, and integers."""
    x = torch.zeros(4, 4)
    for asked in (
        {"kind": "fp6"},
        {"kind": "mxfp8", "role": "bias"},
        {"kind": "mxfp8", "scales": "fp32"},
        {"kind": "mxfp8", "dim": 0},
        {"kind": "mxfp8", "chance": x},
        {"kind": "nvfp4", "chance": x[0]},
        {"kind": "nvfp4", "x": x.int()},
    ):
        with pytest.raises(ValueError, match=r"must be|chance is for nvfp4"):
            moefold.quantise(**{"x": x} | asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("asked", [("fp8_block", None), ("mxfp8", "up"), ("mxfp8", "floor")])
def test_rows_that_codes_stand_for_lose_nothing(asked: tuple[str, str], dtype: torch.dtype) -> None:
    """However often they travel: as codes in a byte an element, and 4 bytes of 128 elements."""
    draws = torch.Generator().manual_seed(0)
    powers = torch.randint(-12, 13, (40, 256), generator=draws)
    x_ND = (torch.randn(40, 256, generator=draws) * 2.0**powers).to(dtype)
    x_ND[3], x_ND[5, 7] = 0, torch.nan
    codes = BlockCodec(format_of(asked[0], "rows", asked[1]))
    once = codes.fake_quantise(x_ND)
    wanted = quantise(x_ND, asked[0], scales=asked[1]).dequantise(dtype)
    assert torch.equal(once.nan_to_num(1e9), wanted.nan_to_num(1e9))
    sent = codes.pack(once)
    assert sent.shape == (40, 256 + 8) and sent.dtype == torch.uint8
    again = codes.unpack(sent, x_ND)
    assert torch.equal(again.nan_to_num(1e9), once.nan_to_num(1e9))
    assert again[5].isnan().any() and not again[6].isnan().any()
    assert not torch.equal(once.nan_to_num(0), x_ND.nan_to_num(0))


@pytest.mark.parametrize("kind", ["fp8_block", "mxfp8"])
@pytest.mark.parametrize("shape", [(0, 128), (0, 18), (1, 18), (1, 130), (3, 18)], ids=str)
def test_any_number_of_rows_travels(kind: str, shape: tuple[int, int]) -> None:
    """None go to a rank whose experts nobody chose; widths that neither blocks nor scales divide.

    Plant: bytes of scales lie where they were sent.
    """
    x_ND = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes = BlockCodec(format_of(kind, "rows"))
    assert len(codes.pack(x_ND)) == len(x_ND)
    assert torch.equal(codes.fake_quantise(x_ND), quantise(x_ND, kind).dequantise())
