"""Planted bugs: frozen weights, adapters, their format in files."""

from tests.plants.plant import Plant

FROZEN = "tests/cpu/test_training_frozen.py::"
BIAS_FROZEN = FROZEN + "test_the_bias_of_a_frozen_router_stays"
BYTES_FROZEN = FROZEN + "test_bytes_of_frozen_weights_are_those_of_the_compute_format"
FROZEN_WEIGHTS = FROZEN + "test_frozen_weights_have_no_gradient_and_others_the_same"

ADAPTERS = "tests/cpu/test_adapters.py::"
ADAPTERS_COMPUTE = ADAPTERS + "test_adapters_compute_what_their_merged_weights_do"
GRADIENTS_THOSE = ADAPTERS + "test_gradients_are_those_of_what_dropout_left"
RANKS_LEAVE = "tests/gloo/test_adapters.py::test_ranks_leave_the_same_features_out"
LAYOUTS_ADAPTERS = (
    "tests/gloo/test_adapters.py::test_layouts_with_adapters_compute_what_one_rank_computes"
)

PEFT = "tests/cpu/test_adapters_peft.py::"
ADAPTERS_GO = PEFT + "test_adapters_go_to_peft_bit_for_bit"
ADAPTERS_GIVE = (
    "tests/cpu/test_adapters_experts.py::test_adapters_give_the_logits_of_pefts_merged_model"
)
LINEAR_LAYERS = "tests/cpu/test_adapters_experts.py::test_linear_layers_of_experts_are_merged"
ADAPTER_PEFT = PEFT + "test_an_adapter_of_peft_gives_its_logits"

FORWARD_ONLY = "tests/pure/test_planner_time.py::"
FORWARD_ONLY += "test_layers_below_the_first_trained_parameter_have_no_backward"
EACH_ACTION = "tests/gloo/test_planner_schedules.py::"
EACH_ACTION += "test_after_each_action_a_rank_holds_what_is_planned"

