"""Plants B60, B61 and B78: frozen weights, adapters, their format in files."""

from tests.plants.plant import Plant

FROZEN = "tests/cpu/test_training_frozen.py::"
B60_BIAS = FROZEN + "test_b60_the_bias_of_a_frozen_router_stays"
B60_BYTES = FROZEN + "test_b60_bytes_of_frozen_weights_are_those_of_the_compute_format"
B60_GRADIENTS = FROZEN + "test_b60_frozen_weights_have_no_gradient_and_others_the_same"

ADAPTERS = "tests/cpu/test_adapters.py::"
B61_MERGED = ADAPTERS + "test_b61_adapters_compute_what_their_merged_weights_do"
B61_DROPOUT = ADAPTERS + "test_b61_gradients_are_those_of_what_dropout_left"
B61_SAME = "tests/gloo/test_adapters.py::test_b61_ranks_leave_the_same_features_out"
B61_LAYOUTS = (
    "tests/gloo/test_adapters.py::test_b61_layouts_with_adapters_compute_what_one_rank_computes"
)

PEFT = "tests/cpu/test_adapters_peft.py::"
B78_BITS = PEFT + "test_b78_adapters_go_to_peft_bit_for_bit"
B78_MERGED = (
    "tests/cpu/test_adapters_experts.py::test_b78_adapters_give_the_logits_of_pefts_merged_model"
)
B78_LINEAR = "tests/cpu/test_adapters_experts.py::test_b78_linear_layers_of_experts_are_merged"
B78_LOGITS = PEFT + "test_b78_an_adapter_of_peft_gives_its_logits"

