"""Planted bugs: padding, poison, replayed decisions, number formats, weights."""

from tests.plants.plant import Plant

ROUTER = "tests/cpu/test_moe_router.py::"
BALANCE = "tests/cpu/test_moe_balance.py::"
MODEL = "tests/cpu/test_model.py::"
PARITY = "tests/cpu/test_families_parity.py::"
PADDING_ROWS = ROUTER + "test_padding_rows_are_not_routed"
PADDING_ROWS_CHANGE = MODEL + "test_padding_rows_change_nothing"
PADDING_CHANGES = BALANCE + "test_padding_changes_no_bit_of_terms_gradients_and_counters"
STANDS_PADDING = MODEL + "test_what_stands_in_padding_rows_leaks_nowhere"
LOGITS_CHOICES = PARITY + "test_logits_choices_weights_and_gradients_equal_transformers"

ROWS_LATENT = (
    "tests/cpu/test_moe_routers.py::"
    "test_rows_of_a_latent_mixture_are_narrow_between_two_projections"
)
HEADS_BEYOND = "tests/cpu/test_optim_qk_clip.py::test_heads_beyond_the_bound_are_scaled_to_it"
LOW_RANK = "tests/cpu/test_layers_ffn.py::test_a_low_rank_and_blocks_are_those_matrices"
ROUTING = "tests/cpu/test_training_routing.py::test_"
ROUTERS = "tests/cpu/test_moe_routers.py::"

