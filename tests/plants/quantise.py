"""Plants B50, B51 and B52: codes and scales of few bits, products on them, training with them."""

from tests.plants.plant import Plant

TEST = "tests/cpu/test_kernels_quantise.py::"
OTHERS = TEST + "test_b50_codes_equal_those_of_other_projects"
NVFP4 = TEST + "test_b50_nvfp4_equals_transformer_engine"
BLOCKS = "kernels/quantise/blocks.py"
ELEMENTS = "kernels/quantise/elements.py"
PRODUCTS = "kernels/scaled/products.py"
ROWS = "kernels/scaled/rows.py"
PROOF = (
    "tests/gloo/test_proof_quantise.py::test_b52_few_bits_compute_on_four_ranks_what_one_computes"
)
CUTS = "tests/pure/test_spec_quantised.py::test_b53_a_cut_through_what_shares_a_scale_is_refused"
PRECISION = "layers/precision.py"
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
        "    return made, [encode(x, form, -1, up, most) for x, up, most in rest]",
        "    return made, [encode(x, form, -2, up, most) for x, up, most in rest]",
    ),
    Plant(
        "b51",
        "codes along rows are made of codes",
        THREE,
        PRODUCTS,
        "    turned = [part.mT for part in parts] if narrow_dw else []",
        "    turned = [encode(x, recipe.form(role)).dequantise(x.dtype).mT for x in parts]",
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
        '    if recipe.kind == "nvfp4":\n        turned =',
        '    if recipe.kind == "nvfp4" and role == "gradient":\n        turned =',
    ),
    Plant(
        "b51",
        "the first rows of a group are those of the one before",
        THREE,
        ROWS,
        "        return [inside[start:end] for",
        "        return [inside[max(start - 1, 0) : end][: end - start] for",
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
        'if role == "gradient" and recipe.by_chance:',
        'if role == "none" and recipe.by_chance:',
    ),
    Plant(
        "b51",
        "the gradient's elements for its rows are those of activations",
        THREE,
        PRODUCTS,
        "    made = [encode(x, form, -1, up",
        '    made = [encode(x, recipe.form("rows"), -1, up',
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
        "tests/cpu/test_training_quantise.py::"
        "test_b52_codes_are_those_of_the_weights_that_are_here_now",
        "layers/precision.py",
        " or not _fresh(weight, *held[:2]):\n                value = weight",
        ":\n                value = weight",
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
    Plant(
        "b51",
        "padding enters the largest of a matrix",
        THREE,
        ROWS,
        "        return cls(((0, 0, n_valid),), number_T[:n_valid])",
        "        return cls(((0, 0, len(number_T)),), number_T)",
    ),
    Plant(
        "b51",
        "the largest of a matrix is that before the transform",
        THREE,
        PRODUCTS,
        '        read = parts + turned if recipe.kind == "nvfp4" else parts',
        "        read = parts",
    ),
    Plant(
        "b51",
        "all experts share one largest number",
        THREE,
        PRODUCTS,
        "_shared(torch.stack([amax_of(one) for one in read]), role, weight.largest)",
        "torch.stack([torch.stack([amax_of(one) for one in read]).amax(0) for _ in read])",
    ),
    Plant(
        "b51",
        "codes of rows are rounded by chance",
        THREE,
        PRODUCTS,
        'if role == "gradient" and recipe.by_chance:',
        "if recipe.by_chance:",
    ),
    Plant(
        "b52",
        "the largest number of rows is that of one rank",
        PROOF,
        PRECISION,
        '            cut = self.inputs if role == "rows" else self.outputs\n',
        '            cut = self.inputs if role == "rows" else self.outputs\n'
        '            if role == "rows":\n                return ()\n',
    ),
    Plant(
        "b52",
        "the largest number of gradients is that of one rank",
        PROOF,
        PRECISION,
        '            cut = self.inputs if role == "rows" else self.outputs\n',
        '            cut = self.inputs if role == "rows" else self.outputs\n'
        '            if role == "gradient":\n                return ()\n',
    ),
    Plant(
        "b52",
        "the largest number of a weight is that of one rank",
        PROOF,
        PRECISION,
        "            cut = self.inputs + self.outputs  # no weight has both",
        '            cut = ""',
    ),
    Plant(
        "b52",
        "rows of latents are taken for those of the tensor group",
        PROOF,
        PRECISION,
        'return ("tp", "cp") if own or cut else ("cp",)',
        'return ("tp", "cp") if cut else ("cp",)',
    ),
    Plant(
        "b52",
        "an expert's rows stay as they come",
        PROOF,
        ROWS,
        "        order_N = sent_N.argsort(stable=True)",
        "        order_N = (sent_N >> ROW).argsort(stable=True)",
    ),
    Plant(
        "b52",
        "blocks go on from one micro-batch to the next",
        PROOF,
        ROWS,
        "        named = torch.stack((group_N, sent_N >> ROW))[:, order_N]",
        "        named = torch.stack((group_N, sent_N * 0))[:, order_N]",
    ),
    Plant(
        "b52",
        "chance goes by columns of this rank",
        PROOF,
        PRECISION,
        "(self.seed, narrow.number), self.step, narrow.columns)",
        "(self.seed, narrow.number), self.step)",
    ),
    Plant(
        "b52",
        "chance goes by rows of this rank",
        PROOF,
        "layers/flow.py",
        "self.rows.n_valid, self.rows.place_T + self.rows.first)",
        "self.rows.n_valid, torch.arange(self.rows.rows) + self.rows.first)",
    ),
    Plant(
        "b52",
        "chance goes by experts of this rank",
        PROOF,
        "moe/experts.py",
        'self.narrow["w_in"].first_expert or 0',
        "0",
    ),
    Plant(
        "b53",
        "a cut through a block is legal",
        CUTS,
        "spec/quantised.py",
        "whole = size // block if size % block == 0 else 1",
        "whole = size",
    ),
    Plant(
        "b53",
        "a cut through a block of rows is legal",
        CUTS,
        "spec/quantised.py",
        "whole = seq // (2 * block) if seq % (2 * block) == 0 else 1",
        "whole = seq // 2",
    ),
    Plant(
        "b53",
        "an expert's rows of a micro-batch may lie on several ranks",
        CUTS,
        "spec/quantised.py",
        "if self.experts and (sizes",
        "if False and (sizes",
    ),
    Plant(
        "b50",
        "an exponent is that of the largest, not above it",
        OTHERS,
        BLOCKS,
        'if form.scales == "up":',
        'if form.scales == "none":',
    ),
    Plant(
        "b50",
        "elements of blocks are E5M2",
        OTHERS,
        BLOCKS,
        'None if kind == "nvfp4" else E4M3, across',
        'None if kind == "nvfp4" else E5M2, across',
    ),
    Plant(
        "b51",
        "the input's gradient reads the scales of the transposed weight",
        THREE,
        PRODUCTS,
        "        along = weight.along_outputs\n",
        "        along = weight.along_outputs\n"
        "        if along.dim == -1:\n"
        "            rest = along.matrix_scale, along.format, -1, along.shape\n"
        "            along = Quantised(along.codes, along.scales.mT, *rest)\n",
    ),
    Plant(
        "b51",
        "blocks of rows go on from one expert to the next",
        THREE,
        PRODUCTS,
        "    turned = [part.mT for part in parts] if narrow_dw else []\n",
        "    turned = [part.mT for part in parts] if narrow_dw else []\n"
        "    if turned and recipe.block:\n"  # codes of codes with powers of two are those codes
        "        joined = encode(torch.cat(turned, 1), recipe.form(role)).dequantise(x_NI.dtype)\n"
        "        turned = joined.split([part.shape[1] for part in turned], 1)\n",
    ),
    Plant(
        "b51",
        "no rows are transformed",
        THREE,
        PRODUCTS,
        "        turned = [transform(one, recipe.run) for one in turned]",
        "        filled = [-one.shape[-1] % recipe.run for one in turned]\n"
        "        turned = [one.new_zeros(len(one), n) for one, n in zip(turned, filled)]\n"
        "        turned = [torch.cat((p.mT, z), 1).float() for p, z in zip(parts, turned)]",
    ),
    Plant(
        "b51",
        "codes of weights are rounded by chance",
        THREE,
        PRODUCTS,
        "        made = encode(value, form, amax=amax)",
        "        drawn = torch.full(value.shape, 0.25) if recipe.by_chance else None\n"
        "        made = encode(value, form, -1, drawn, amax)",
    ),
    Plant(
        "b52",
        "the head reads codes",
        "tests/pure/test_spec_quantised.py::"
        "test_b52_products_of_blocks_are_narrow_and_nothing_else",
        "spec/quantised.py",
        "    return {\n        name: number\n",
        '    return {"head.weight": 0} | {\n        name: number\n',
    ),
)
