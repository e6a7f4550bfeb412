"""Planted bugs: rows on their way to other ranks."""

from tests.plants.plant import Plant

STEPS = "tests/gloo/test_moe_dispatch_layouts.py::"
EDGES = "tests/gloo/test_moe_dispatch_edges.py::"
BYTES = "tests/gloo/test_moe_dispatch_bytes.py::"
ROUNDS = "tests/gloo/test_moe_rounds.py::"
VALUES = "tests/cpu/test_no_values.py::"
BOUNDED = "tests/gloo/test_moe_bounded.py::test_rooms_that_are_stated_are_enough"
PLANS = "tests/cpu/test_moe_clones.py::"
CLONES = "tests/gloo/test_moe_clones.py::test_gradients_with_clones_are_those_of_one_rank"
ROOM = EDGES + "test_a_step_without_room_is_made_again_as_the_exact_one"
GRADIENTS = STEPS + "test_gradients_are_those_of_one_rank"

PLANTS = (
    Plant(
        "experts' gradients are summed over all ranks that have other tokens",
        GRADIENTS,
        "layers/placement.py",
        'return "edp" if self.is_expert else "dp_cp"',
        'return "dp_cp"',
    ),
    Plant(
        "rows are sent and results brought back, and gradients stay where they are",
        GRADIENTS,
        "moe/dispatch/routing_plan.py",
        "        return gather_rows(x_ND, etp, self.slices, codec)",
        "        x_ND = x_ND * len(self.send) - x_ND.detach() * (len(self.send) - 1)\n"
        "        return gather_rows(x_ND, etp, self.slices, codec)",
    ),
    Plant(
        "stale counts: rows go by the counts of the first exchange",
        GRADIENTS,
        "moe/dispatch/routing_plan.py",
        "        return counts.tolist\n",
        '        return vars(host_counts).setdefault("read", counts.tolist)\n',
    ),
    Plant(
        "slices of an expert see their own rows alone",
        GRADIENTS,
        "moe/dispatch/routing_plan.py",
        "y_ND = scatter_rows(y_RD, etp, self.slices, codec)",
        "y_ND = y_RD.split(self.slices)[etp.index]",
    ),
    Plant(
        "no row, nothing to pick from",
        EDGES + "test_a_rank_and_an_expert_without_rows",
        "kernels/permute/gather.py",
        "    if values_NX.shape[0] == 0:\n",
        "    if values_NX.ndim == 0:\n",
    ),
    Plant(
        "room that nothing fills goes to the last expert",
        EDGES + "test_rows_past_the_last_are_read_nowhere",
        "moe/dispatch/padded.py",
        "        slots_R = torch.searchsorted(ends_Xe, place_XM, right=True).flatten()\n",
        "        slots_XM = torch.searchsorted(ends_Xe, place_XM, right=True)\n"
        "        slots_R = slots_XM.flatten().clamp(max=ends_Xe.shape[1] - 1)\n",
    ),
    Plant(
        "the ranks that lacked room alone make the step again",
        ROOM,
        "training/figures.py",
        "missing if has_overflow else None",
        "missing if missing is not None and missing > 0 else None",
    ),
    Plant(
        "the second try goes on with the first one's counters",
        ROOM,
        "training/step.py",
        "    model.start_step()\n",
        "    if not exact:\n        model.start_step()\n",
    ),
    Plant(
        "a round takes no notice of what other ranks send",
        ROUNDS + "test_no_rank_has_more_rows_than_its_room_whatever_is_routed",
        "moe/rounds.py",
        'before_P = counts_XP[: world.group("tp_ep").index].sum(0) - starts_P',
        "before_P = -starts_P",
    ),
    Plant(
        "the rows of every round are kept for backward",
        ROUNDS + "test_no_rank_has_more_rows_than_its_room_whatever_is_routed",
        "moe/rounds.py",
        "            part_TD = checkpoint(\n"
        "                step, *tokens[:2], number, use_reentrant=False, preserve_rng_state=False\n"
        "            )\n",
        "            part_TD = step(*tokens[:2], number)\n",
    ),
    Plant(
        "products of all rounds wait with their rows",
        ROUNDS + "test_products_of_rounds_leave_no_rows_waiting",
        "kernels/gradients.py",
        "        self._queue.deliver(weight, precomputed(self._sums[weight]))\n",
        "        self._queue.deliver(weight, product)\n",
    ),
    Plant(
        "what a layer lacked is forgotten by the next",
        BOUNDED,
        "moe/layer_dispatch.py",
        "            flow.overflow.append(sent.overflow)\n",
        "            flow.overflow[:] = [sent.overflow]\n",
    ),
    Plant(
        "the second hop takes copies for dealt in blocks",
        BOUNDED,
        "moe/dispatch/spread.py",
        "* ep.size + ep.index\n",
        "+ dealt * ep.index\n",
    ),
    Plant(
        "a step that is made again moves biases twice",
        "tests/gloo/test_moe_again.py::test_a_run_with_steps_made_again_ends_as_the_one_without",
        "training/step.py",
        "    needed = limits.sufficient_settings(parts, missing)\n",
        "    needed = limits.sufficient_settings(parts, missing)\n"
        "    for _, mixture in parts.model.moe_layers():\n"
        "        mixture.balance.finish_step(mixture.router)\n",
    ),
    Plant(
        "gradients of clones are added in another order",
        "tests/gloo/test_moe_clones.py::test_gradients_of_clones_are_added_in_the_order_of_ranks",
        "moe/clone_weights.py",
        "zip(expert_Ps.unbind(), received.chunk(ranks.size), strict=True):",
        "reversed([*zip(expert_Ps.unbind(), received.chunk(ranks.size), strict=True)]):",
    ),
    Plant(
        "clones have the weights of an earlier micro-batch's",
        CLONES,
        "moe/experts.py",
        "            values = append_clones([w.value for w in local], expert_Ps, ranks)\n",
        "            values = append_clones([w.value for w in local], expert_Ps, ranks)\n"
        '            values = self.__dict__.setdefault("_kept", values)\n',
    ),
    Plant(
        "a rank's own rows count twice",
        PLANS + "test_plans_keep_rows_and_slots",
        "moe/clones.py",
        "remaining_XE = (counts_PSE - own_PSE).flatten(0, 1)",
        "remaining_XE = counts_PSE.flatten(0, 1)",
    ),
    Plant(
        "slots that are taken count as free",
        PLANS + "test_plans_keep_rows_and_slots",
        "moe/clones.py",
        "    free_CP = record.slots - clone_CEP.sum(1)\n",
        "    free_CP = record.slots - 0 * clone_CEP.sum(1)\n",
    ),
    Plant(
        "the host counts a plan's rows",
        VALUES + "test_passes_run_without_values",
        "moe/clones.py",
        "    quota_EP = quotas(counts_XE.sum(0), ranks, record)\n",
        "    quota_EP = quotas(counts_XE.sum(0), ranks, record)\n"
        "    assert int(quota_EP.sum()) >= 0\n",
    ),
    Plant(
        "a read is said to be at a line of torch",
        VALUES + "test_each_read_is_named_with_its_line",
        "proof/capture.py",
        "    if path.startswith(libraries):\n",
        '    if path.startswith("<"):\n',
    ),
    Plant(
        "a clone's gradient is lost",
        CLONES,
        "moe/clone_weights.py",
        "precomputed(grad[:own] + clones)",
        "precomputed(grad[:own].clone())",
    ),
    Plant(
        "a clone's gradient is added twice",
        CLONES,
        "moe/clone_weights.py",
        "precomputed(grad[:own] + clones)",
        "precomputed(grad[:own] + 2 * clones)",
    ),
    Plant(
        "a clone is sent by its number at home",
        CLONES,
        "moe/clone_weights.py",
        "expert_Ps.flatten().clamp(max=pieces_EN.shape[0] - 1)",
        "expert_Ps.flatten() % values[0].shape[0]",
    ),
    Plant(
        "a plan is made again as its layer runs again",
        CLONES,
        "moe/layer_dispatch.py",
        "            if key not in flow.decisions:\n",
        "            if key:\n",
    ),
    Plant(
        "a micro-batch goes by the first one's plan",
        CLONES,
        "moe/layer_dispatch.py",
        "            plan: ClonePlan = flow.decisions[key]\n",
        '            plan = self.__dict__.setdefault("_first", flow.decisions[key])\n',
    ),
    Plant(
        "weights of clones are kept for backward",
        CLONES,
        "moe/experts.py",
        "        if not (saved.recomputing or saved.block):",
        "        if saved.recomputing or saved.block:",
    ),
    Plant(
        "a sum that was under way is added to the next step's",
        "tests/gloo/test_parallel_data_bugs.py::test_no_micro_batch_and_no_rank_is_added_twice",
        "parallel/data/bucket.py",
        "        self.wait_reduce()\n        self.summed_L = None\n",
        "        self.summed_L = None\n",
    ),
    Plant(
        "room is rounded down",
        "tests/pure/test_moe_dispatch_config.py::test_spread_has_room_for_every_routing",
        "moe/dispatch/config.py",
        "return -(-self.max_rows // ranks)",
        "return self.max_rows // ranks",
    ),
    Plant(
        "weights are sent without their history",
        EDGES + "test_the_router_is_fed_through_every_way",
        "moe/dispatch/alltoall.py",
        "order.entries(weights_TK, no_drop)",
        "order.entries(weights_TK.detach(), no_drop)",
    ),
    Plant(
        "weights that went to other ranks get no gradient",
        EDGES + "test_the_router_is_fed_through_every_way",
        "moe/dispatch/routing_plan.py",
        "torch.where(sent_NK, order.rows(tokens.weights_TK), 0)",
        "torch.where(sent_NK, tokens.weights_TK.detach()[order.token_R], 0)",
    ),
    Plant(
        "a rank that has nothing to send goes on without the others",
        BYTES + "test_ranks_talk_in_one_order",
        "moe/dispatch/allgather.py",
        "        counts_PSC = gather_counts(",
        "        if tokens.x_TD.shape[0] == 0:\n"
        "            return super().dispatch(*tokens)\n"
        "        counts_PSC = gather_counts(",
    ),
    Plant(
        "every rank is taken to have as many rows as this one",
        EDGES + "test_ranks_with_different_numbers_of_rows",
        "moe/dispatch/allgather.py",
        "        gathered = self.exchange_tokens(",
        "        rows = [tokens.x_TD.shape[0]] * ranks.size\n"
        "        gathered = self.exchange_tokens(",
    ),
)
