"""Plants in what is kept for backward: sent away twice or wrongly, or not back in time."""

from tests.plants.plant import Plant

ROOM = "tests/cpu/test_layers_offload.py::"
LEAVES_STAYS = ROOM + "test_what_leaves_and_what_stays_is_what_is_planned"
LAYERS_SENT = ROOM + "test_layers_are_sent_for_before_they_are_taken"
FETCHED_AHEAD = (
    "tests/gloo/test_planner_schedules.py::test_what_is_fetched_ahead_is_what_the_table_takes_next"
)
ROOMS = "tests/gloo/test_planner_schedules.py::test_so_it_is_where_room_is_stated"
LIVES = "tests/cpu/test_moe_pages.py::test_what_is_taken_is_what_was_put"
SPILLED = "tests/cpu/test_moe_pages.py::test_what_comes_back_from_the_host_is_what_was_put"
PAGED = "tests/gloo/test_moe_pages.py::test_values_are_those_of_rows_that_stay"

PLANTS = (
    Plant(
        "two views of one storage leave twice",
        LEAVES_STAYS,
        "layers/saved_tensors.py",
        "        self._saved.set(tensor, ref(stored))\n",
        "",
    ),
    Plant(
        "weights leave with the rows they are multiplied by",
        LEAVES_STAYS,
        "layers/linear.py",
        "        flow.saved_tensors.keep_on_device(*operand.tensors)\n",
        "",
    ),
    Plant(
        "what is made again holds its input on the device",
        LEAVES_STAYS,
        "layers/saved_tensors.py",
        "tuple(self.pack(t.detach()) for t in inputs)",
        "tuple(t.detach() for t in inputs)",
    ),
    Plant(
        "the layer before the loss leaves too",
        LEAVES_STAYS,
        "layers/config.py",
        "round(fraction * max(layers - computes_loss, 0))",
        "round(fraction * layers)",
    ),
    Plant(
        "an output that was changed in place is made again as it was before",
        "tests/cpu/test_model_edges.py::test_what_is_changed_in_place_is_kept_not_made_again",
        "layers/saved_tensors.py",
        "if region[2:] != self.region[2:]:",
        "if region[2:3] != self.region[2:3]:",
    ),
    Plant(
        "what was made again is let go before its last taker has had it",
        "tests/cpu/test_model_edges.py::test_what_is_made_again_is_made_once_for_all_its_takers",
        "layers/saved_tensors.py",
        "            output.recomputation.pending += 1\n",
        "            output.recomputation.pending = 1\n",
    ),
    Plant(
        "what runs again reads the weights of the next step",
        "tests/cpu/test_model_edges.py::"
        "test_what_runs_again_reads_the_weights_that_its_forward_read",
        "layers/precision.py",
        "if entry is None or entry[2].dtype != dtype or not _is_current(weight, *entry[:2]):",
        "old = not torch.is_grad_enabled() and entry and not _is_current(weight, *entry[:2])\n"
        "        if entry is None or entry[2].dtype != dtype or old:",
    ),
    Plant(
        "gathered weights come after what runs again has begun",
        "tests/gloo/test_parallel_data_bugs.py::"
        "test_units_whose_weights_are_gathered_run_again_with_them",
        "parallel/pipeline/passes.py",
        "self._backward_tasks.append([before, *backward, after])",
        "self._backward_tasks.append([*backward[:3], before, *backward[3:], after])",
    ),
    Plant(
        "padding rows count where a layer runs again",
        "tests/cpu/test_parallel_passes.py::test_padding_rows_of_what_runs_again_reach_no_gradient",
        "layers/flow.py",
        "return None if self.rows.n_valid == self.rows.rows else self.rows.n_valid",
        "all_ = self.saved_tensors.recomputing or self.rows.n_valid == self.rows.rows\n"
        "        return None if all_ else self.rows.n_valid",
    ),
    Plant(
        "experts are chosen again where a block runs again",
        "tests/gloo/test_parallel_pipeline_counts.py::"
        "test_what_is_made_again_is_made_once_and_nothing_else",
        "moe/layer.py",
        "flow, flow.decisions.lookup(self._key))",
        "flow, None)",
    ),
    Plant(
        "an action that makes gradients of weights alone exchanges",
        "tests/gloo/test_parallel_pipeline_counts.py::"
        "test_w_exchanges_nothing_and_computes_nothing_again",
        "parallel/pipeline/executor.py",
        "            in_flight.sink.drain()\n            return Chain((), ())\n",
        "            in_flight.sink.drain()\n"
        "            from moefold.comm.collectives import sum_\n"
        "            sum_(torch.ones(1), self._parts.world.tp)\n"
        "            return Chain((), ())\n",
    ),
    Plant(
        "what is taken next is not sent for",
        LAYERS_SENT,
        "layers/offload.py",
        "        layers.prefetch(layer)\n",
        "",
    ),
    Plant(
        "all layers are sent for at once",
        LAYERS_SENT,
        "layers/offload.py",
        "first - self._in_flight + (layer is None)",
        "0 * first",
    ),
    Plant(
        "a backward's first layers are sent for once it begins",
        "tests/gloo/test_layers_offload_ahead.py::"
        "test_of_twenty_takes_nineteen_find_their_block_there",
        "parallel/pipeline/executor.py",
        "                if not has_backward:\n",
        "                if has_backward and False:\n",
    ),
    Plant(
        "memory that activations pass to disk is used again before their copy ended",
        ROOM + "test_memory_that_copies_pass_is_not_used_again_before_they_ended",
        "layers/offload.py",
        "self._own = threading.local()",
        "self._own = type('_Shared', (), {})()",
    ),
    Plant(
        "what is fetched ahead is of the step after the next",
        FETCHED_AHEAD,
        "parallel/pipeline/executor.py",
        "self.plan.line[index : index + 1]",
        "self.plan.line[index + 1 : index + 2]",
    ),
    Plant(
        "a product that waits holds all that was computed before it",
        ROOMS,
        "kernels/linear/product.py",
        "x_TI = x_TI.detach()",
        "x_TI = x_TI",
    ),
    Plant(
        "of rows that are sent as they come one order is planned",
        "tests/gloo/test_planner_schedules.py::test_so_it_is_where_rows_are_sent_as_they_come",
        "moe/describe.py",
        "places += received",
        "pass",
    ),
    Plant(
        "rows of latents are planned where they are sent",
        ROOMS,
        "moe/describe.py",
        '            if dropped:\n                rows = Saved("latent.rows"',
        '            if True:\n                rows = Saved("latent.rows"',
    ),
    Plant(
        "a page is free before its rows were read",
        LIVES,
        "kernels/pages/ring.py",
        "self.allocated += torch.where(fits, needed, 0)",
        "self.allocated += torch.where(fits, (needed - 1).clamp(min=0), 0)",
    ),
    Plant(
        "the ring of free pages wraps over a live one",
        LIVES,
        "kernels/pages/ring.py",
        "fits = needed <= self.pages - (self.allocated - self.freed)",
        "fits = needed <= self.pages",
    ),
    Plant(
        "pages that were read stand in the ring in another order than they are given back",
        LIVES,
        "kernels/pages/ring.py",
        "entry_M = torch.where(valid_M, (self.freed + index_M) % self.pages, self.pages)",
        "entry_M = torch.where(valid_M, (self.allocated + index_M) % self.pages, self.pages)",
    ),
    Plant(
        "rows past the last are read and kept",
        "tests/triton/test_pages.py::test_only_rows_that_count_are_moved",
        "kernels/pages/fused.py",
        "valid = row < tl.load(count)\n",
        "valid = row < tl.load(count) + 1\n",
    ),
    Plant(
        "a page is free before its rows are on the host",
        SPILLED,
        "layers/stash.py",
        "            self.wait_fetched()\n            self._ring.free(self._page_M)\n",
        "            self._ring.free(self._page_M)\n",
    ),
    Plant(
        "rows are taken before they are back from the host",
        SPILLED,
        "layers/stash.py",
        "                self.prefetch()\n                self.wait_fetched()\n",
        "                self.prefetch()\n",
    ),
    Plant(
        "rows come back from the host to pages that others have",
        SPILLED,
        "layers/stash.py",
        "            self._page_M = self._ring.allocate(self._ends_E[-1], self._capacity)\n",
        "",
    ),
    Plant(
        "pages of the host are not given back",
        SPILLED,
        "layers/stash.py",
        "            self._host.free(self._host_M)\n",
        "",
    ),
    Plant(
        "copies of a step that was given up go on in the next one",
        "tests/cpu/test_moe_pages.py::"
        "test_copies_of_a_step_that_was_given_up_end_before_the_next_one_puts_rows",
        "layers/stash.py",
        "            copy.exception()",
        "            ()",
    ),
    Plant(
        "where rows lie on the host is looked up on the device",
        "tests/cpu/test_moe_pages.py::"
        "test_rows_without_kernels_of_their_own_go_to_the_host_and_back",
        "kernels/pages/ring.py",
        "target._row_slots(into_M, count, room).to(device)",
        "target._row_slots(into_M, count, room)",
    ),
    Plant(
        "pages whose rows have left are planned until those are taken",
        "tests/gloo/test_moe_pages.py::test_the_most_pages_are_those_planned",
        "spec/pages.py",
        "                    self._used -= left_pages\n",
        "",
    ),
    Plant(
        "a step that lacked pages is taken as it is",
        PAGED,
        "parallel/limits.py",
        "torch.stack([rows, stash.shortage()])",
        "torch.stack([rows, rows])",
    ),
    Plant(
        "rows of the first expert alone are kept",
        PAGED,
        "layers/stash.py",
        "self._ring.put(x_RD.detach().reshape(self._capacity, -1), ends_E[-1])",
        "self._ring.put(x_RD.detach().reshape(self._capacity, -1), ends_E[0])",
    ),
)
