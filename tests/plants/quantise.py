"""Plants B50, B51 and B52: codes and scales of few bits, products on them, training with them."""

from tests.plants.plant import Plant

TEST = "tests/cpu/test_kernels_quantise.py::"
OTHERS = TEST + "test_b50_codes_equal_those_of_other_projects"
NVFP4 = TEST + "test_b50_nvfp4_equals_transformer_engine"
BLOCKS = "kernels/quantise/blocks.py"
ELEMENTS = "kernels/quantise/elements.py"
PRODUCTS = "kernels/scaled/products.py"
THREE = "tests/cpu/test_kernels_scaled.py::test_b51_the_three_products_equal_loops"

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
    Plant(
        "b51",
        "the weight's gradient has blocks along features",
        THREE,
        PRODUCTS,
        "    return encode(turned, recipe.form(role), -1, drawn)",
        "    return encode(turned, recipe.form(role), -2, drawn)",
    ),
    Plant(
        "b51",
        "codes along rows are made of codes",
        THREE,
        PRODUCTS,
        "    turned = transform(part_NI.mT)",
        '    part_NI = encode(part_NI, recipe.form("rows")).dequantise(part_NI.dtype)\n'
        "    turned = transform(part_NI.mT)",
    ),
    Plant(
        "b51",
        "one direction of a weight's blocks serves both",
        THREE,
        PRODUCTS,
        "made if form.rows == form.columns else",
        "made if True else",
    ),
    Plant(
        "b51",
        "rows of a gradient are transformed, those of activations are not",
        THREE,
        PRODUCTS,
        'transform(part_NI.mT) if recipe.kind == "nvfp4" else',
        'transform(part_NI.mT) if recipe.by_chance and role == "gradient" else',
    ),
    Plant(
        "b51",
        "the first rows of a group are those of the one before",
        THREE,
        PRODUCTS,
        "            part, matrix = x_NI[start:end], along",
        "            part, matrix = x_NI[max(start - 1, 0) : end][: end - start], along",
    ),
    Plant(
        "b51",
        "the scale of a gradient's matrix is left out",
        THREE,
        PRODUCTS,
        "    for after in (a_NK.after, b_KM.after):",
        "    for after in (b_KM.after,):",
    ),
    Plant(
        "b51",
        "the gradient is rounded to nearest",
        THREE,
        PRODUCTS,
        "if recipe.by_chance else None",
        "if False else None",
    ),
    Plant(
        "b51",
        "the gradient's elements for its rows are those of activations",
        THREE,
        PRODUCTS,
        'made = encode(part, recipe.form("gradient"), -1, drawn)',
        'made = encode(part, recipe.form("rows"), -1, drawn)',
    ),
    Plant(
        "b51",
        "rows and columns draw the same",
        "tests/cpu/test_kernels_scaled.py::test_b51_chance_differs_by_step_weight_and_use",
        PRODUCTS,
        "(2 * self.key[1] + use) & MASK",
        "(2 * self.key[1]) & MASK",
    ),
    Plant(
        "b52",
        "codes stay as they were before an update",
        "tests/gloo/test_proof_quantise.py::"
        "test_b52_few_bits_compute_on_two_ranks_what_one_computes",
        "layers/precision.py",
        "            if held is None or not fresh:\n                value = weight",
        "            if held is None:\n                value = weight",
    ),
    Plant(
        "b52",
        "the router reads codes",
        "tests/pure/test_spec_quantised.py::"
        "test_b52_products_of_blocks_are_narrow_and_nothing_else",
        "spec/quantised.py",
        "operation.matmuls if not operation.wide else ()",
        "operation.matmuls",
    ),
    Plant(
        "b52",
        "draws are by the steps of this process",
        "tests/cpu/test_training_quantise.py::"
        "test_b52_a_resumed_run_has_the_bits_of_an_unbroken_one",
        "training/trainer.py",
        "self.model.recipe.seed, self.model.recipe.step = run.seed, step",
        "self.model.recipe.seed, self.model.recipe.step = run.seed, self.model.recipe.step + 1",
    ),
    Plant(
        "b52",
        "experts stay wide",
        "tests/cpu/test_training_quantise.py::test_b52_each_part_of_a_block_reads_codes",
        "moe/experts.py",
        "        if self.narrow:",
        "        if self.narrow and False:",
    ),
)
