"""Codes of weights that ranks share out, made of each rank's run: those of the whole."""

from math import prod

import pytest
import torch
from torch import Tensor

from moefold.kernels.quantise.elements import pack
from moefold.kernels.quantise.shards import BlockGrid
from moefold.kernels.scaled.products import QuantisedWeight, Recipe
from moefold.parallel.data.bucket import assign_slots

SHAPES = {
    "odd": ((70, 130), 0),
    "even": ((576, 256), 0),
    "gate and up": ((2, 160, 192), 0),
    "experts in": ((3, 2, 100, 136), 1),
    "experts out": ((3, 136, 100), 1),
    "below a byte": ((3, 5), 0),
}
"""Shapes, and how many of their first dims count matrices."""
KINDS = (
    Recipe("fp8_tensor"),
    Recipe("fp8_block"),
    Recipe("fp8_block", "fp32"),
    Recipe("nvfp4"),
    Recipe("nvfp4", block=4),
)


def drawn() -> dict[str, Tensor]:
    """Weights over many powers of two, with an outlier and a block of zeros."""
    draws = torch.Generator().manual_seed(0)
    found = {}
    for name, (shape, _) in SHAPES.items():
        powers = torch.randint(-12, 13, shape, generator=draws)
        found[name] = torch.randn(shape, generator=draws) * 2.0**powers
        found[name].view(-1)[7] = 1e4
        found[name].view(-1, shape[-1])[-2:, :16] = 0
    return found


def shared(recipe: Recipe, weights: dict[str, Tensor], ranks: int) -> tuple[dict, int]:
    """Return the weights as so many ranks' codes, and how many blocks lie on several ranks."""
    form = recipe.format("weight")
    slots, length = assign_slots(((name, shape) for name, (shape, _) in SHAPES.items()), ranks)
    grids = {name: BlockGrid.of(form, *SHAPES[name]) for name in SHAPES}
    runs = [
        {s.name: s.range_in(rank * length, (rank + 1) * length) for s in slots}
        for rank in range(ranks)
    ]
    amaxes, several = {}, 0
    for name, grid in grids.items():
        flat = weights[name].flatten()
        told = [grid.block_amax(flat[slice(*run[name])], run[name][0]) for run in runs]
        amaxes[name] = torch.stack(told).amax(0)
        several += int((torch.stack(told).sign().sum(0) > 1).sum())
    row = torch.zeros(ranks * length, dtype=torch.uint8)
    whole = {name: one.amax((-2, -1), keepdim=True) for name, one in amaxes.items()}
    for slot, run in ((slot, run) for run in runs for slot in slots):
        first, last = run[slot.name]
        part = weights[slot.name].flatten()[first:last]
        made = grids[slot.name].encode(part, first, amaxes[slot.name], whole[slot.name])
        row[slot.start + first : slot.start + last] = made
    per = 1 if form.element else 2
    row = row if per == 1 else pack(row)
    found = {
        s.name: grids[s.name].decode(
            row[s.start // per : -(-s.stop // per)], amaxes[s.name], whole[s.name]
        )
        for s in slots
    }
    return found, several


@pytest.mark.parametrize("recipe", KINDS, ids=str)
def test_codes_of_runs_are_those_of_the_whole(recipe: Recipe) -> None:
    weights = drawn()
    wanted = {
        name: QuantisedWeight.of(weights[name].flatten(groups, -2), recipe).along_inputs
        for name, (_, groups) in SHAPES.items()
    }
    for ranks in (1, 2, 3, 5, 8):
        found, several = shared(recipe, weights, ranks)
        for name, one in wanted.items():
            have = found[name]
            assert have.format == one.format and have.shape == one.shape
            assert torch.equal(have.codes.view(torch.uint8), one.codes.view(torch.uint8)), name
            assert torch.equal(have.scales.float(), one.scales.float()), name
            if one.matrix_scale is not None:
                assert torch.equal(have.matrix_scale, one.matrix_scale), name
        assert (several > 0) == (ranks > 1), "blocks lie on several ranks"


def test_a_number_that_is_none_reaches_all_ranks() -> None:
    """Its block reads back as NaN, whichever rank holds it; others as they are."""
    grid = BlockGrid.of(Recipe("fp8_block", block=4).format("weight"), (8, 8), 0)
    values = torch.ones(64)
    values[3] = torch.nan
    amaxes = torch.maximum(grid.block_amax(values[:20], 0), grid.block_amax(values[20:], 20))
    codes = [grid.encode(values[a:b], a, amaxes, None) for a, b in ((0, 20), (20, 64))]
    read = grid.decode(torch.cat(codes), amaxes, None).dequantise()
    assert read[:4, :4].isnan().all()
    assert torch.equal(read[4:], torch.ones(4, 8)) and torch.equal(read[:4, 4:], torch.ones(4, 4))
    assert prod(grid.amax_shape) == 4