PLANTS = (
    Plant(
        "layers below the first trained one are charged a backward",
        FORWARD_ONLY,
        "planner/time_layer.py",
        "    return time if saves else time.without_backward()\n",
        "    return time\n",
    ),
    Plant(
        "frozen layers of a later stage save for a backward that nothing needs",
        EACH_ACTION,
        "parallel/pipeline/executor.py",
        "            inputs = [rows_TD.requires_grad_(sends_gradient) for rows_TD in inputs]\n",
        "            inputs = [rows_TD.requires_grad_() for rows_TD in inputs]\n",
    ),
    Plant(
        "the selection bias of a frozen router moves",
        BIAS_FROZEN,
        "moe/balance.py",
        "        if router.weight.requires_grad:\n",
        "        if True:\n",
    ),
    Plant(
        "frozen weights are masters",
        BYTES_FROZEN,
        "model/tuning.py",
        "values = values.to(dtype) if weight.reads_compute_dtype else values",
        "values = values.clone()",
    ),
    Plant(
        "frozen weights are planned with moments",
        BYTES_FROZEN,
        "planner/memory_state.py",
        "        if weight.frozen:\n",
        "        if weight.frozen and not weight.product:\n",
    ),
    Plant(
        "a frozen parameter is trained",
        FROZEN_WEIGHTS,
        "model/tuning.py",
        "setattr(owner, leaf, nn.Parameter(values, requires_grad=False))",
        "setattr(owner, leaf, nn.Parameter(values))",
    ),
    Plant(
        "the scale of an adapter is applied twice",
        ADAPTERS_COMPUTE,
        "kernels/swiglu/ffn.py",
        "            y.add_(self.products.product(inner.contiguous(), b))\n",
        "            y.add_(self.products.product(inner.contiguous(), b), alpha=self.low.scale)\n",
    ),
    Plant(
        "the gradient of an adapter's rows is missing",
        ADAPTERS_COMPUTE,
        "kernels/swiglu/ffn.py",
        "            dx_ND = inner.add_gradient_(dx_ND, inner_back)\n",
        "",
    ),
    Plant(
        "an adapter's gradient is that of one slice of the experts",
        LAYOUTS_ADAPTERS,
        "parallel/data/sharding.py",
        '        _sum_gradients(over_etp, self.parts.world.group("etp"))\n',
        "",
    ),
    Plant(
        "A of an adapter is that of another slice of the experts",
        LAYOUTS_ADAPTERS,
        "layers/placement.py",
        "        index, ranks = axes[axis]\n",
        "        index, ranks = axes[axis]\n"
        '        index = ranks - 1 - index if axis == "etp" and name.endswith("_a") else index\n',
    ),
    Plant(
        "adapters are saved by one rank of the experts alone",
        "tests/gloo/test_adapters.py::test_adapters_of_experts_of_all_ranks_are_saved",
        "training/state.py",
        "        if written:\n",
        '        if written and not ("_lora_" in name and state.parts.world.experts.ep):\n',
    ),
    Plant(
        "dropout of an adapter differs between ranks",
        RANKS_LEAVE,
        "layers/linear.py",
        "key = policy.seed, position.number",
        "key = policy.seed + flow.world.rank, position.number",
    ),
    Plant(
        "dropout counts the inputs of a slice from zero",
        RANKS_LEAVE,
        "layers/linear.py",
        "range(*box[-1])",
        "range(box[-1][1] - box[-1][0])",
    ),
    Plant(
        "dropout counts the experts of each rank from zero",
        RANKS_LEAVE,
        "moe/experts.py",
        "((expert_R + first) << EXPERT_BIT)",
        "(expert_R << EXPERT_BIT)",
    ),
    Plant(
        "the gradient of rows passes where dropout left them out",
        GRADIENTS_THOSE,
        "kernels/linear/product.py",
        "dx = ctx.transform(dy_TO @ value_OI).to(ctx.dtype)",
        "dx = (dy_TO @ value_OI).to(ctx.dtype)",
    ),
    Plant(
        "copies of an adapter over slices of experts count once each in the norm",
        LAYOUTS_ADAPTERS,
        "parallel/data/sharding.py",
        "            index = index * etp + world.experts.etp\n            count *= etp\n",
        "            pass\n",
    ),
    Plant(
        "an exported weight has its adapter in it twice",
        ADAPTERS + "test_a_folder_is_tuned_and_goes_out_with_its_adapters_in_it",
        "model/tuning.py",
        "return weight.to(a.dtype) + scale * (b @ a)",
        "return weight.to(a.dtype) + 2 * scale * (b @ a)",
    ),
    Plant(
        "experts are fastest in A",
        ADAPTERS_GO,
        "convert/adapter.py",
        "tensor = each.flatten(0, 1) if end",
        "tensor = each.transpose(0, 1).flatten(0, 1) if end",
    ),
    Plant(
        "experts are slowest in B",
        ADAPTER_PEFT,
        "convert/adapter.py",
        "raw.unflatten(1, parts).permute(2, 1, 0)",
        "raw.unflatten(1, parts[::-1]).permute(1, 2, 0)",
    ),
    Plant(
        "the first parameter that is wrapped is the outer one",
        ADAPTER_PEFT,
        "model/families/peft.py",
        "for depth, same in enumerate(reversed(wrapped.values())):",
        "for depth, same in enumerate(wrapped.values()):",
    ),
    Plant(
        "up of an expert takes the rows of A that gate has",
        LINEAR_LAYERS,
        "model/families/peft_reading.py",
        "        start += max(part.rank for part in same)\n",
        "        start = max(start, *(part.rank for part in same))\n",
    ),
    Plant(
        "a scale of one part is that of all",
        LINEAR_LAYERS,
        "convert/adapter.py",
        "            if end == LORA_B and part.scale != low_rank.scale:\n",
        "            if False:\n",
    ),
    Plant(
        "PEFT does not know that experts of gpt_oss are transposed",
        ADAPTERS_GIVE,
        "model/families/peft.py",
        "    marked = family in MARKED_TRANSPOSED\n",
        "    marked = False\n",
    ),
    Plant(
        "an adapter in a folder's weight is scaled twice",
        PEFT + "test_an_adapters_folder_is_its_base_and_the_scaled_product_in_it",
        "convert/importer.py",
        "return merge_adapter(tensor, a, b, low_rank.scale)",
        "return merge_adapter(tensor, a, b, low_rank.scale**2)",
    ),
    Plant(
        "an adapter of another base is taken",
        PEFT + "test_adapters_of_another_base_rank_or_target_are_refused",
        "convert/importer.py",
        "if adapter.peft.identity not in (None, tensors.identity()):",
        "if adapter.peft.identity not in (None, adapter.peft.identity):",
    ),
)
