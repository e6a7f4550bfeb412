"""Planted bugs: what several ranks, or a file, must agree on."""

from tests.plants.plant import Plant

CHANGES = "tests/pure/test_planner_search.py::"
BUGS = "tests/gloo/test_proof_bugs.py::"
EXAMPLES = "tests/gloo/test_docs_examples.py::"
KEPT = "tests/cpu/test_moe_bias_kept.py::"
UNEVEN = "tests/cpu/test_kernels_uneven.py::"
EVERY_WEIGHT = BUGS + "test_every_weight_counts_once_in_the_norm"
LOSS_OVER = BUGS + "test_a_loss_over_a_shared_vocabulary_is_that_of_the_whole"

STAGES = "tests/pure/test_spec_stages.py::"

PLANTS = (
    Plant(
        "the last stage weighs nothing for head and loss",
        STAGES + "test_weights_are_the_counted_products",
        "spec/stages.py",
        "last=ahead + head",
        "last=ahead",
    ),
    Plant(
        "whether layers fit is asked without the weight of the last stage",
        STAGES + "test_the_lightest_split_is_exact",
        "mesh/loads.py",
        "return first <= most and load + last <= most",
        "return first <= most and load <= most",
    ),
    Plant(
        "a plan splits layers evenly where training weighs them",
        STAGES + "test_deepseek_v3_is_as_fast_as_by_hand",
        "planner/case.py",
        "return weighted_stages(self.decoder, *shape, mapping)",
        "return balanced_stages(*shape, *layer_counts(self.decoder), mapping)",
    ),
    Plant(
        "copies enter the norm as often as there are",
        EVERY_WEIGHT,
        "parallel/data/sharding.py",
        "for n, p in trained.items() if not self._copy_index(n)[0]]",
        "for n, p in trained.items()]",
    ),
    Plant(
        "experts are left out of the norm",
        EVERY_WEIGHT,
        "parallel/data/sharding.py",
        "for n, p in trained.items() if not self._copy_index(n)[0]]",
        'for n, p in trained.items() if not self._copy_index(n)[0] and ".experts." not in n]',
    ),
    Plant(
        "a sum over ranks is made in what it is given",
        BUGS + "test_a_collective_leaves_what_it_is_given",
        "comm/collectives.py",
        "return all_reduce_(x.clone(), group,",
        "return all_reduce_(x, group,",
    ),
    Plant(
        "a rank divides by its own rows where the micro-batch's are meant",
        BUGS + "test_ranks_with_different_numbers_of_rows_share_their_terms",
        "moe/balance.py",
        "total = (fraction_NE * probability_NE).sum() / observed.population",
        "total = (fraction_NE * probability_NE).sum() / len(probability_TE)",
    ),
    Plant(
        "the mean that terms from outside take is that of the rows here",
        EXAMPLES + "test_an_example_computes_in_a_layout_what_one_rank_does",
        "moe/balance.py",
        "(total / self.population)",
        "self.valid(values_T).mean()",
    ),
    Plant(
        "the bias is no part of a checkpoint",
        KEPT + "test_a_checkpoint_holds_the_bias",
        "moe/router.py",
        'self.register_buffer("selection_bias", bias_E)',
        'self.register_buffer("selection_bias", bias_E, persistent=False)',
    ),
    Plant(
        "the bias is written in the weights' type",
        KEPT + "test_a_folder_holds_the_bias",
        "convert/exporter.py",
        'exact="selection_bias"',
        'exact="no such name"',
    ),
    Plant(
        "the bias of a frozen router drifts",
        KEPT + "test_a_frozen_router_keeps_its_bias",
        "moe/balance.py",
        "        if router.weight.requires_grad:\n",
        "        if router.weight is not None:\n",
    ),
    Plant(
        "sums of earlier passes are summed over ranks again",
        BUGS + "test_each_pass_is_summed_over_ranks_once",
        "parallel/data/bucket.py",
        "self.summed_L = part_L if self.summed_L is None else self.summed_L.add_(part_L)\n"
        "        self.free_gradients()\n",
        "self.summed_L = part_L if self.summed_L is None else self.summed_L.add_(part_L)\n",
    ),
    Plant(
        "experts end at a multiple of eight rows",
        UNEVEN + "test_offsets_end_where_rows_end",
        "moe/dispatch/routing_plan.py",
        "    return Permutation(token_R, copy_R, row_TK.view(tokens, entries), offs_B)\n",
        "    offs_B = (offs_B + 7) // 8 * 8\n"
        "    return Permutation(token_R, copy_R, row_TK.view(tokens, entries), offs_B)\n",
    ),
    Plant(
        "widths that do not fit are handed on",
        UNEVEN + "test_widths_that_do_not_fit_are_refused_in_words",
        "kernels/grouped/grouped.py",
        "all(dim * dtype.itemsize % 16 == 0 for dim in dims)",
        "all(dim * dtype.itemsize >= 16 for dim in dims)",
    ),
    Plant(
        "rows past a multiple of eight are left out of weight gradients",
        UNEVEN + "test_fewer_rows_than_any_multiple_are_multiplied_exactly",
        "kernels/grouped/grouped.py",
        "F.grouped_mm(dy_RO.t(), x_RI, offs=offs_E)",
        "F.grouped_mm(dy_RO.t(), x_RI, offs=offs_E // 8 * 8)",
    ),
    Plant(
        "rows past a step are left out of weight gradients",
        UNEVEN + "test_products_in_steps_of_rows_reach_no_other_row",
        "kernels/linear/product.py",
        "        dy_TO, x_TI = (F.pad(rows[-rest:], padding) for rows in (dy_TO, x_TI))\n",
        "        return into_OI\n",
    ),
    Plant(
        "the last expert's step takes other rows",
        UNEVEN + "test_products_in_steps_of_rows_reach_no_other_row",
        "kernels/grouped/loop.py",
        "[start - first : end - first]",
        "[: end - start]",
    ),
    Plant(
        "every rank draws its experts from the first",
        BUGS + "test_weights_start_alike_in_every_layout",
        "model/init.py",
        "(end - start, *inner), std, start * math.prod(inner))",
        "(end - start, *inner), std)",
    ),
    Plant(
        "values hang on the size of a rank's piece",
        BUGS + "test_weights_start_alike_in_every_layout",
        "model/init.py",
        "rows = draw_normal(seed, piece.name",
        "count = (end - start) * math.prod(inner)\n    rows = draw_normal(seed + count, piece.name",
    ),
    Plant(
        "shares of the normaliser count more than once",
        LOSS_OVER,
        "layers/loss.py",
        "normaliser_RC.logsumexp(0)",
        "(normaliser_RC.logsumexp(0) + 1)",
    ),
    Plant(
        "a label of another share has a gradient here",
        LOSS_OVER,
        "kernels/cross_entropy/chunked.py",
        "weight_c[:, None].neg().mul_(local_C1[rows])",
        "weight_c[:, None].neg()",
    ),
    Plant(
        "CUDA graphs are suggested whatever they cannot capture",
        CHANGES + "test_graphs_are_a_change_where_a_run_file_may_ask_for_them",
        "planner/search_change.py",
        "return all(v.path not in",
        "return True or all(v.path not in",
    ),
    Plant(
        "a run file leaves out the ZeRO stage that a search chose",
        "tests/pure/test_planner_layouts.py::"
        "test_a_made_layout_is_the_one_that_its_run_file_states",
        "planner/plan.py",
        'always = ["sizes", "zero"]',
        'always = ["sizes"]',
    ),
    Plant(
        "what leaves for a disk is sent to the host",
        "tests/pure/test_planner_recompute.py::test_what_leaves_is_settled_too",
        "planner/recompute.py",
        "    if folder is None:\n",
        "    if True:\n",
    ),
    Plant(
        "the first rank tells the others a record, which is no plain data",
        "tests/gloo/test_planner_state.py::test_ranks_agree_on_what_auto_recomputes",
        "training/memory.py",
        "lambda: to_dict(resolve_layout(run, cluster_of(world)))",
        "lambda: resolve_layout(run, cluster_of(world))",
    ),
    Plant(
        "experts are captured though the layout leaves them out",
        "tests/cpu/test_planner_graphs.py::test_what_graphs_hold_is_planned",
        "parallel/pipeline/partial.py",
        "isinstance(layout.dispatch, FixedShape) and layout.graph_experts",
        "isinstance(layout.dispatch, FixedShape)",
    ),
)
