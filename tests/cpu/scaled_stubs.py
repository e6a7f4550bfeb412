"""Stand-ins for libraries' products on codes: what is read how, by their sources, in plain loops.

``torch.nn.functional.scaled_mm`` and ``scaled_grouped_mm`` as in aten's ``ScaledBlas.cpp`` and
``GroupedBlas.cpp`` (torch 2.13), DeepGEMM as in ``csrc/apis/gemm.hpp`` of 54e2261. What a library
refuses is an assertion; what it leaves unwritten is NaN.
"""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise.elements import E4M3, E5M2, decode_e2m1, unpack

SIGNATURES = json.loads(
    (Path(__file__).parents[1] / "data/deep_gemm_signatures.json").read_text("utf-8")
)
S, W = F.ScalingType, F.SwizzleType
GROUPED = F.scaled_grouped_mm  # type: ignore[attr-defined]
TAKEN = inspect.signature(F.scaled_mm), inspect.signature(GROUPED)
"""Of the library that is here."""


def swizzled_at(row: int, block: int, blocks: int) -> int:
    """Where Blackwell reads the scale of a row's block: tiles of 128 x 4, in 512 bytes each."""
    tile = row // 128 * (-(-blocks // 4)) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def unswizzled(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """Scales [R, B] of a flat tensor that has no more than those of whole tiles."""
    assert flat.is_contiguous() and flat.numel() == -(-rows // 128) * -(-blocks // 4) * 512
    places = [[swizzled_at(row, block, blocks) for block in range(blocks)] for row in range(rows)]
    return flat.flatten().float()[torch.tensor(places)]


def values(codes: Tensor, scales: list[Tensor], recipes: list[Any], swizzles: list[Any]) -> Tensor:
    """Numbers [R, K] of an operand whose codes follow one another along K."""
    assert codes.is_contiguous() and len(scales) == len(recipes) == len(swizzles)
    (first, *rest), (kind, *others) = scales, recipes
    if codes.dtype == torch.float4_e2m1fn_x2:
        assert (kind, *others) == (S.BlockWise1x16, S.TensorWise) and first.dtype == E4M3
        assert tuple(swizzles) == (W.SWIZZLE_32_4_4, W.NO_SWIZZLE)
        found = decode_e2m1(unpack(codes.view(torch.uint8)), torch.float64)
        spread = unswizzled(first, len(codes), found.shape[1] // 16).repeat_interleave(16, 1)
        assert rest[0].shape == (1,) and rest[0].dtype == torch.float32
        return found * spread * rest[0].double()
    found = codes.double()
    rows, blocks = len(codes), -(-codes.shape[1] // 128)
    if kind == S.BlockWise1x32:
        assert first.dtype == torch.float8_e8m0fnu and swizzles == [W.SWIZZLE_32_4_4]
        return found * unswizzled(first, rows, codes.shape[1] // 32).repeat_interleave(32, 1)
    assert first.dtype == torch.float32 and swizzles == [W.NO_SWIZZLE]
    if kind == S.TensorWise:
        assert first.numel() == 1
        return found * first.double()
    if kind == S.BlockWise1x128:
        assert first.shape == (rows, blocks) and first.stride() in ((1, rows), (1, 1))
    else:
        fours = -(-blocks // 4) * 4
        assert kind == S.BlockWise128x128 and first.shape == (fours, -(-rows // 128))
        assert first.stride() in ((1, fours), (1, 1))
        first = first.mT.repeat_interleave(128, 0)[:rows, :blocks]
    return found * first.double().repeat_interleave(128, 1)[:, : codes.shape[1]]


def scaled_mm(*args: Any, **named: Any) -> Tensor:
    """The product of two operands, in the dtype that is asked for."""
    given = TAKEN[0].bind(*args, **named).arguments
    a, b = given["mat_a"], given["mat_b"].mT
    assert {a.dtype, b.dtype} != {E5M2} and a.shape[1] % 16 == b.shape[1] % 16 == len(b) % 16 == 0
    x, y = (
        values(m, given[f"scale_{n}"], given[f"scale_recipe_{n}"], given[f"swizzle_{n}"])
        for m, n in ((a, "a"), (b, "b"))
    )
    return (x @ y.mT).to(given["output_dtype"])


def scaled_grouped_mm(*args: Any, **named: Any) -> Tensor:
    """Rows by the matrix of their group."""
    given = TAKEN[1].bind(*args, **named).arguments
    a, b, offs = given["mat_a"], given["mat_b"].mT, given["offs"]
    assert a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype == E4M3
    assert a.shape[1] % 16 == b.shape[1] % 16 == 0 and given["output_dtype"] == torch.bfloat16
    assert offs.dtype == torch.int32 and offs[-1] == len(a)
    ours, theirs, kind = given["scale_a"], given["scale_b"], given["scale_recipe_a"]
    y = torch.full((len(a), b.shape[1]), torch.nan, dtype=torch.float64)
    start = taken = 0
    for group, end in enumerate(offs.tolist()):
        x, w = a[start:end].double(), b[group].double()
        if kind == S.RowWise:
            assert ours.shape == (len(a),) and theirs.shape == b.shape[:2]
            x, w = x * ours[start:end, None].double(), w * theirs[group, :, None].double()
        else:
            assert given["swizzle_a"] == given["swizzle_b"] == W.SWIZZLE_32_4_4
            assert (end - start) % 32 == 0 and ours.dim() == theirs.dim() == 2
            blocks, rows = a.shape[1] // 32, -(-(end - start) // 128) * 128
            mine = ours[taken : taken + rows].contiguous()
            taken += rows
            if len(x):
                x = x * unswizzled(mine, end - start, blocks).repeat_interleave(32, 1)
            w = w * unswizzled(theirs[group], len(w), blocks).repeat_interleave(32, 1)
        y[start:end] = x @ w.mT
        start = end
    assert kind == S.RowWise or taken == len(ours)
    return y.to(torch.bfloat16)


def _blocks(operand: tuple[Tensor, Tensor], high: int) -> Tensor:
    """Numbers of codes with fp32 scales of ``high`` x 128."""
    codes, scales = operand
    assert codes.dtype == E4M3 and codes.is_contiguous() and scales.dtype == torch.float32
    rows, columns = codes.shape[-2:]
    assert scales.shape[-2:] == (-(-rows // high), -(-columns // 128)) and scales.is_contiguous()
    whole = scales.double().repeat_interleave(high, -2).repeat_interleave(128, -1)
    return codes.double() * whole[..., :rows, :columns]


def deep_gemm(revision: str) -> SimpleNamespace:
    """The package, with the parameters of a revision."""

    def taken(name: str, *args: Any, **named: Any) -> dict[str, Any]:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        takes = [
            inspect.Parameter(one, kind, default=inspect.Parameter.empty if required else None)
            for one, required in SIGNATURES[revision]["functions"][name]
        ]
        return inspect.Signature(takes).bind(*args, **named).arguments

    def fp8_gemm_nt(*args: Any, **named: Any) -> None:
        given = taken("fp8_gemm_nt", *args, **named)
        d, recipe = given["d"], given.get("recipe") or (1, 128, 128)
        y = _blocks(given["a"], recipe[0]) @ _blocks(given["b"], recipe[1]).mT
        if recipe[1] == 1:
            assert d.dtype == torch.float32 and given["c"] is d
            d += y
        else:
            assert d.dtype == torch.bfloat16 and given.get("c") is None
            d.copy_(y)

    def m_grouped_fp8_gemm_nt_contiguous(*args: Any, **named: Any) -> None:
        a, b, d, groups = list(taken("m_grouped_fp8_gemm_nt_contiguous", *args, **named).values())
        x, w = _blocks(a, 1), _blocks(b, 128)
        assert d.dtype == torch.bfloat16 and groups.dtype == torch.int32 and len(groups) == len(x)
        assert len(x) % 128 == 0 and groups.is_contiguous()
        for tile in groups.view(-1, 128):
            assert len(set(tile[tile >= 0].tolist())) == 1
        d.fill_(torch.nan)
        for row, group in enumerate(groups.tolist()):
            if group >= 0:
                d[row] = (w[group] @ x[row]).bfloat16()

    return SimpleNamespace(
        fp8_gemm_nt=fp8_gemm_nt, m_grouped_fp8_gemm_nt_contiguous=m_grouped_fp8_gemm_nt_contiguous
    )
