"""Plants B12 and B15 to B23: padding, poison, replayed decisions, number formats, weights."""

from tests.plants.plant import Plant

ROUTER = "tests/cpu/test_moe_router.py::"
BALANCE = "tests/cpu/test_moe_balance.py::"
MODEL = "tests/cpu/test_model.py::"
PARITY = "tests/cpu/test_families_parity.py::"
B12_ROUTER = ROUTER + "test_b12_padding_rows_are_not_routed"
B12_MODEL = MODEL + "test_b12_padding_rows_change_nothing"
B12_TERMS = BALANCE + "test_b12_b15_padding_changes_no_bit_of_terms_gradients_and_counters"
B15_MODEL = MODEL + "test_b15_what_stands_in_padding_rows_leaks_nowhere"
B23 = PARITY + "test_b23_logits_choices_weights_and_gradients_equal_transformers"

PLANTS = (
    Plant(
        "b12",
        "padding rows choose experts",
        B12_ROUTER,
        "moe/router.py",
        "            valid_T=context.valid_T,\n",
        "",
    ),
    Plant(
        "b12",
        "padding rows are sent to experts",
        B12_MODEL,
        "moe/topk.py",
        "    return torch.where(valid_T[:, None], experts_TK, scores_TE.shape[1])\n",
        "    return experts_TK\n",
    ),
    Plant(
        "b12",
        "padding rows make capacity larger",
        B12_MODEL,
        "moe/router.py",
        "limit = self.capacity.copies(flow.rows.population, top_k, experts)",
        "limit = self.capacity.copies(flow.rows.rows, top_k, experts)",
    ),
    Plant(
        "b12",
        "padding rows are tokens in the counters",
        B12_TERMS,
        "moe/balance.py",
        "self.tokens.add_(rows.n_valid)",
        "self.tokens.add_(rows.rows)",
    ),
    Plant(
        "b12",
        "padding rows are tokens in the terms",
        B12_TERMS,
        "moe/balance.py",
        "total = (share_NE * probability_NE).sum() / observed.population",
        "total = (share_NE * probability_NE).sum() / len(observed.logits_TE)",
    ),
    Plant(
        "b12",
        "padding rows enter the mean probability",
        B12_TERMS,
        "moe/balance.py",
        "self.probability_E.add_(observed.valid(observed.probability_TE).sum(0))",
        "self.probability_E.add_(observed.probability_TE.sum(0))",
    ),
    Plant(
        "b15",
        "rows are masked by multiplication in weight gradients",
        B15_MODEL,
        "kernels/linear/product.py",
        "return weight_gradient(dy_TO[:n_valid], x_TI[:n_valid].to(dy_TO.dtype), into)\n",
        "kept_T1 = (torch.arange(len(x_TI)) < (n_valid or len(x_TI)))[:, None]\n"
        "                x, dy = x_TI * kept_T1, dy_TO * kept_T1\n"
        "                return weight_gradient(dy, x.to(dy_TO.dtype), into)\n",
    ),
    Plant(
        "b15",
        "logits are masked by multiplication",
        ROUTER + "test_b15_poison_in_padding_rows_stays_there",
        "moe/router.py",
        "return torch.where(flow.valid_T[:, None], logits_TE, 0)",
        "return logits_TE * flow.valid_T[:, None]",
    ),
    Plant(
        "b15",
        "rows without a label are masked by multiplication in the loss",
        B15_MODEL,
        "kernels/cross_entropy/chunked.py",
        "            x_CD = torch.where(counted_C[:, None], x_CD, 0)\n            loss, dlogits_CV",
        "            x_CD = x_CD * counted_C[:, None]\n            loss, dlogits_CV",
    ),
    Plant(
        "b15",
        "padding rows enter the gradient of a norm",
        B15_MODEL,
        "kernels/norm/rms.py",
        "counted = None if ctx.n_valid is None else ctx.n_valid * per_row",
        "counted = None",
    ),
    Plant(
        "b15",
        "padding rows enter the gradient of a dense feed-forward",
        B15_MODEL,
        "kernels/swiglu/ffn.py",
        "weight_gradient(dy[:n_valid], x[:n_valid], into)",
        "weight_gradient(dy, x, into)",
    ),
    Plant(
        "b15",
        "padding rows enter the gradient of the embedding",
        B15_MODEL,
        "layers/linear.py",
        "ids, rows = ids_T[:n_valid], dx_TD[:n_valid].to(table.dtype)",
        "ids, rows = ids_T, dx_TD.to(table.dtype)",
    ),
    Plant(
        "b16",
        "each run of the layer decides anew",
        MODEL + "test_b16_recompute_never_routes_again",
        "moe/layer.py",
        "routed = self.router(rows.x_TD, flow, flow.decisions.get(self._key))",
        "routed = self.router(rows.x_TD, flow)",
    ),
    Plant(
        "b16",
        "the router does not heed the decision it is given",
        BALANCE + "test_b16_a_rerun_counts_the_same_choices_for_the_terms",
        "moe/router.py",
        "        if decision is None:\n            decision = self._decide",
        "        if decision is not self:\n            decision = self._decide",
    ),
    Plant(
        "b16",
        "the kept counts of the step so far go on counting",
        BALANCE + "test_b16_the_step_so_far_is_the_one_of_the_first_run",
        "moe/balance.py",
        "so_far_E = self.plain_E + by_rank_DE[: rank + 1].sum(0)",
        "so_far_E = self.plain_E",
    ),
    Plant(
        "b19",
        "buffers follow a cast of the model",
        ROUTER + "test_b19_the_bias_stays_float32_whatever_the_model_is_cast_to",
        "moe/router.py",
        "if old is not None and new is not None and new.dtype != old.dtype:",
        "if old is None and new is not None:",
    ),
    Plant(
        "b19",
        "buffers come back from the cast without their digits",
        MODEL + "test_b19_casting_the_model_spares_biases_and_counts",
        "moe/router.py",
        "self._buffers[name] = old.to(new.device)",
        "self._buffers[name] = new.to(old.dtype)",
    ),
    Plant(
        "b19",
        "counts are plain buffers",
        BALANCE + "test_b19_counts_that_differ_by_one_move_the_bias_apart",
        "moe/balance.py",
        "class Counters(ExactBuffers):",
        "class Counters(nn.Module):",
    ),
    Plant(
        "b22",
        "one expert with a renormalised weight is allowed",
        MODEL + "test_b22_a_router_that_could_not_learn_is_refused",
        "moe/config.py",
        'elif self.order == "score_first" and self.top_k == 1 and self.renormalise:',
        'elif self.order == "score_first" and self.top_k == 0 and self.renormalise:',
    ),
    Plant(
        "b22",
        "one expert with a softmax over the chosen is allowed",
        ROUTER + "test_b22_one_expert_per_token_still_teaches_the_router",
        "moe/config.py",
        'elif self.order == "topk_first" and self.top_k == 1:',
        'elif self.order == "topk_first" and self.top_k == 0:',
    ),
    Plant(
        "b22",
        "a lone weight is renormalised whatever was asked",
        MODEL + "test_b22_a_router_that_could_not_learn_is_refused",
        "moe/scoring.py",
        "    elif record.renormalise:\n",
        "    elif record.renormalise or record.top_k == 1:\n",
    ),
    Plant(
        "b23",
        "the scaling factor is not applied",
        B23,
        "moe/scoring.py",
        "return weights_TK if record.scale == 1.0 else weights_TK * record.scale",
        "return weights_TK",
    ),
    Plant(
        "b23",
        "weights are renormalised whatever the folder says",
        B23,
        "model/families/base.py",
        "own = {name: getattr(self, name) for name in self.router_fields}",
        "own = {n: getattr(self, n) or n == 'renormalise' for n in self.router_fields}",
    ),
    Plant(
        "b23",
        "a group's score is its best expert's",
        B23,
        "moe/topk.py",
        'if groups.score == "max":',
        'if groups.score != "none":',
    ),
    Plant(
        "b23",
        "the last dims of a head turn in place of the first",
        B23,
        "layers/attention.py",
        "first, rest = x_THd.split((turning, dims - turning), 2)",
        "rest, first = x_THd.split((dims - turning, turning), 2)",
    ),
    Plant(
        "b23",
        "each tensor rank adds the output's bias",
        "tests/gloo/test_proof_verify.py::"
        "test_b23_parts_of_few_families_compute_over_tensor_ranks_what_one_rank_does",
        "layers/attention.py",
        "self.o.shift(flow.scatter(self.o.product(out_THd.flatten(1), flow.whole)), flow)",
        "flow.scatter(self.o(out_THd.flatten(1), flow.whole))",
    ),
    Plant(
        "b23",
        "a window shows one row more",
        B23,
        "model/families/sizes.py",
        "window=self.window, sinks=False",
        "window=self.window + 1, sinks=False",
    ),
    Plant(
        "b23",
        "the groups of the folder are not read",
        B23,
        "model/families/fields.py",
        'return {"groups": made if count > 1 else None}',
        'return {"groups": None}',
    ),
    Plant(
        "b23",
        "the selection bias moves weights too",
        B23,
        "moe/router.py",
        "        weights_TK = weights(scores_TE, decision.experts_TK, self.record)\n",
        "        biased_TE = scores_TE if self.selection_bias is None else scores_TE.add(\n"
        "            self.selection_bias\n"
        "        )\n"
        "        weights_TK = weights(biased_TE, decision.experts_TK, self.record)\n",
    ),
    Plant(
        "b23",
        "the aux loss reads a softmax of the softmax",
        PARITY + "test_b23_aux_loss_is_that_of_transformers_in_one_layer_over_k",
        "moe/scoring.py",
        'return scores_TE if record.order == "score_first" else logits_TE.softmax(1)',
        "return scores_TE.softmax(1)",
    ),
)
