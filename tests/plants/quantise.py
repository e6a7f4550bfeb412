"""Planted bugs: numbers of few bits, products, training, moments, codes and their bytes."""

from tests.plants.plant import Plant

TEST = "tests/cpu/test_kernels_quantise.py::"
OTHERS = TEST + "test_codes_equal_those_of_other_projects"
NVFP4 = TEST + "test_nvfp4_equals_transformer_engine"
BLOCKS = "kernels/quantise/blocks.py"
ELEMENTS = "kernels/quantise/elements.py"
PRODUCTS = "kernels/scaled/products.py"
NAME = "test_few_bits_compute_on_four_ranks_what_one_computes"
ROWS = "kernels/scaled/rows.py"
PROOF = "tests/gloo/test_proof_quantise.py::" + NAME
CUTS = "tests/pure/test_spec_quantised.py::test_a_cut_through_what_shares_a_scale_is_refused"
PRECISION = "layers/precision.py"
KEPT = "tests/cpu/test_planner_kept.py::test_"
HISTORY = "tests/cpu/test_layers_history.py::test_scales_follow_from_steps_before_by_the_rule"
STATE = (
    "tests/cpu/test_layers_history.py::test_bytes_of_histories_and_of_codes_are_the_planned_ones"
)
THREE = "tests/cpu/test_kernels_scaled.py::test_the_three_products_equal_loops"
HIDDEN = "tests/cpu/test_kernels_scaled.py::test_backward_reads_codes_of_pre_activations"
BACKENDS = "tests/cpu/test_kernels_backends.py::test_"
READS = BACKENDS + "the_library_is_given_codes_and_scales_as_it_reads_them"

