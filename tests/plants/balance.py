"""Planted bugs: balance terms, what is counted, when biases move."""

from tests.plants.plant import Plant

BALANCE = "tests/cpu/test_moe_balance.py::"
STEP = "tests/cpu/test_training_step.py::"
MODEL = "tests/cpu/test_model.py::"
HUB = "tests/pure/test_families_hub.py::"
LOOP = "tests/cpu/test_training_loop.py::"

PLANTS = (
    Plant(
        "the global-batch load is divided by one micro-batch's tokens",
        BALANCE + "test_repeating_a_micro_batch_changes_no_gradient",
        "moe/balance.py",
        "tokens_N1 = (counts_NE.sum(1, keepdim=True) // top_k).clamp(min=1)",
        "tokens_N1 = observed.valid(observed.logits_TE).shape[0]",
    ),
    Plant(
        "each micro-batch adds its terms whole",
        STEP + "test_a_step_of_equal_micro_batches_is_that_of_one",
        "parallel/pipeline/passes.py",
        "torch.ones_like(weighted) * self._fraction",
        "torch.ones_like(weighted)",
    ),
    Plant(
        "micro-batches weigh the same whatever they hold",
        STEP + "test_micro_batches_weigh_by_their_valid_rows",
        "training/step.py",
        "Factors(scale_L, rows / float_counts[-1])",
        "Factors(scale_L, torch.ones_like(rows) / len(batches))",
    ),
    Plant(
        "the probabilities are detached",
        BALANCE + "test_a_term_reaches_the_router_in_proportion_to_its_coefficient",
        "moe/balance.py",
        "probability_TE = observed.valid(observed.probability_TE)",
        "probability_TE = observed.valid(observed.probability_TE).detach()",
    ),
    Plant(
        "training's backward leaves the terms out",
        STEP + "test_what_the_terms_add_doubles_with_their_coefficients",
        "parallel/pipeline/passes.py",
        "            subgraph.seeds = self._seeds(dict(zip(term_layers, terms, strict=True)))\n",
        "            self._seeds(dict(zip(term_layers, terms, strict=True)))\n"
        "            subgraph.seeds = (None,) * len(terms)\n",
    ),
    Plant(
        "the coefficients are not used",
        STEP + "test_what_the_terms_add_doubles_with_their_coefficients",
        "model/decoder.py",
        "weighted = value * coefficient",
        "weighted = value * (coefficient > 0)",
    ),
    Plant(
        "the model's reported loss holds the terms",
        MODEL + "test_the_reported_loss_holds_no_router_term",
        "model/decoder.py",
        "        lm_loss = self._mean_loss(normed_TD, rows)\n",
        "        lm_loss = self._mean_loss(normed_TD, rows)\n"
        "        lm_loss = lm_loss if weighted is None else lm_loss + weighted\n",
    ),
    Plant(
        "the step's reported loss holds the terms",
        STEP + "test_a_step_reports_loss_and_terms_apart",
        "parallel/pipeline/executor.py",
        "self._result.losses.append(chunk_pass.summed_loss)",
        "self._result.losses.append(chunk_pass.summed_loss"
        " + sum(v.sum() for _, v in chunk_pass.terms))",
    ),
    Plant(
        "a coefficient of zero still makes a term",
        BALANCE + "test_a_coefficient_of_zero_is_a_term_that_is_not_there",
        "moe/balance.py",
        "tuple(term for term in terms if term.coefficient > 0)",
        "tuple(terms)",
    ),
    Plant(
        "terms run in evaluation too",
        BALANCE + "test_a_coefficient_of_zero_is_a_term_that_is_not_there",
        "moe/balance.py",
        "            return routed.decision, {}\n        observed",
        "            pass\n        observed",
    ),
    Plant(
        "a folder without the field trains without the term",
        HUB + "test_a_missing_coefficient_is_the_documented_default_and_said",
        "model/families/fields.py",
        'coefficient = config.get("router_aux_loss_coef", float, self.default)',
        'coefficient = config.get("router_aux_loss_coef", float, 0.0)',
    ),
    Plant(
        "the default is taken without a word",
        HUB + "test_deepseek_says_its_balance_too",
        "model/families/fields.py",
        'if not config.is_set("aux_loss_alpha"):',
        'if config.is_null("aux_loss_alpha"):',
    ),
    Plant(
        "the term pools the layers it has seen",
        BALANCE + "test_layers_that_collapse_differently_do_not_cancel",
        "moe/balance.py",
        "        probability_NE = sum_rows(probability_TE, segment_T, counts_NE.shape[0])\n",
        "        probability_NE = sum_rows(probability_TE, segment_T, counts_NE.shape[0])\n"
        "        seen = AuxLoss.__dict__.get('seen', ()) + ((counts_NE, probability_NE),)\n"
        "        counts_NE, probability_NE = (sum(part) for part in zip(*seen))\n"
        "        probability_NE, AuxLoss.seen = probability_NE / len(seen), seen\n",
    ),
    Plant(
        "all layers share one set of counters",
        STEP + "test_layers_that_collapse_onto_different_experts_do_not_cancel",
        "moe/balance.py",
        "        self.counters = Counters(record.router.choices, bool(self._target_updates))\n",
        "        Balance.one = Balance.__dict__.get('one') or Counters(record.router.choices)\n"
        "        self.counters = Balance.one\n",
    ),
    Plant(
        "all layers replay the first one's decision",
        STEP + "test_layers_that_collapse_onto_different_experts_do_not_cancel",
        "moe/layer.py",
        'self._key = f"layers.{layer}"',
        'self._key = "layers"',
    ),
    Plant(
        "the load is counted after drops",
        BALANCE + "test_the_load_is_counted_before_drops_bias_and_groups",
        "moe/router.py",
        "            decision = replace(decision, kept_TK=self._drop("
        "decision, weights_TK, flow))\n",
        "            decision = replace(decision, kept_TK=self._drop("
        "decision, weights_TK, flow))\n"
        "            left_TK = torch.where(\n"
        "                decision.kept_TK, decision.experts_TK, self.record.experts\n"
        "            )\n"
        "            decision = replace(decision, plain_TK=left_TK)\n",
    ),
    Plant(
        "the load is counted after bias and groups",
        BALANCE + "test_the_load_is_counted_before_drops_bias_and_groups",
        "moe/balance.py",
        "plain_TK = select(routed.scores_TE, top_k, valid_T=flow.valid_T)",
        "plain_TK = decision.experts_TK",
    ),
    Plant(
        "a pack is one sequence",
        BALANCE + "test_sequences_of_a_pack_are_told_apart",
        "moe/balance.py",
        'segment_T = observed.segment_T if self.over == "sequence" else None',
        "segment_T = None",
    ),
    Plant(
        "every run of a layer counts",
        MODEL + "test_recompute_counts_tokens_once",
        "moe/balance.py",
        "        if observed.decision.counts is None:\n",
        "        if observed.decision is not None:\n",
    ),
    Plant(
        "the decision that is kept does not say that it was counted",
        BALANCE + "test_a_rerun_counts_nothing",
        "moe/balance.py",
        "return observed.decision, {term.name",
        "return routed.decision, {term.name",
    ),
    Plant(
        "the bias moves after every micro-batch",
        LOOP + "test_the_bias_moves_once_a_step_whatever_runs_in_between",
        "parallel/pipeline/executor.py",
        "                self._result.losses.append(chunk_pass.summed_loss)\n",
        "                self._result.losses.append(chunk_pass.summed_loss)\n"
        "                for _, mixture in self._parts.model.moe_layers():\n"
        "                    mixture.balance.finish_step(mixture.router)\n",
    ),
    Plant(
        "a layer without an update ends the round of updates",
        STEP + "test_every_layer_moves_its_bias_once_a_step",
        "parallel/data/sharding.py",
        "            mixture.balance.finish_step(mixture.router)\n",
        "            if not mixture.balance.updates:\n                break\n"
        "            mixture.balance.finish_step(mixture.router)\n",
    ),
    Plant(
        "evaluation counts",
        LOOP + "test_the_bias_moves_once_a_step_whatever_runs_in_between",
        "training/evaluate.py",
        "training=False, exact=exact",
        "exact=exact",
    ),
    Plant(
        "a layer counts whether it trains or not",
        BALANCE + "test_an_evaluation_alone_moves_nothing",
        "moe/balance.py",
        "            return routed.decision, {}\n        observed",
        "            seen = Observed(routed, flow.rows, self.record)\n"
        "            return self._count(routed, seen, flow), {}\n        observed",
    ),
    Plant(
        "counts of the last step stay",
        BALANCE + "test_one_update_per_step_from_the_whole_batch",
        "moe/balance.py",
        "            buffer.zero_()\n",
        "            buffer.mul_(1)\n",
    ),
)
