"""Plants B60: frozen weights."""

from tests.plants.plant import Plant

FROZEN = "tests/cpu/test_training_frozen.py::"
B60_BIAS = FROZEN + "test_b60_the_bias_of_a_frozen_router_stays"
B60_BYTES = FROZEN + "test_b60_bytes_of_frozen_weights_are_those_of_the_compute_format"
B60_GRADIENTS = FROZEN + "test_b60_frozen_weights_have_no_gradient_and_others_the_same"
B60_LAYOUTS = (
    "tests/gloo/test_training_frozen.py::"
    "test_b60_layouts_with_frozen_weights_compute_what_one_rank_computes"
)

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
        "model/decoder.py",
        "values = values.to(self.recipe.dtype) if weight.narrow else values",
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
        "model/decoder.py",
        "setattr(owner, leaf, nn.Parameter(values, requires_grad=False))",
        "setattr(owner, leaf, nn.Parameter(values))",
    ),
    Plant(
        "b60",
        "the first unit with anything to train has no backward of its input",
        B60_LAYOUTS,
        "layers/linear.py",
        "return table if table.requires_grad else torch.empty(0, requires_grad=True)",
        "return table",
    ),
)
