"""Planted bugs: parts that some families have: placement of norms, gates, experts' own parts."""

from tests.plants.plant import Plant

LOGITS_CHOICES = (
    "tests/cpu/test_families_parity.py::"
    "test_logits_choices_weights_and_gradients_equal_transformers"
)
DELTA = "tests/cpu/test_layers_delta.py::test_"
CACHE = "tests/cpu/test_model_generate.py::test_logits_are_those_of_whole_texts"
PLANTS = (
    Plant(
        "the norm after a half is passed over",
        LOGITS_CHOICES,
        "model/block.py",
        "scaled(out_TD if norm is None else norm(out_TD, flow), self._residual_scale)",
        "scaled(out_TD, self._residual_scale)",
    ),
    Plant(
        "the shared expert's output goes past the norm after experts",
        LOGITS_CHOICES,
        "moe/layer.py",
        "if not self.separate_output:",
        "if True:",
    ),
    Plant(
        "halves that share a norm do not share its rows",
        LOGITS_CHOICES,
        "model/block.py",
        "normed_TD if self._shared_norm else total_TD",
        "total_TD",
    ),
    Plant(
        "a LayerNorm leaves the mean in",
        LOGITS_CHOICES,
        "layers/norm.py",
        "super().forward((x - mean).to(x.dtype), flow)",
        "super().forward(x, flow)",
    ),
    Plant(
        "the gate on attention's output is not a sigmoid",
        LOGITS_CHOICES,
        "layers/attention.py",
        "self.out_gate(x_TD, whole).sigmoid()",
        "self.out_gate(x_TD, whole)",
    ),
    Plant(
        "the mean of routed and shared experts is their sum",
        LOGITS_CHOICES,
        "moe/layer.py",
        "self.residual_scale = record.scale",
        "pass",
    ),
    Plant(
        "each slice of an expert adds the whole bias of its output",
        "tests/gloo/test_proof_verify.py::"
        "test_blocks_and_what_crosses_layers_compute_over_ranks_what_one_rank_does",
        "moe/experts.py",
        'share = 1 / flow.world.group("etp").size',
        "share = 1.0",
    ),
    Plant(
        "rows past the last offset enter the last expert's bias",
        "tests/cpu/test_moe_form.py::test_rows_of_no_expert_read_no_bias_and_leak_nothing",
        "kernels/swiglu/variant.py",
        "rows.to(bias.master.dtype).masked_fill(~live_R[:, None], 0)",
        "rows.to(bias.master.dtype)",
    ),
    Plant(
        "an expert's input is bounded from above alone",
        LOGITS_CHOICES,
        "kernels/swiglu/variant.py",
        "up.clamp(-self.limit, self.limit)",
        "up.clamp(max=self.limit)",
    ),
    Plant(
        "sinks take no weight",
        LOGITS_CHOICES,
        "layers/attention.py",
        "flow, self.window, self.sinks)",
        "flow, self.window)",
    ),
    Plant(
        "gate and up that lie by turns are exchanged",
        LOGITS_CHOICES,
        "model/families/names.py",
        "for dim in self.perm]).permute(inverse)",
        "for dim in self.perm]).permute(inverse).flip(1)",
    ),
    Plant(
        "the second number of a byte of codes comes first",
        "tests/cpu/test_convert_mxfp4.py::test_codes_arrive_as_numbers_in_their_places",
        "kernels/quantise/elements.py",
        "torch.stack((packed & 15, packed >> 4), -1)",
        "torch.stack((packed >> 4, packed & 15), -1)",
    ),
    Plant(
        "values keep their size",
        LOGITS_CHOICES,
        "layers/attention.py",
        "v_TGv = v_TGv * self.record.value_scale",
        "v_TGv = v_TGv * 1.0",
    ),
    Plant(
        "layers with a window turn as full ones do",
        LOGITS_CHOICES,
        "model/families/mixed_sizes.py",
        "rope=self.window_rope or rope",
        "rope=rope",
    ),
    Plant(
        "Llama 4's weights are factors of what experts give",
        LOGITS_CHOICES,
        "model/families/llama4_text.py",
        '"weigh": "input"',
        '"weigh": "output"',
    ),
    Plant(
        "layers without positions turn",
        LOGITS_CHOICES,
        "model/families/mixed_sizes.py",
        "rope=None, temperature=self.temperature",
        "rope=rope, temperature=self.temperature",
    ),
    Plant(
        "a chunk has one row more",
        LOGITS_CHOICES,
        "layers/attention.py",
        "flow.chunked(chunk)",
        "flow.chunked(chunk + 1)",
    ),
    Plant(
        "a convolution reaches into the document before",
        "tests/cpu/test_layers_convolution.py::"
        "test_documents_are_convolved_by_themselves_and_padding_leaks_nothing",
        "kernels/convolution/short.py",
        "flatten(0, 1).where((positions_T >= distance)[:, None], 0)",
        "flatten(0, 1)",
    ),
    Plant(
        "taps are turned round",
        LOGITS_CHOICES,
        "kernels/convolution/short.py",
        "term = read * value_C1K[:, 0, taps - 1 - distance].to(read.dtype)",
        "term = read * value_C1K[:, 0, distance].to(read.dtype)",
    ),
    Plant(
        "the rows before a piece are those of the rank's own piece",
        "tests/gloo/test_proof_verify.py::"
        "test_blocks_and_what_crosses_layers_compute_over_ranks_what_one_rank_does",
        "layers/convolution.py",
        "last[second - 1]])",
        "last[second]])",
    ),
    Plant(
        "a state is kept across documents",
        DELTA + "chunks_compute_what_the_recurrence_does",
        "kernels/delta/chunked.py",
        "from_start = (document == before)[..., None]",
        "from_start = (document >= before)[..., None]",
    ),
    Plant(
        "a row takes away what the state had before its decay",
        DELTA + "chunks_compute_what_the_recurrence_does",
        "kernels/delta/chunked.py",
        "[v * beta, k * beta * grown]",
        "[v * beta, k * beta * (total - g).exp().where(from_start, 0)]",
    ),
    Plant(
        "heads that share a key stand apart",
        "tests/gloo/test_proof_verify.py::"
        "test_blocks_and_what_crosses_layers_compute_over_ranks_what_one_rank_does",
        "kernels/delta/chunked.py",
        "x_TGk.repeat_interleave(v_THv.shape[1] // x_TGk.shape[1], 1)",
        "x_TGk.repeat(1, v_THv.shape[1] // x_TGk.shape[1], 1)",
    ),
    Plant(
        "padding's gradients reach the rows before it",
        DELTA + "documents_and_padding_leak_nothing_into_states",
        "layers/delta.py",
        "return out_THv if valid_T is None else",
        "return out_THv if True else",
    ),
    Plant(
        "a state comes from the rank's own piece",
        "tests/gloo/test_proof_verify.py::"
        "test_blocks_and_what_crosses_layers_compute_over_ranks_what_one_rank_does",
        "layers/delta.py",
        "second = 2 * ranks.size - 1 - ranks.index",
        "second = 2 * ranks.size - 2 - ranks.index",
    ),
    Plant(
        "one is not added to the weight of a norm that is centred at zero",
        LOGITS_CHOICES,
        "layers/norm.py",
        "replace(weight, value=weight.value + 1)",
        "weight",
    ),
    Plant(
        "rows of heads that share a matrix with their gates lie one head after the other",
        LOGITS_CHOICES,
        "model/families/names.py",
        "group * self.total + self.start + place",
        "self.start * self.groups + row",
    ),
    Plant(
        "what is handed on of a shared matrix goes to its first rows",
        "tests/gloo/test_convert_layouts.py::"
        "test_matrices_that_share_a_tensor_come_and_go_by_parts",
        "convert/stream.py",
        "rows = part.sent.rows.disk_rows(*part.box[0])",
        "rows = span.sent.rows.disk_rows(*part.box[0])",
    ),
    Plant(
        "the rows before that are kept of a text stay those of its prompt",
        CACHE,
        "layers/convolution.py",
        "cache.states[key] = torch.cat([before[:, 1:], new], 1)",
        "cache.states[key] = before",
    ),
    Plant(
        "states of texts stay where they were when one has ended",
        CACHE,
        "layers/cache.py",
        "{key: _select(x, previous) for",
        "{key: x[: len(previous)] for",
    ),
    Plant(
        "a chunk goes on where a text does",
        CACHE,
        "layers/cache.py",
        "lengths = [(length - 1) % chunk + 1 for length in lengths]",
        "lengths = [min(length, chunk) for length in lengths]",
    ),
    Plant(
        "a bias of experts decays as a matrix",
        "tests/pure/test_optim_config.py::test_what_decays",
        "optim/config.py",
        'no_decay: tuple[str, ...] = ("*norm*", "*bias*")',
        'no_decay: tuple[str, ...] = ("*norm*",)',
    ),
    Plant(
        "a bias of experts is orthogonalised as a matrix",
        "tests/pure/test_optim_config.py::test_what_muon_takes",
        "optim/config.py",
        '        "*norm*",\n        "*bias*",\n',
        '        "*norm*",\n',
    ),
    Plant(
        "a model without positions turns",
        LOGITS_CHOICES,
        "model/families/base.py",
        "rope = self.rope if self.has_rope else None",
        "rope = self.rope",
    ),
    Plant(
        "the gate of each head of latent attention is not a sigmoid",
        LOGITS_CHOICES,
        "layers/attention.py",
        "self.out_gate(gated, whole).sigmoid()",
        "self.out_gate(gated, whole)",
    ),
    Plant(
        "the least log decay bounds nothing",
        LOGITS_CHOICES,
        "model/families/mixed_sizes.py",
        "super().build(heads, decay_floor=self.decay_floor, **extra)",
        "super().build(heads, **extra)",
    ),
    Plant(
        "slow bands keep their frequencies",
        LOGITS_CHOICES,
        "layers/rope.py",
        "(1 - fast_weight) * plain / bands.factor",
        "(1 - fast_weight) * plain",
    ),
)
