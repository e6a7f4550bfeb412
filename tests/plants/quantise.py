"""Plants B50: codes and scales of few bits."""

from tests.plants.plant import Plant

TEST = "tests/cpu/test_kernels_quantise.py::"
OTHERS = TEST + "test_b50_codes_equal_those_of_other_projects"
NVFP4 = TEST + "test_b50_nvfp4_equals_transformer_engine"
BLOCKS = "kernels/quantise/blocks.py"
ELEMENTS = "kernels/quantise/elements.py"

PLANTS = (
    Plant(
        "b50",
        "a scale is a reciprocal times a number: rounded twice",
        OTHERS,
        BLOCKS,
        "torch.div(torch.full_like(amax, largest), amax).clamp_",
        "(largest / amax).clamp_",
    ),
    Plant(
        "b50",
        "a block with an Inf reads back as numbers",
        TEST + "test_b50_what_is_not_finite_reads_back_as_nan",
        BLOCKS,
        "return torch.where(amax.isfinite(), scale, torch.nan)",
        "return scale.nan_to_num(1.0)",
    ),
    Plant(
        "b50",
        "blocks of tiny numbers share a scale",
        OTHERS,
        BLOCKS,
        "    factor = torch.where(amax == 0, 1.0, factor)\n    return factor",
        "    factor = torch.where(amax < 1e-12, 1.0, factor)\n    return factor",
    ),
    Plant(
        "b50",
        "an exponent is a logarithm rounded up",
        OTHERS,
        ELEMENTS,
        "above = exponent + (rest > least).int()",
        "above = (x.log2().ceil() + 127).int()",
    ),
    Plant(
        "b50",
        "the gradient's elements are E4M3",
        OTHERS,
        BLOCKS,
        'E5M2 if role == "gradient" else E4M3',
        "E4M3",
    ),
    Plant(
        "b50",
        "weights of nvfp4 have blocks of one row",
        NVFP4,
        BLOCKS,
        'SQUARE = ("fp8_block", "nvfp4")',
        'SQUARE = ("fp8_block",)',
    ),
    Plant(
        "b50",
        "the transform has no signs",
        NVFP4,
        "kernels/quantise/hadamard.py",
        "SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)",
        "SIGNS = (1,) * 16",
    ),
    Plant(
        "b50",
        "chance is left out",
        TEST + "test_b50_stochastic_rounding_takes_neighbours_and_averages_out",
        ELEMENTS,
        "count.round_() if chance is None else count.add_(chance).floor_()",
        "count.round_()",
    ),
    Plant(
        "b50",
        "every step draws the same",
        TEST + "test_b50_stochastic_rounding_takes_neighbours_and_averages_out",
        "kernels/quantise/philox.py",
        "torch.full_like(low, word & MASK)",
        "torch.full_like(low, 0)",
    ),
    Plant(
        "b50",
        "matrices in a row share one scale",
        TEST + "test_b50_any_shape_keeps_its_shape",
        BLOCKS,
        "return x.abs().amax((-2, -1), keepdim=True).float()",
        "return x.abs().amax().float().expand(*x.shape[:-2], 1, 1)",
    ),
)
