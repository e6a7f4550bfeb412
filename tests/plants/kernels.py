"""Planted bugs: what own kernels compute, read and leave."""

from tests.plants.plant import Plant

GROUPED = "tests/triton/test_grouped.py::"
PERMUTE = "tests/triton/test_permute.py::"
ROUTING = "tests/triton/test_routing.py::"
SWIGLU = "tests/triton/test_swiglu.py::test_values_are_those_of_fp64"
CROSS_ENTROPY = "tests/triton/test_cross_entropy.py::test_"

NORM = "tests/triton/test_norm.py::test_a_norm_is_that_of_fp64"
TURNED = "tests/triton/test_norm.py::test_a_normed_and_turned_head_is_that_of_fp64"
BALANCE = "tests/triton/test_balance.py::"
STEP = "tests/triton/test_model.py::test_a_step_through_kernels_is_the_plain_one"

PLANTS = (
    Plant(
        "attention's sums over the rows of short segments are rounded as they go",
        "tests/cpu/test_kernels_attention_block.py::"
        "test_gradients_of_short_segments_in_bf16_are_rounded_once",
        "kernels/attention/block_fused.py",
        "dtype = lse_NHS.dtype if widened else q_NHSd.dtype",
        "dtype = q_NHSd.dtype",
    ),
    Plant(
        "a norm's weight gradient is computed and given to no sink",
        STEP,
        "kernels/norm/rms.py",
        "dw = ctx.sink.deliver(ctx.master, precomputed(dw_D)) if ctx.needs_input_grad[1] else None",
        "dw = None",
    ),
    Plant(
        "copies for no bucket stand where lanes beyond the buckets have counted them",
        "tests/triton/test_routing.py::test_copies_stand_as_a_stable_sort_puts_them",
        "kernels/routing/fused.py",
        "number * chunk - tl.sum(tl.where(lane < buckets, before, 0), 0)",
        "number * chunk - tl.sum(before, 0)",
    ),
    Plant(
        "the library's weight gradient is rounded before it is added",
        GROUPED + "test_a_sum_over_many_rows_keeps_what_bf16_would_lose",
        "kernels/grouped/choose.py",
        'name == "grouped_mm" and dtype.itemsize == 2',
        'name == "grouped_mm" and dtype.itemsize == 4',
    ),
    Plant(
        "a weight's gradient counts padding rows",
        NORM,
        "kernels/norm/fused.py",
        "(row < valid)[:, None]",
        "(row < rows)[:, None]",
    ),
    Plant(
        "backward of a sum and its norm forgets the sum",
        NORM,
        "kernels/norm/fused.py",
        "            out += tl.load(",
        "            out += 0.0 * tl.load(",
    ),
    Plant(
        "heads are turned, then normed",
        TURNED,
        "kernels/norm/rotated.py",
        "(a * c - b * s).to",
        "((a / w_a[None, :] * c - b / w_b[None, :] * s) * w_a[None, :]).to",
    ),
    Plant(
        "the wrong half is turned",
        TURNED,
        "kernels/norm/rotated.py",
        "(b * c + a * s).to",
        "(b * c - a * s).to",
    ),
    Plant(
        "valid heads are counted as rows",
        STEP,
        "kernels/norm/rms.py",
        "dy_THd.shape[0] if ctx.n_valid is None else ctx.n_valid",
        "dy_THd.shape[0] if ctx.n_valid is None else ctx.n_valid // 2",
    ),
    Plant(
        "backward weighs the activation twice",
        SWIGLU,
        "kernels/swiglu/fused.py",
        "            act *= weight[:, None]\n",
        "            act *= weight[:, None] * weight[:, None]\n",
    ),
    Plant(
        "a kernel reads its rows twice",
        "tests/triton/test_bytes.py::test_every_memory_bound_kernel_moves_its_operands_once",
        "kernels/swiglu/fused.py",
        "    act = gate * tl.sigmoid(gate) * up\n",
        "    act = tl.load(gate_ptrs, mask=inside, other=0.0) * tl.sigmoid(gate) * up\n",
    ),
    Plant(
        "the gradient of a row's weight leaves the activation out",
        SWIGLU,
        "kernels/swiglu/fused.py",
        "tl.sum(act * grad, 1)",
        "tl.sum(up * grad, 1)",
    ),
    Plant(
        "the label's logit keeps its whole gradient",
        CROSS_ENTROPY + "loss_and_gradient_are_those_of_fp64",
        "kernels/cross_entropy/fused.py",
        "(prob - (column == label).to(tl.float32)) * factor",
        "prob * factor",
    ),
    Plant(
        "columns past the vocabulary enter the sum",
        CROSS_ENTROPY + "loss_and_gradient_are_those_of_fp64",
        "kernels/cross_entropy/fused.py",
        'mask=inside, other=float("-inf")',
        "mask=inside, other=0.0",
    ),
    Plant(
        "ranks add up the logarithms of their shares' sums",
        CROSS_ENTROPY + "shares_of_the_vocabulary_add_up_to_the_whole",
        "layers/loss.py",
        "normaliser_RC.logsumexp(0)",
        "normaliser_RC.sum(0)",
    ),
    Plant(
        "the gradient of an empty group is left as memory was",
        GROUPED + "test_weight_gradients_are_sums_in_fp32",
        "kernels/grouped/fused.py",
        "    if ADD:  # noqa: SIM102\n        if start == end:\n            return\n",
        "    if start == end:\n        return\n",
    ),
    Plant(
        "own products read rows past the last offset",
        GROUPED + "test_weight_gradients_are_sums_in_fp32",
        "kernels/grouped/fused.py",
        "in_rest = d < rest\n",
        "in_rest = d <= rest\n",
    ),
    Plant(
        "rows that nobody owns are added up by the kernel",
        PERMUTE + "test_rows_that_nobody_owns_are_not_read_and_not_written",
        "kernels/permute/fused.py",
        "mask_k = inside & (source < copies)[:, None]",
        "mask_k = inside & (source <= copies)[:, None]",
    ),
    Plant(
        "stale counts: a chunk's copies are placed by those before its last piece",
        ROUTING + "test_copies_stand_as_a_stable_sort_puts_them",
        "kernels/routing/fused.py",
        "        before += tl.sum(hit.to(tl.int32), 0)\n",
        "",
    ),
    Plant(
        "the last block's missing rows enter a sum of squares",
        BALANCE + "test_squares_of_log_sums_are_those_of_fp64",
        "kernels/routing/balance.py",
        "total += tl.where(t < rows, log_sum * log_sum, 0.0)",
        "total += log_sum * log_sum",
    ),
    Plant(
        "what all scores are divided by has no part in their gradient",
        BALANCE + "test_scores_over_their_sum_are_those_of_fp64",
        "kernels/routing/balance.py",
        "(grad - along) / divisor",
        "grad / divisor",
    ),
    Plant(
        "a balance value counts choices as tokens",
        BALANCE + "test_a_balance_value_and_its_gradient_are_those_of_fp64",
        "kernels/routing/balance.py",
        "tl.sum(count, 0) // top_k",
        "tl.sum(count, 0)",
    ),
    Plant(
        "heads are turned on where they are turned back",
        "tests/triton/test_rope.py::test_turned_heads_are_those_of_fp64",
        "kernels/rope/fused.py",
        "        s = -s\n",
        "        s = s + 0.0\n",
    ),
    Plant(
        "a position part's gradient is that of the last heads",
        "tests/triton/test_rope.py::test_keys_and_values_of_latents_are_those_of_fp64",
        "kernels/rope/fused.py",
        "        b += tl.sum(",
        "        b = tl.sum(",
    ),
    Plant(
        "FLOPs of a weight's gradient that is added are not counted",
        "tests/cpu/test_kernels.py::test_counters_of_flops_see_through_own_grouped_products",
        "kernels/grouped/fused.py",
        "    return _gradient_flops(dy_RO, x_RI)\n",
        "    return 0\n",
    ),
    Plant(
        "rows of one expert stand by their last sender",
        "tests/triton/test_exchange.py::test_what_arrives_stands_as_a_stable_sort_puts_it",
        "kernels/routing/exchange.py",
        "shift = tl.cumsum(count, 0) +",
        "shift = tl.cumsum(count, 0, reverse=True) +",
    ),
    Plant(
        "senders are numbered by rank and then by slice",
        "tests/triton/test_exchange.py::test_counts_between_ranks_are_differences_of_ends",
        "kernels/routing/exchange.py",
        "(x % ranks * slices + x // ranks)",
        "x",
    ),
    Plant(
        "counts so far leave this data rank out",
        BALANCE + "test_counters_are_those_of_whole_numbers",
        "kernels/routing/balance.py",
        "prefix = tl.where(rank == last, plain, prefix)",
        "prefix = tl.where(rank < last, plain, prefix)",
    ),
    Plant(
        "a kernel finds rows by 32-bit places",
        PERMUTE + "test_places_of_elements_are_counted_in_64_bits",
        "kernels/permute/fused.py",
        "x + source[:, None] * width",
        "x + source.to(tl.int32)[:, None] * width",
    ),
    Plant(
        "a group's weights are found by a 32-bit place",
        GROUPED + "test_a_groups_place_is_counted_in_64_bits",
        "kernels/grouped/fused.py",
        "w + group.to(tl.int64) * w_group",
        "w + group * w_group",
    ),
    Plant(
        "the fp32 sum of a weight's gradient is rounded underway",
        GROUPED + "test_a_sum_over_many_rows_keeps_what_bf16_would_lose",
        "kernels/grouped/fused.py",
        "dy_ptrs += DEPTH * out\n",
        "dy_ptrs += DEPTH * out\n        total = total.to(dy_or.dtype).to(tl.float32)\n",
    ),
    Plant(
        "a dense weight's gradient is rounded before it is added",
        "tests/cpu/test_kernels.py::"
        "test_gradients_of_16_bit_products_are_summed_in_fp32_on_a_device",
        "kernels/linear/product.py",
        "if x_TI.dtype.itemsize == 2 and accumulates_in_fp32(x_TI.device.type):",
        "if x_TI.dtype.itemsize == 4 and accumulates_in_fp32(x_TI.device.type):",
    ),
    Plant(
        "equal experts are taken by the highest id",
        ROUTING + "test_choices_are_those_of_the_plain_way",
        "kernels/routing/fused.py",
        "position = tl.argmax(key, 1, keep_dims=True)",
        "position = GROUPS * SLOTS - 1 - tl.argmax(tl.flip(key, 1), 1, keep_dims=True)",
    ),
    Plant(
        "NaN counts as the least",
        ROUTING + "test_choices_are_those_of_the_plain_way",
        "kernels/routing/fused.py",
        "tl.where(value != value, 0x7FFFFFFF, ordered)",
        "tl.where(value != value, -0x7FFFFFFF, ordered)",
    ),
    Plant(
        "a token's second mention is left out of its gradient",
        "tests/triton/test_lookup.py::test_each_row_is_added_to_its_id",
        "kernels/lookup/fused.py",
        "same = tl.load(ids + offsets, mask=offsets < count, other=-1) == row_id",
        "same = offsets == position",
    ),
)
