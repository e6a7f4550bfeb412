"""Planted bugs: empty experts, fresh memory, indices, FLOPs."""

from tests.plants.plant import Plant

MODEL = "tests/cpu/test_model.py::"
KERNELS = "tests/cpu/test_kernels.py::"
ADAMW = "tests/cpu/test_optim_adamw.py::"
MUON = "tests/cpu/test_optim_muon.py::"
UNINITIALISED_MEMORY = MODEL + "test_uninitialised_memory_reaches_nothing"
MEASURED = "tests/cpu/test_observe_measured.py::"
FLOPS_THOSE = "tests/pure/test_planner_count.py::test_flops_are_those_of_megatron"
BUILT_MODEL = "tests/cpu/test_observe_flops.py::test_a_built_model_counts_as_published"
FLOPS_THOSE_REAL = MEASURED + "test_flops_are_those_of_a_real_step"
PRODUCT_INDEX = "tests/pure/test_kernels_indices.py::test_no_product_and_no_index_is_narrow"
STEP_INDEXES = "tests/cpu/test_kernels_indices.py::test_a_step_indexes_by_int64_alone"

PLANTS = (
    Plant(
        "what no token reached has no gradient",
        MODEL + "test_an_expert_without_tokens_gets_zeros",
        "parallel/data/sharding.py",
        "                parameter.grad = torch.zeros_like(parameter)\n",
        "                continue\n",
    ),
    Plant(
        "an empty expert takes its neighbour's row",
        MODEL + "test_an_expert_without_tokens_gets_zeros",
        "kernels/grouped/loop.py",
        "        if start == end:\n            continue\n",
        "        if start == end:\n            start, end = 0, 1\n",
    ),
    Plant(
        "the mean over no label",
        MODEL + "test_a_micro_batch_without_valid_rows_gives_zeros",
        "training/step.py",
        "counts.clamp(min=1)",
        "counts",
    ),
    Plant(
        "AdamW leaves a parameter out whose gradient is zero",
        ADAMW + "test_a_zero_gradient_is_a_gradient",
        "optim/adamw.py",
        "        for count in self._steps.values():\n            count += 1\n",
        "        for name, count in self._steps.items():\n"
        "            count += int(grads[name].any())\n",
    ),
    Plant(
        "Muon divides by the norm of a zero matrix",
        MUON + "test_an_expert_without_tokens_keeps_its_momentum_and_decays",
        "optim/muon.py",
        "torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True).clamp_(min=EPS)",
        "torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True)",
    ),
    Plant(
        "the gradient of an empty expert is whatever memory held",
        UNINITIALISED_MEMORY,
        "kernels/grouped/loop.py",
        "into_EOI = x_RI.new_zeros(",
        "into_EOI = x_RI.new_empty(",
    ),
    Plant(
        "rows past the last offset are summed",
        UNINITIALISED_MEMORY,
        "kernels/permute/gather.py",
        "        picked = torch.where((row_TK < end).reshape(-1, 1), picked, 0)\n",
        "",
    ),
    Plant(
        "rows past the last offset give weights a gradient",
        KERNELS + "test_a_missing_copy_gets_no_weight_gradient_from_memory",
        "kernels/permute/gather.py",
        "copy_R, row_TK.reshape(-1, 1), complete).view(-1)",
        "copy_R, row_TK.reshape(-1, 1), True).view(-1)",
    ),
    Plant(
        "missing copies are multiplied by zero",
        UNINITIALISED_MEMORY,
        "kernels/permute/gather.py",
        "picked = torch.where((row_TK < end).reshape(-1, 1), picked, 0)",
        "picked = picked * (row_TK < end).reshape(-1, 1)",
    ),
    Plant(
        "the head's gradient starts from fresh memory",
        UNINITIALISED_MEMORY,
        "kernels/cross_entropy/chunked.py",
        "into_VD = x_CD.new_zeros(",
        "into_VD = x_CD.new_empty(",
    ),
    Plant(
        "rows are gathered by 32-bit numbers",
        PRODUCT_INDEX,
        "kernels/permute/gather.py",
        "    return _index_rows(x_TD, token_R)\n",
        "    return _index_rows(x_TD, token_R.int())\n",
    ),
    Plant(
        "places of elements come from 32-bit offsets",
        PRODUCT_INDEX,
        "moe/dispatch/routing_plan.py",
        "    return Permutation(token_R, copy_R, row_TK.view(tokens, entries), offs_B)\n",
        "    offs_B = offs_B * entries // entries\n"
        "    return Permutation(token_R, copy_R, row_TK.view(tokens, entries), offs_B)\n",
    ),
    Plant(
        "the dispatcher hands on 32-bit indices",
        STEP_INDEXES,
        "moe/dispatch/routing_plan.py",
        "token_R = copy_R // entries",
        "token_R = (copy_R // entries).to(torch.int32)",
    ),
    Plant(
        "every expert's products are counted",
        FLOPS_THOSE,
        "planner/count.py",
        "used = size // routing.experts * min(routing.top_k, routing.experts)",
        "used = size",
    ),
    Plant(
        "a shared expert counts with a routed one's width",
        FLOPS_THOSE,
        "moe/describe.py",
        "shared = self.shared.width",
        "shared = self.width",
    ),
    Plant(
        "attention counts key heads only",
        FLOPS_THOSE,
        "spec/layer.py",
        "return self.heads * (self.qk_dim + self.v_dim)",
        "return self.kv_heads * (self.qk_dim + self.v_dim)",
    ),
    Plant(
        "the built model's count takes every expert for active",
        BUILT_MODEL,
        "tests/model_counts.py",
        "experts.parameters, experts.active * top_k // among, experts.multiplied * top_k // among",
        "experts.parameters, experts.active, experts.multiplied",
    ),
    Plant(
        "the built model's count puts the router in",
        BUILT_MODEL,
        "tests/model_counts.py",
        'and role not in ("router", "gate"))',
        'and role != "gate")',
    ),
    Plant(
        "every expert multiplies every row",
        FLOPS_THOSE_REAL,
        "kernels/grouped/loop.py",
        "            torch.mm(x_RI[start:stop], w_EIO[e], out=y_RO[start:stop])\n",
        "            y_RO[start:stop] = (x_RI @ w_EIO[e])[start:stop]\n",
    ),
    Plant(
        "the head's gradient is multiplied twice",
        FLOPS_THOSE_REAL,
        "kernels/cross_entropy/chunked.py",
        "        torch.mm(logits_CV, value, out=dx_TD[rows])\n",
        "        torch.mm(logits_CV, value, out=dx_TD[rows])\n        _ = logits_CV.t() @ x_CD\n",
    ),
    Plant(
        "the grouped product runs over rows twice",
        MEASURED + "test_the_grouped_product_multiplies_no_more",
        "kernels/grouped/grouped.py",
        "    return F.grouped_mm(x_RI, w_EOI.transpose(1, 2), offs=offs_E)\n",
        "    twice = torch.cat([x_RI, x_RI])\n"
        "    return F.grouped_mm(twice, w_EOI.transpose(1, 2), offs=offs_E)[: len(x_RI)]\n",
    ),
)