PLANTS = (
    Plant(
        "b60",
        "the selection bias of a frozen router moves",
        B60_BIAS,
        "moe/balance.py",
        "        if router.weight.requires_grad:\n",
        "        if True:\n",
    ),
    Plant(
        "b60",
        "frozen weights are masters",
        B60_BYTES,
        "model/tuning.py",
        "values = values.to(dtype) if weight.reads_compute_dtype else values",
        "values = values.clone()",
    ),
    Plant(
        "b60",
        "frozen weights are planned with moments",
        B60_BYTES,
        "planner/memory_state.py",
        "        if weight.frozen:\n",
        "        if weight.frozen and not weight.product:\n",
    ),
    Plant(
        "b60",
        "a frozen parameter is trained",
        B60_GRADIENTS,
        "model/tuning.py",
        "setattr(owner, leaf, nn.Parameter(values, requires_grad=False))",
        "setattr(owner, leaf, nn.Parameter(values))",
    ),
    Plant(
        "b61",
        "the scale of an adapter is applied twice",
        B61_MERGED,
        "kernels/swiglu/ffn.py",
        "            y.add_(self.products.product(inner.contiguous(), b))\n",
        "            y.add_(self.products.product(inner.contiguous(), b), alpha=self.low.scale)\n",
    ),
    Plant(
        "b61",
        "the gradient of an adapter's rows is missing",
        B61_MERGED,
        "kernels/swiglu/ffn.py",
        "            dx_ND = inner.add_gradient_(dx_ND, inner_back)\n",
        "",
    ),
    Plant(
        "b61",
        "an adapter's gradient is that of one slice of the experts",
        B61_LAYOUTS,
        "parallel/data/sharding.py",
        '        _sum_gradients(over_etp, self.parts.world.group("etp"))\n',
        "",
    ),
    Plant(
        "b61",
        "A of an adapter is that of another slice of the experts",
        B61_LAYOUTS,
        "layers/placement.py",
        "        index, ranks = axes[axis]\n",
        "        index, ranks = axes[axis]\n"
        '        index = ranks - 1 - index if axis == "etp" and name.endswith("_a") else index\n',
    ),
    Plant(
        "b61",
        "adapters are saved by one rank of the experts alone",
        "tests/gloo/test_adapters.py::test_b61_adapters_of_experts_of_all_ranks_are_saved",
        "training/state.py",
        "        if written:\n",
        '        if written and not ("_lora_" in name and state.parts.world.experts.ep):\n',
    ),
    Plant(
        "b61",
        "dropout of an adapter differs between ranks",
        B61_SAME,
        "layers/linear.py",
        "key = recipe.seed, position.number",
        "key = recipe.seed + flow.world.rank, position.number",
    ),
    Plant(
        "b61",
        "dropout counts the inputs of a slice from zero",
        B61_SAME,
        "layers/linear.py",
        "range(*box[-1])",
        "range(box[-1][1] - box[-1][0])",
    ),
    Plant(
        "b61",
        "dropout counts the experts of each rank from zero",
        B61_SAME,
        "moe/experts.py",
        "((expert_R + first) << EXPERT_BIT)",
        "(expert_R << EXPERT_BIT)",
    ),
    Plant(
        "b61",
        "the gradient of rows passes where dropout left them out",
        B61_DROPOUT,
        "kernels/linear/product.py",
        "dx = ctx.transform(dy_TO @ value_OI).to(ctx.dtype)",
        "dx = (dy_TO @ value_OI).to(ctx.dtype)",
    ),
    Plant(
        "b61",
        "copies of an adapter over slices of experts count once each in the norm",
        B61_LAYOUTS,
        "parallel/data/sharding.py",
        "            index = index * etp + world.experts.etp\n            count *= etp\n",
        "            pass\n",
    ),
    Plant(
        "b61",
        "an exported weight has its adapter in it twice",
        ADAPTERS + "test_b61_a_folder_is_tuned_and_goes_out_with_its_adapters_in_it",
        "model/tuning.py",
        "return weight.to(a.dtype) + scale * (b @ a)",
        "return weight.to(a.dtype) + 2 * scale * (b @ a)",
    ),
    Plant(
        "b78",
        "experts are fastest in A",
        B78_BITS,
        "convert/adapter.py",
        "tensor = each.flatten(0, 1) if end",
        "tensor = each.transpose(0, 1).flatten(0, 1) if end",
    ),
    Plant(
        "b78",
        "experts are slowest in B",
        B78_LOGITS,
        "convert/adapter.py",
        "raw.unflatten(1, parts).permute(2, 1, 0)",
        "raw.unflatten(1, parts[::-1]).permute(1, 2, 0)",
    ),
    Plant(
        "b78",
        "the first parameter that is wrapped is the outer one",
        B78_LOGITS,
        "model/families/peft.py",
        "for depth, same in enumerate(reversed(wrapped.values())):",
        "for depth, same in enumerate(wrapped.values()):",
    ),
    Plant(
        "b78",
        "up of an expert takes the rows of A that gate has",
        B78_LINEAR,
        "model/families/peft_reading.py",
        "        start += max(part.rank for part in same)\n",
        "        start = max(start, *(part.rank for part in same))\n",
    ),
    Plant(
        "b78",
        "a scale of one part is that of all",
        B78_LINEAR,
        "convert/adapter.py",
        "            if end == LORA_B and part.scale != low_rank.scale:\n",
        "            if False:\n",
    ),
    Plant(
        "b78",
        "PEFT does not know that experts of gpt_oss are transposed",
        B78_MERGED,
        "model/families/peft.py",
        "    marked = family in MARKED_TRANSPOSED\n",
        "    marked = False\n",
    ),
    Plant(
        "b78",
        "an adapter in a folder's weight is scaled twice",
        PEFT + "test_b78_an_adapters_folder_is_its_base_and_the_scaled_product_in_it",
        "convert/importer.py",
        "return merge_adapter(tensor, a, b, low_rank.scale)",
        "return merge_adapter(tensor, a, b, low_rank.scale**2)",
    ),
    Plant(
        "b78",
        "an adapter of another base is taken",
        PEFT + "test_b78_adapters_of_another_base_rank_or_target_are_refused",
        "convert/importer.py",
        "if adapter.peft.identity not in (None, tensors.identity()):",
        "if adapter.peft.identity not in (None, adapter.peft.identity):",
    ),
)