PLANTS = (
    Plant(
        "weights of experts that were chosen by logits are logits",
        ROUTER + "test_every_setting_equals_a_plain_loop",
        "moe/scoring.py",
        "        weights_TK = score(weights_TK, record)\n",
        "        weights_TK = weights_TK + 0\n",
    ),
    Plant(
        "padding rows choose experts",
        PADDING_ROWS,
        "moe/router.py",
        "            valid_T=context.valid_T,\n",
        "",
    ),
    Plant(
        "padding rows are sent to experts",
        PADDING_ROWS_CHANGE,
        "moe/topk.py",
        "    return torch.where(valid_T[:, None], experts_TK, scores_TE.shape[1])\n",
        "    return experts_TK\n",
    ),
    Plant(
        "padding rows make capacity larger",
        PADDING_ROWS_CHANGE,
        "moe/router.py",
        "limit = self.capacity.max_copies(flow.rows.population, top_k, experts)",
        "limit = self.capacity.max_copies(flow.rows.rows, top_k, experts)",
    ),
    Plant(
        "padding rows are tokens in the counters",
        PADDING_CHANGES,
        "moe/balance.py",
        "self.tokens.add_(rows.n_valid)",
        "self.tokens.add_(rows.rows)",
    ),
    Plant(
        "padding rows are tokens in the terms",
        PADDING_CHANGES,
        "moe/balance.py",
        "total = (fraction_NE * probability_NE).sum() / observed.population",
        "total = (fraction_NE * probability_NE).sum() / len(observed.logits_TE)",
    ),
    Plant(
        "padding rows enter the mean probability",
        PADDING_CHANGES,
        "moe/balance.py",
        "self.probability_E.add_(observed.valid(observed.probability_TE).sum(0))",
        "self.probability_E.add_(observed.probability_TE.sum(0))",
    ),
    Plant(
        "rows are masked by multiplication in weight gradients",
        STANDS_PADDING,
        "kernels/linear/product.py",
        "dy = dy_TO[:n_valid]\n                x = transform(x_TI.to(dy_TO.dtype))[:n_valid]\n",
        "kept_T1 = (torch.arange(len(x_TI)) < (n_valid or len(x_TI)))[:, None]\n"
        "                x, dy = x_TI * kept_T1, dy_TO * kept_T1\n"
        "                x = x.to(dy_TO.dtype)\n",
    ),
    Plant(
        "logits are masked by multiplication",
        ROUTER + "test_poison_in_padding_rows_stays_there",
        "moe/router.py",
        "return torch.where(flow.valid_T[:, None], logits_TE, 0)",
        "return logits_TE * flow.valid_T[:, None]",
    ),
    Plant(
        "rows without a label are masked by multiplication in the loss",
        STANDS_PADDING,
        "kernels/cross_entropy/chunked.py",
        "    x_TD = torch.where(labelled_T[:, None], x_TD, 0)\n",
        "    x_TD = x_TD * labelled_T[:, None]\n",
    ),
    Plant(
        "padding rows enter the gradient of a norm",
        STANDS_PADDING,
        "kernels/norm/rms.py",
        "valid_rows = ctx.n_valid * x.shape[1:-1].numel()",
        "valid_rows = x_ND.shape[0]",
    ),
    Plant(
        "padding rows enter the gradient of a dense feed-forward",
        STANDS_PADDING,
        "kernels/swiglu/ffn.py",
        "weight_gradient(dy[:n_valid], x[:n_valid], into)",
        "weight_gradient(dy, x, into)",
    ),
    Plant(
        "padding rows enter the gradient of the embedding",
        STANDS_PADDING,
        "layers/linear.py",
        "ids = ids_T[:n_valid]\n            rows = dx_TD[:n_valid].to(table.dtype)",
        "ids = ids_T\n            rows = dx_TD.to(table.dtype)",
    ),
    Plant(
        "each run of the layer decides anew",
        MODEL + "test_recompute_never_routes_again",
        "moe/layer.py",
        "routed = self.router(rows.x_TD, flow, flow.decisions.lookup(self._key))",
        "routed = self.router(rows.x_TD, flow)",
    ),
    Plant(
        "the router does not heed the decision it is given",
        BALANCE + "test_a_rerun_counts_the_same_choices_for_the_terms",
        "moe/router.py",
        "        decision = decision or self._decide",
        "        decision = self._decide",
    ),
    Plant(
        "the kept counts of the step so far go on counting",
        BALANCE + "test_the_step_so_far_is_the_one_of_the_first_run",
        "moe/balance.py",
        "cumulative_E = self.plain_E + up_to_rank_E",
        "cumulative_E = self.plain_E",
    ),
    Plant(
        "buffers follow a cast of the model",
        ROUTER + "test_the_bias_stays_float32_whatever_the_model_is_cast_to",
        "moe/router.py",
        "if old is not None and new is not None and new.dtype != old.dtype:",
        "if old is None and new is not None:",
    ),
    Plant(
        "buffers come back from the cast without their digits",
        MODEL + "test_casting_the_model_spares_biases_and_counts",
        "moe/router.py",
        "self._buffers[name] = old.to(new.device)",
        "self._buffers[name] = new.to(old.dtype)",
    ),
    Plant(
        "counts are plain buffers",
        BALANCE + "test_counts_that_differ_by_one_move_the_bias_apart",
        "moe/balance.py",
        "class Counters(ExactBuffers):",
        "class Counters(nn.Module):",
    ),
    Plant(
        "one expert with a renormalised weight is allowed",
        MODEL + "test_a_router_that_could_not_learn_is_refused",
        "moe/config.py",
        "elif self.top_k == 1 and self.renormalise:",
        "elif self.top_k == 0 and self.renormalise:",
    ),
    Plant(
        "one expert with a softmax over the chosen is allowed",
        ROUTER + "test_one_expert_per_token_still_teaches_the_router",
        "moe/config.py",
        "if self.softmax_over_chosen and self.top_k == 1:",
        "if self.softmax_over_chosen and self.top_k == 0:",
    ),
    Plant(
        "a lone weight is renormalised whatever was asked",
        MODEL + "test_a_router_that_could_not_learn_is_refused",
        "moe/scoring.py",
        "    if record.renormalise and not record.softmax_over_chosen:\n",
        "    if record.renormalise or record.top_k == 1:\n",
    ),
    Plant(
        "the scaling factor is not applied",
        LOGITS_CHOICES,
        "moe/scoring.py",
        "return weights_TK if record.scale == 1.0 else weights_TK * record.scale",
        "return weights_TK",
    ),
    Plant(
        "weights are renormalised whatever the folder says",
        LOGITS_CHOICES,
        "model/families/base.py",
        "own = {name: getattr(self, name) for name in self.router_fields}",
        "own = {n: getattr(self, n) or n == 'renormalise' for n in self.router_fields}",
    ),
    Plant(
        "a group's score is its best expert's",
        LOGITS_CHOICES,
        "moe/topk.py",
        'if groups.score == "max":',
        'if groups.score != "none":',
    ),
    Plant(
        "the last dims of a head turn in place of the first",
        LOGITS_CHOICES,
        "layers/attention.py",
        "first, rest = x_THd.split((rotary, dims - rotary), 2)",
        "rest, first = x_THd.split((dims - rotary, rotary), 2)",
    ),
    Plant(
        "each tensor rank adds the output's bias",
        "tests/gloo/test_proof_verify.py::"
        "test_blocks_and_what_crosses_layers_compute_over_ranks_what_one_rank_does",
        "layers/attention.py",
        "self.o.add_bias(flow.scatter(self.o.product(out_TO, whole)), flow)",
        "flow.scatter(self.o(out_TO, whole))",
    ),
    Plant(
        "the least sum is added where it bounds",
        LOGITS_CHOICES,
        "moe/scoring.py",
        "total_T1.clamp(min=record.floor) if record.floor",
        "total_T1 + record.floor if record.floor",
    ),
    Plant(
        "full layers turn where they have no positions",
        LOGITS_CHOICES,
        "model/families/sizes.py",
        "rope = rope if self.window is None or self.has_rope(layer) else None",
        "rope = rope if True else None",
    ),
    Plant(
        "heads are normed before they turn whatever was asked",
        LOGITS_CHOICES,
        "layers/attention.py",
        "if rope is None or self.record.norm_after_rope:",
        "if rope is None:",
    ),
    Plant(
        "a half of a block is added without its factor",
        LOGITS_CHOICES,
        "moe/layer.py",
        "added_TD = scaled(out_TD, self.residual_scale)",
        "added_TD = out_TD",
    ),
    Plant(
        "a window shows one row more",
        LOGITS_CHOICES,
        "model/families/sizes.py",
        "window=self.window, sinks=False",
        "window=self.window + 1, sinks=False",
    ),
    Plant(
        "the groups of the folder are not read",
        LOGITS_CHOICES,
        "model/families/fields.py",
        'return {"groups": Groups(count=count, keep=keep) if count > 1 else None}',
        'return {"groups": None}',
    ),
    Plant(
        "the selection bias moves weights too",
        LOGITS_CHOICES,
        "moe/router.py",
        "        weights_TK = weights(scores_TE, decision.experts_TK, self.record)\n",
        "        biased_TE = scores_TE if self.selection_bias is None else scores_TE.add(\n"
        "            self.selection_bias\n"
        "        )\n"
        "        weights_TK = weights(biased_TE, decision.experts_TK, self.record)\n",
    ),
    Plant(
        "the aux loss reads a softmax of the softmax",
        PARITY + "test_aux_loss_is_that_of_transformers_in_one_layer_over_k",
        "moe/scoring.py",
        '    if record.score == "softmax":\n        return scores_TE\n',
        '    if record.score == "softmax":\n        return scores_TE.softmax(1)\n',
    ),
    Plant(
        "what is dropped by chance is the same in each step",
        ROUTERS + "test_any_token_is_dropped_the_same_ones_in_a_second_run",
        "moe/draws.py",
        "range(columns), key, flow.precision_policy.step)",
        "range(columns), key, 0)",
    ),
    Plant(
        "layers drop the same tokens",
        ROUTERS + "test_any_token_is_dropped_the_same_ones_in_a_second_run",
        "moe/draws.py",
        "& MASK, layer\n",
        "& MASK, 0\n",
    ),
    Plant(
        "the gradient of what the router reads leaves its factors out",
        ROUTERS + "test_jitter_is_of_the_step_and_the_row_and_of_training_alone",
        "kernels/linear/product.py",
        "dx = ctx.transform(dy_TO @ value_OI).to",
        "dx = (dy_TO @ value_OI).to",
    ),
    Plant(
        "rows are drawn for by their place on the rank",
        "tests/gloo/test_moe_routers.py::test_routers_are_the_same_on_ranks",
        "moe/draws.py",
        "chance(flow.row_id_T, range(columns)",
        "chance(flow.row_id_T - flow.row_id_T[0], range(columns)",
    ),
    Plant(
        "each rank scales by how its own tokens want experts",
        "tests/gloo/test_moe_routers.py::test_routers_are_the_same_on_ranks",
        "moe/routers.py",
        "context.sum(context.valid(scores_TE).sum(0))",
        "context.valid(scores_TE).sum(0)",
    ),
    Plant(
        "experts take a share of the rank's tokens",
        "tests/gloo/test_moe_routers.py::test_routers_are_the_same_on_ranks",
        "moe/routers.py",
        "max_copies(rows.population, record.top_k",
        "max_copies(rows.n_valid, record.top_k",
    ),
    Plant(
        "what a token is not chosen by has a weight",
        ROUTERS + "test_experts_choose_their_tokens",
        "moe/router.py",
        " or flow.valid_T is not None or self.record.partial:",
        " or (flow.valid_T is not None and not self.record.partial):",
    ),
    Plant(
        "quantiles are of scores, whatever others a token likes",
        ROUTERS + "test_quantiles_give_each_expert_its_share",
        "moe/balance.py",
        "scores_TE - next_T1, -torch.inf",
        "scores_TE, -torch.inf",
    ),
    Plant(
        "an identity gives the row unweighed",
        ROUTERS + "test_idle_experts_add_what_they_are",
        "moe/idle.py",
        "torch.where(kept_TK, weights_TK, 0).sum",
        "kept_TK.to(weights_TK.dtype).sum",
    ),
    Plant(
        "routed experts have their whole share beside the gated one",
        ROWS_LATENT,
        "moe/layer.py",
        "(1 - gate_T1)",
        "(1 - 0 * gate_T1)",
    ),
    Plant(
        "queries take their part of the factor, though other heads share their key",
        HEADS_BEYOND,
        "parallel/data/qk_clip.py",
        "(shrink_H.view(groups, -1) / key_G[:, None]).flatten()",
        "shrink_H**alpha",
    ),
    Plant(
        "what is compared with a shared key has a part of the factor alone",
        HEADS_BEYOND,
        "parallel/data/qk_clip.py",
        '"alone": shrink_H}',
        '"alone": query_H}',
    ),
    Plant(
        "values are scaled with the keys that lie beside them",
        HEADS_BEYOND,
        "layers/kinds/mla.py",
        "(self.v_dim, None)",
        '(self.v_dim, "key")',
    ),
    Plant(
        "heads are told apart by name alone, and made orthogonal together",
        "tests/cpu/test_optim_muon.py::test_heads_are_matrices_of_their_own",
        "optim/config.py",
        "return (heads, shape[0] // heads, shape[1])",
        "return (1, shape[0], shape[1])",
    ),
    Plant(
        "blocks of a feed-forward learn what others should",
        LOW_RANK,
        "kernels/swiglu/ffn.py",
        "return torch.stack(gradients) if into is None else into",
        "return torch.stack(gradients[::-1]) if into is None else into",
    ),
    Plant(
        "weights of blocks learn from padding",
        LOW_RANK,
        "kernels/swiglu/ffn.py",
        "zip(*(rows[:, :n_valid] for rows in pair), each_into, strict=True)",
        "zip(*pair, each_into, strict=True)",
    ),
    Plant(
        "a pass forgets the decisions that it was given",
        ROUTING + "choices_are_those_of_their_tokens",
        "layers/flow.py",
        "self.decisions.for_chunk()",
        "RoutingDecisions()",
    ),
    Plant(
        "each micro-batch replays the choices of the first",
        ROUTING + "choices_are_those_of_their_tokens",
        "training/routing.py",
        "self._chosen[key][token_range]",
        "self._chosen[key][: token_range.stop - token_range.start]",
    ),
    Plant(
        "choices stay in the order of the file",
        ROUTING + "choices_are_those_of_their_tokens",
        "training/routing.py",
        "chosen_NK[row_L] = chosen_MK[local_M]",
        "chosen_NK[: len(row_L)] = chosen_MK[local_M]",
    ),
    Plant(
        "what was dropped is sent when it is replayed",
        ROUTING + "a_replay_is_the_run_itself",
        "training/routing.py",
        "kept_NK = chosen_NK >= 0\n",
        "kept_NK = chosen_NK == chosen_NK\n",
    ),
    Plant(
        "ids of tokens are not compared",
        ROUTING + "what_was_recorded_of_another_run_is_refused",
        "training/routing.py",
        "id_M[local_M] != id_N[row_L]",
        "id_M[local_M] != id_M[local_M]",
    ),
    Plant(
        "the last token of a generated text has no recorded choice",
        "tests/cpu/test_training_routing.py::test_a_step_replays_the_experts_of_generated_texts",
        "training/routing_generation.py",
        "            next_logits(self._parts, missing, record=self.begin)\n",
        "            pass\n",
    ),
    Plant(
        "choices of a cached pass are taken for those of a text's first tokens",
        "tests/cpu/test_training_routing.py::test_a_step_replays_the_experts_of_generated_texts",
        "training/routing_generation.py",
        "path[len(path) - length :]",
        "path[:length]",
    ),
)