PLANTS = (
    Plant(
        "a scale is a reciprocal times a number: rounded twice",
        OTHERS,
        BLOCKS,
        "torch.div(torch.full_like(amax, largest), amax).clamp_",
        "(largest / amax).clamp_",
    ),
    Plant(
        "a block with an Inf reads back as numbers",
        TEST + "test_what_is_not_finite_reads_back_as_nan",
        BLOCKS,
        "return torch.where(amax.isfinite(), scale, torch.nan)",
        "return scale.nan_to_num(1.0)",
    ),
    Plant(
        "blocks of tiny numbers share a scale",
        OTHERS,
        BLOCKS,
        "    factor = torch.where(block == 0, 1.0, factor)",
        "    factor = torch.where(block < 1e-12, 1.0, factor)",
    ),
    Plant(
        "an exponent is a logarithm rounded up",
        OTHERS,
        ELEMENTS,
        "above = exponent + (rest > least).int()",
        "above = (x.log2().ceil() + 127).int()",
    ),
    Plant(
        "the gradient's elements are E4M3",
        OTHERS,
        BLOCKS,
        'E5M2 if role == "gradient" else E4M3',
        "E4M3",
    ),
    Plant(
        "weights of nvfp4 have blocks of one row",
        NVFP4,
        BLOCKS,
        'SQUARE_BLOCKS = ("fp8_block", "nvfp4")',
        'SQUARE_BLOCKS = ("fp8_block",)',
    ),
    Plant(
        "the transform has no signs",
        NVFP4,
        "kernels/quantise/hadamard.py",
        "SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)",
        "SIGNS = (1,) * 16",
    ),
    Plant(
        "chance is left out",
        TEST + "test_stochastic_rounding_takes_neighbours_and_averages_out",
        ELEMENTS,
        "count.round_() if chance is None else count.add_(chance).floor_()",
        "count.round_()",
    ),
    Plant(
        "every step draws the same",
        TEST + "test_stochastic_rounding_takes_neighbours_and_averages_out",
        "kernels/quantise/philox.py",
        "torch.full_like(low, word & MASK)",
        "torch.full_like(low, 0)",
    ),
    Plant(
        "matrices in a row share one scale",
        TEST + "test_any_shape_keeps_its_shape",
        BLOCKS,
        "return x.abs().amax((-2, -1), keepdim=True).float()",
        "return x.abs().amax().float().expand(*x.shape[:-2], 1, 1)",
    ),
    Plant(
        "the weight's gradient has blocks along features",
        THREE,
        PRODUCTS,
        "codes.append(encode(chunk, form, dim, random, run_amax))",
        "codes.append(encode(chunk, form, -1, random, run_amax))",
    ),
    Plant(
        "codes along rows are made of codes",
        THREE,
        PRODUCTS,
        "                chunk = run_NI[cut] if dim == -1 else transformed(run_NI[cut])\n",
        "                chunk = run_NI[cut]\n"
        "                if dim == -2:\n"
        "                    chunk = transformed(encode(chunk, form).dequantise(run_NI.dtype))\n",
    ),
    Plant(
        "one direction of a weight's blocks serves both",
        THREE,
        PRODUCTS,
        "along_inputs if recipe.has_square_blocks else",
        "along_inputs if True else",
    ),
    Plant(
        "rows of a gradient are transformed, those of activations are not",
        THREE,
        PRODUCTS,
        'transforms = recipe.kind == "nvfp4"',
        'transforms = recipe.kind == "nvfp4" and role == "gradient"',
    ),
    Plant(
        "the first rows of a group are those of the one before",
        THREE,
        PRODUCTS,
        "    runs = [valid[start:end] for",
        "    runs = [valid[max(start - 1, 0) : end][: end - start] for",
    ),
    Plant(
        "the scale of a gradient's matrix is left out",
        THREE,
        "kernels/scaled/emulated.py",
        "        for scale in (a_NK.output_scale, b_KM.output_scale):",
        "        for scale in (b_KM.output_scale,):",
    ),
    Plant(
        "the gradient is rounded to nearest",
        THREE,
        PRODUCTS,
        'if role == "gradient" and recipe.stochastic_gradients:',
        'if role == "none" and recipe.stochastic_gradients:',
    ),
    Plant(
        "the gradient's elements for its rows are those of activations",
        THREE,
        PRODUCTS,
        "codes.append(encode(chunk, form, dim, random, run_amax))",
        'rounding = recipe.format("rows") if dim == -1 else form\n'
        "                codes.append(encode(chunk, rounding, dim, random, run_amax))",
    ),
    Plant(
        "rows and columns draw the same",
        "tests/cpu/test_kernels_scaled.py::test_chance_differs_by_step_weight_and_use",
        PRODUCTS,
        "(2 * self.key[1] + direction) & MASK",
        "(2 * self.key[1]) & MASK",
    ),
    Plant(
        "codes stay as they were before an update",
        "tests/cpu/test_training_quantise.py::"
        "test_codes_are_those_of_the_weights_that_are_here_now",
        "layers/precision.py",
        " or entry[0] != narrow.version or not _is_current(weight, *entry[1:3]):\n"
        "                new = narrowed",
        ":\n                new = narrowed",
    ),
    Plant(
        "the router reads codes",
        "tests/pure/test_spec_quantised.py::test_products_of_blocks_are_narrow_and_nothing_else",
        "spec/quantised.py",
        "if not (operation.wide or weight.stacked):",
        "if not weight.stacked:",
    ),
    Plant(
        "draws are by the steps of this process",
        "tests/cpu/test_training_quantise.py::"
        "test_a_run_that_ends_after_every_step_has_the_bits_of_an_unbroken_one",
        "training/trainer.py",
        "self.model.precision_policy.step = step",
        "self.model.precision_policy.step = self.model.precision_policy.step + 1",
    ),
    Plant(
        "experts stay wide",
        "tests/cpu/test_training_quantise.py::test_each_part_of_a_block_reads_codes",
        "moe/experts.py",
        "        if self.narrow:",
        "        if self.narrow and False:",
    ),
    Plant(
        "padding enters the largest of a matrix",
        THREE,
        ROWS,
        "        return cls(((0, 0, n_valid),), number_T[:n_valid])",
        "        return cls(((0, 0, len(number_T)),), number_T)",
    ),
    Plant(
        "the largest of a matrix is that before the transform",
        THREE,
        PRODUCTS,
        "largest(transformed) if transforms and narrow_dw else []",
        "[]",
    ),
    Plant(
        "blocks of pre-activations lie across gate and up",
        HIDDEN,
        "kernels/scaled/ffn.py",
        "h_N2F[cut].unflatten(1, (2, -1)) for cut",
        "h_N2F[cut] for cut",
    ),
    Plant(
        "forward reads codes of pre-activations too",
        HIDDEN,
        "kernels/scaled/ffn.py",
        "            saved = quantised.codes, quantised.scales\n",
        "            saved = quantised.codes, quantised.scales\n"
        "            h_N2F = quantised.dequantise(h_N2F.dtype).flatten(1)\n",
    ),
    Plant(
        "codes of pre-activations that are made again have no scales",
        HIDDEN,
        "kernels/scaled/ffn.py",
        "            saved = quantised.codes, quantised.scales\n",
        "            again = torch._C._current_graph_task_id() >= 0\n"
        "            scales = quantised.scales\n"
        "            saved = quantised.codes, scales.fill_(1) if again else scales\n",
    ),
    Plant(
        "a cut through a block of pre-activations is legal",
        CUTS,
        "spec/quantised.py",
        "lcm(block, record.hidden_block or 1)",
        "lcm(block, 1)",
    ),
    Plant(
        "scales of pre-activations are forgotten",
        KEPT + "bytes_of_codes_are_the_planned_ones",
        "spec/codes.py",
        '(outputs + blocks * SCALE["fp8_block"])',
        "(outputs + 0 * length)",
    ),
    Plant(
        "all experts share one largest number",
        THREE,
        PRODUCTS,
        "reduced = weight.reduce_amax(_nan_to_inf(torch.stack(amaxes)), role, groups)",
        "reduced = torch.stack(amaxes).amax(0).expand(len(amaxes), 1, 1)",
    ),
    Plant(
        "each piece of a run draws what its first rows draw",
        THREE,
        PRODUCTS,
        "number = rows.row_numbers(index, x_NI.device)[cut]",
        "number = rows.row_numbers(index, x_NI.device)[: len(run_NI[cut])]",
    ),
    Plant(
        "each piece of a run has a largest number of its own",
        THREE,
        PRODUCTS,
        "encode(chunk, form, dim, random, run_amax)",
        "encode(chunk, form, dim, random, None)",
    ),
    Plant(
        "codes of rows are rounded by chance",
        THREE,
        PRODUCTS,
        'if role == "gradient" and recipe.stochastic_gradients:',
        "if recipe.stochastic_gradients:",
    ),
    Plant(
        "the largest number of rows is that of one rank",
        PROOF,
        PRECISION,
        '            cut = self.inputs if role == "rows" else self.outputs\n',
        '            cut = self.inputs if role == "rows" else self.outputs\n'
        '            if role == "rows":\n                return ()\n',
    ),
    Plant(
        "the largest number of gradients is that of one rank",
        PROOF,
        PRECISION,
        '            cut = self.inputs if role == "rows" else self.outputs\n',
        '            cut = self.inputs if role == "rows" else self.outputs\n'
        '            if role == "gradient":\n                return ()\n',
    ),
    Plant(
        "the largest number of a weight is that of one rank",
        PROOF,
        PRECISION,
        "            cut = self.inputs + self.outputs  # no weight has both",
        '            cut = ""',
    ),
    Plant(
        "rows of latents are taken for those of the tensor group",
        PROOF,
        PRECISION,
        'return ("tp", "cp") if own or cut else ("cp",)',
        'return ("tp", "cp") if cut else ("cp",)',
    ),
    Plant(
        "an expert's rows stay as they come",
        PROOF,
        ROWS,
        "        order_N = row_id_N.argsort(stable=True)",
        "        order_N = (row_id_N >> ROW).argsort(stable=True)",
    ),
    Plant(
        "blocks go on from one micro-batch to the next",
        PROOF,
        ROWS,
        "        key = torch.stack((group_N, row_id_N >> ROW))[:, order_N]",
        "        key = torch.stack((group_N, row_id_N * 0))[:, order_N]",
    ),
    Plant(
        "chance goes by columns of this rank",
        PROOF,
        PRECISION,
        "(self.seed, narrow.number), self.step, narrow.columns)",
        "(self.seed, narrow.number), self.step)",
    ),
    Plant(
        "chance goes by rows of this rank",
        PROOF,
        "layers/flow.py",
        "self.rows.n_valid, self.rows.full_row_T + self.rows.first)",
        "self.rows.n_valid, torch.arange(self.rows.rows) + self.rows.first)",
    ),
    Plant(
        "chance goes by experts of this rank",
        PROOF,
        "moe/experts.py",
        "first_expert = narrow.first_expert or 0",
        "first_expert = 0",
    ),
    Plant(
        "a cut through a block is legal",
        CUTS,
        "spec/quantised.py",
        "number = size // multiple if size % multiple == 0 else 1",
        "number = size",
    ),
    Plant(
        "a cut through a block of rows is legal",
        CUTS,
        "spec/quantised.py",
        "number = seq // (2 * block) if seq % (2 * block) == 0 else 1",
        "number = seq // 2",
    ),
    Plant(
        "an expert's rows of a micro-batch may lie on several ranks",
        CUTS,
        "spec/quantised.py",
        "if self.whole_experts and (sizes",
        "if False and (sizes",
    ),
    Plant(
        "an exponent is that of the largest, not above it",
        OTHERS,
        BLOCKS,
        'if form.scales == "up":',
        'if form.scales == "none":',
    ),
    Plant(
        "elements of blocks are E5M2",
        OTHERS,
        BLOCKS,
        'None if kind == "nvfp4" else E4M3, across',
        'None if kind == "nvfp4" else E5M2, across',
    ),
    Plant(
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
        "blocks of rows go on from one expert to the next",
        THREE,
        PRODUCTS,
        "    along_rows = [run_codes.mT for",
        "    if recipe.block:\n"  # codes of codes with powers of two are those codes
        "        whole = encode(torch.cat(runs), form, -2).dequantise(x_NI.dtype)\n"
        "        runs[:] = whole.split([len(run_NI) for run_NI in runs])\n"
        "    along_rows = [run_codes.mT for",
    ),
    Plant(
        "no rows are transformed",
        THREE,
        PRODUCTS,
        "return transform(run_NI.mT, block).mT if transforms else run_NI",
        "filled = run_NI.new_zeros(-len(run_NI) % block, width)\n"
        "        return torch.cat((run_NI, filled)).float() if transforms else run_NI",
    ),
    Plant(
        "codes of weights are rounded by chance",
        THREE,
        PRODUCTS,
        "        along_inputs = encode(value, form, amax=amax)",
        "        drawn = torch.full(value.shape, 0.25) if recipe.stochastic_gradients else None\n"
        "        along_inputs = encode(value, form, -1, drawn, amax)",
    ),
    Plant(
        "the head reads codes",
        "tests/pure/test_spec_quantised.py::test_products_of_blocks_are_narrow_and_nothing_else",
        "spec/quantised.py",
        "    return {\n        name: number\n",
        '    return {"head.weight": 0} | {\n        name: number\n',
    ),
    Plant(
        "moments are coded without expansion of their range",
        "tests/cpu/test_optim_moments.py::test_adams_update_of_real_moments_is_near",
        "kernels/quantise/expanded.py",
        "torch.where(high == low, 1, power).clamp_(1 / STEPS, MAX_POWER)",
        "torch.ones_like(power)",
    ),
    Plant(
        "a cut group has the scale of the part that is here",
        "tests/cpu/test_optim_moments.py::test_parts_of_a_parameter_have_the_codes_of_the_whole",
        "optim/moments.py",
        "factors_13 = factors(extremes_2[None])",
        "factors_13 = factors(extremes(self.pending[group][:1]))",
    ),
    Plant(
        "moments are rounded by places in the piece that is here",
        "tests/cpu/test_optim_moments.py::"
        "test_what_is_drawn_for_an_element_is_the_same_wherever_it_is",
        "optim/moments.py",
        "place_N += (row_N % length + start) * stride",
        "place_N += row_N % length * stride",
    ),
    Plant(
        "ranks ask nobody for the extremes of cut groups",
        PROOF,
        "parallel/data/groups.py",
        "combined = max_(torch.stack(local), ranks)",
        "combined = torch.stack(local)",
    ),
    Plant(
        "scales of moments are left behind by a checkpoint",
        "tests/cpu/test_training_quantise.py::"
        "test_a_run_that_ends_after_every_step_has_the_bits_of_an_unbroken_one",
        "optim/moments.py",
        'return {what: self.codes, f"{what}_groups": self.factors_G3}',
        "return {what: self.codes}",
    ),
    Plant(
        "the largest of a block that ranks share is that of the part that is here",
        PROOF,
        "parallel/data/coded.py",
        "self._amaxes = self._maximum([*local_amaxes.values()], self.shard_group)",
        "self._amaxes = dict(local_amaxes)",
    ),
    Plant(
        "rows travel as codes that one rank does not make",
        PROOF,
        "moe/layer_dispatch.py",
        "tokens = tokens._replace(x_TD=self._wire.fake_quantise(tokens.x_TD))",
        "tokens = tokens._replace(x_TD=tokens.x_TD)",
    ),
    Plant(
        "gradients of results travel as codes that one rank does not make",
        PROOF,
        "moe/layer_dispatch.py",
        "return out_TD if self._wire is None else self._wire.fake_quantise_gradient(out_TD)",
        "return out_TD",
    ),
    Plant(
        "scales of rows are left behind",
        "tests/cpu/test_kernels_quantise.py::test_rows_that_codes_stand_for_lose_nothing",
        "kernels/quantise/rows.py",
        "scales.view(torch.uint8)], 1)",
        "scales.view(torch.uint8).roll(1, 0)], 1)",
    ),
    Plant(
        "bytes of scales lie where they were sent",
        "tests/cpu/test_kernels_quantise.py::test_any_number_of_rows_travels",
        "kernels/quantise/rows.py",
        "return x.clone(memory_format=torch.contiguous_format)",
        "return x.contiguous()",
    ),
    Plant(
        "a run's rows are those of its own blocks",
        "tests/cpu/test_parallel_coded.py::test_codes_of_runs_are_those_of_the_whole",
        "kernels/quantise/shards.py",
        "number_N = torch.arange(first, last, device=shard_L.device)",
        "number_N = torch.arange(last - first, device=shard_L.device)",
    ),
    Plant(
        "each weight has codes of its own of what several read",
        KEPT + "bytes_of_codes_are_the_planned_ones",
        "layers/flow.py",
        "return operand._replace(cache=self.saved_tensors.cached)",
        "return operand",
    ),
    Plant(
        "codes of latents go where a dense feed-forward is made again",
        KEPT + "bytes_of_codes_are_the_planned_ones",
        "spec/codes.py",
        "if kind in path), path[0])",
        'if kind in path), "attention" if path[0] == "attention" else "ffn")',
    ),
    Plant(
        "gradients of rows wait in 16 bits",
        KEPT + "bytes_of_codes_are_the_planned_ones",
        "spec/codes.py",
        'if quantise is not None and quantise.wgrad == "narrow":',
        'if quantise is not None and quantise.wgrad == "none":',
    ),
    Plant(
        "codes of four bits never leave the device",
        KEPT + "codes_leave_for_the_host_as_planned",
        "layers/saved_tensors.py",
        "tensor.is_floating_point() or tensor.dtype == torch.uint8",
        "tensor.is_floating_point()",
    ),
    Plant(
        "largest numbers of weights that steps before scale are forgotten",
        STATE,
        "spec/codes.py",
        ' + STATISTIC * (record.scaling == "delayed")',
        "",
    ),
    Plant(
        "histories of scales are forgotten",
        STATE,
        "planner/memory_state.py",
        "history = history_bytes(weight)",
        "history = 0 * history_bytes(weight)",
    ),
    Plant(
        "all recipes of few bits are starred",
        "tests/pure/test_planner_answer.py::"
        "test_a_recipe_of_few_bits_is_starred_only_where_a_layout_cuts_its_blocks",
        "planner/plan.py",
        "is not None and self.quantised_rows is None:",
        "is not None:",
    ),
    Plant(
        "a block that is not finite is not looked for",
        "tests/cpu/test_training_quantise.py::"
        "test_a_block_that_is_not_finite_is_reported_with_weight_and_expert",
        "layers/precision.py",
        "        if non_finite({role: values}):",
        "        if False and non_finite({role: values}):",
    ),
    Plant(
        "the step itself scales",
        HISTORY,
        "layers/history.py",
        "now_M.view_as(amax), amax)",
        "now_M.view_as(amax).maximum(amax), amax)",
    ),
    Plant(
        "the last step alone scales",
        HISTORY,
        "layers/history.py",
        "past_RMH[..., 1] if self._latest else past_RMH[..., 1:].amax(-1)",
        "past_RMH[..., 1]",
    ),
    Plant(
        "histories of scales are left behind by a checkpoint",
        "tests/cpu/test_training_quantise.py::"
        "test_a_run_that_ends_after_every_step_has_the_bits_of_an_unbroken_one",
        "parallel/data/sharding.py",
        "            yield LocalSlice.full(key, history.past_RMH, stage.index, stage.size)",
        "            assert key and history and stage",
    ),
    Plant(
        "a history is of what one rank saw",
        PROOF,
        "parallel/data/sharding.py",
        '        all_reduce_amax(self.histories.values(), self.parts.world.group("stage"))\n',
        "",
    ),
    Plant(
        "what a checkpoint is read into counts as unchanged",
        "tests/cpu/test_training_loop.py::test_what_products_read_goes_back_with_the_weights",
        "checkpoint/load.py",
        "        torch.autograd.graph.increment_version(target)",
        "        assert target is not None",
    ),
    Plant(
        "scales are not swizzled",
        READS,
        "kernels/scaled/operands.py",
        "tiles.movedim(-2, -4).transpose(-2, -3).flatten(-5)",
        "padded.flatten(-2)",
    ),
    Plant(
        "rows have scales of other rows",
        READS,
        "kernels/scaled/scaled_mm.py",
        "scale_a=a_args[0],",
        "scale_a=[part.flip(0) for part in a_args[0]],",
    ),
    Plant(
        "rows that fill a group are multiplied",
        BACKENDS + "deep_gemm_is_called_as_its_source_has_it",
        "kernels/scaled/operands.py",
        "ranges.append((-1, rest))",
        "ranges.append((group, rest))",
    ),
    Plant(
        "rows that fill a group are the next one's",
        BACKENDS + "the_grouped_library_is_given_all_groups",
        "kernels/scaled/operands.py",
        "last = last if group < 0 else group",
        "last = last + 1 if group < 0 else group",
    ),
    Plant(
        "squares of a weight are read by rows along either dim",
        READS,
        "kernels/scaled/operands.py",
        "        if x_RK.dim == -2:\n            each = unpack(codes.mT)",
        "        if x_RK.dim == -2:\n            each = unpack(codes.mT).flip(-1)",
    ),
    Plant(
        "a library is not tried",
        BACKENDS + "a_wrong_library_is_not_chosen",
        "kernels/scaled/choose.py",
        'return "" if error < BOUND else',
        'return "" if error < 100 else',
    ),
    Plant(
        "a back end that is not there is told of by the first product",
        "tests/cpu/test_training_quantise.py::"
        "test_a_back_end_that_is_not_there_is_told_before_data_is_prepared",
        "training/precision.py",
        "        require_available(quantise.backend, device)",
        "        assert device",
    ),
    Plant(
        "all groups have the scale of the first one's weight",
        BACKENDS + "the_grouped_library_is_given_all_groups",
        "kernels/scaled/scaled_grouped_mm.py",
        "weight_scales = scales.flatten(1).expand(-1, b_EMK.shape[1])",
        "weight_scales = scales.flatten(1)[:1].expand(len(b_EMK), b_EMK.shape[1])",
    ),
    Plant(
        "each weight asks for the largest of what several read",
        "tests/gloo/test_planner_traffic.py::test_a_step_sends_what_is_planned",
        "layers/flow.py",
        "return operand._replace(cache=self.saved_tensors.cached)",
        "return operand",
    ),
)
