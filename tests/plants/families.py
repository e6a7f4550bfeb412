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
    Plant(
        "b23",
        "each slice of an expert adds the whole bias of its output",
        "tests/gloo/test_proof_verify.py::"
        "test_b23_parts_of_few_families_compute_over_tensor_ranks_what_one_rank_does",
        "moe/experts.py",
        'share = 1 / flow.world.group("etp").size',
        "share = 1.0",
    ),
    Plant(
        "b15",
        "rows past the last offset enter the last expert's bias",
        "tests/cpu/test_moe_form.py::test_b15_rows_of_no_expert_read_no_bias_and_leak_nothing",
        "kernels/swiglu/form.py",
        "rows.to(bias.master.dtype).masked_fill(~live_R[:, None], 0)",
        "rows.to(bias.master.dtype)",
    ),
    Plant(
        "b23",
        "an expert's input is bounded from above alone",
        B23,
        "kernels/swiglu/form.py",
        "up.clamp(-self.limit, self.limit)",
        "up.clamp(max=self.limit)",
    ),
    Plant(
        "b23",
        "sinks take no weight",
        B23,
        "layers/windowed.py",
        "flow, self.window, self.sinks)",
        "flow, self.window)",
    ),
    Plant(
        "b23",
        "gate and up that lie by turns are exchanged",
        B23,
        "model/families/names.py",
        "for dim in self.order]).permute(back)",
        "for dim in self.order]).permute(back).flip(1)",
    ),
    Plant(
        "b24",
        "the second number of a byte of codes comes first",
        "tests/cpu/test_convert_mxfp4.py::test_b24_codes_arrive_as_numbers_in_their_places",
        "kernels/quantise/elements.py",
        "torch.stack((packed & 15, packed >> 4), -1)",
        "torch.stack((packed >> 4, packed & 15), -1)",
    ),
    Plant(
        "b23",
        "values keep their size",
        B23,
        "layers/attention.py",
        "v_TGv = v_TGv * self.record.value_scale",
        "v_TGv = v_TGv * 1.0",
    ),
    Plant(
        "b23",
        "layers with a window turn as full ones do",
        B23,
        "model/families/sizes.py",
        "rope=self.window_rope or rope",
        "rope=rope",
    ),
)
