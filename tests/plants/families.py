"""Plants B23 of parts that some families have: placement of norms, gates, experts' own parts."""

from tests.plants.plant import Plant

B23 = (
    "tests/cpu/test_families_parity.py::"
    "test_b23_logits_choices_weights_and_gradients_equal_transformers"
)
PLANTS = (
    Plant(
        "b23",
        "the norm after a half is passed over",
        B23,
        "model/block.py",
        "scaled(out_TD if norm is None else norm(out_TD, flow), self._scale)",
        "scaled(out_TD, self._scale)",
    ),
    Plant(
        "b23",
        "the shared expert's output goes past the norm after experts",
        B23,
        "moe/layer.py",
        "if not self.apart:",
        "if True:",
    ),
    Plant(
        "b23",
        "halves that share a norm do not share its rows",
        B23,
        "model/block.py",
        "normed_TD if self._shared else total_TD",
        "total_TD",
    ),
    Plant(
        "b23",
        "a LayerNorm leaves the mean in",
        B23,
        "layers/norm.py",
        "super().forward(x - x.mean(-1, keepdim=True), flow)",
        "super().forward(x, flow)",
    ),
    Plant(
        "b23",
        "the gate on attention's output is not a sigmoid",
        B23,
        "layers/attention.py",
        "self.out_gate(x_TD, whole).sigmoid()",
        "self.out_gate(x_TD, whole)",
    ),
    Plant(
        "b23",
        "the mean of routed and shared experts is their sum",
        B23,
        "moe/layer.py",
        "self.record, self.residual_scale = record, record.scale",
        "self.record = record",
    ),
)
