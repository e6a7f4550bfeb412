"""Plants in pipelines: rows of another micro-batch, gradients lost, doubled or not summed."""

from tests.plants.plant import Plant

BUGS = "tests/gloo/test_parallel_pipeline_bugs.py::"
GRAPHS = "tests/cpu/test_graphs.py::"
TIED_EMBEDDING = BUGS + "test_a_tied_embedding_is_summed_over_stages_and_counts_once"
ROUTER_TERMS = BUGS + "test_router_terms_of_every_stage_reach_its_routers"
EVERY_CHUNK = BUGS + "test_every_chunk_takes_its_own_micro_batch"
EACH_WEIGHT = BUGS + "test_each_weight_gradient_is_added_once"
GROUP_CARRIES = BUGS + "test_no_group_carries_operations_of_two_lanes"
EACH_LANE = (
    "tests/cpu/test_parallel_lanes.py::test_each_lane_waits_for_what_it_takes_from_the_other"
)

PLANTS = (
    Plant(
        "a tied embedding's gradient is not summed over stages",
        TIED_EMBEDDING,
        "parallel/apply.py",
        'letters = "EmL" if model.record.tied else "Em"',
        'letters = "Em"',
    ),
    Plant(
        "router terms of stages without the loss are lost",
        ROUTER_TERMS,
        "parallel/pipeline/passes.py",
        "        if weighted is None or not weighted.requires_grad:",
        "        if weighted is None or not self._chunk.has_head:",
    ),
    Plant(
        "receives are posted in the order in which they are read",
        EVERY_CHUNK,
        "parallel/pipeline/p2p.py",
        "to_post.append(queues[source].pop(0))",
        "to_post.append(need)",
    ),
    Plant(
        "every chunk runs with the first micro-batch's rows",
        EVERY_CHUNK,
        "parallel/pipeline/executor.py",
        "self._flows[micro].for_chunk(",
        "self._flows[0].for_chunk(",
    ),
    Plant(
        "products put off run again with the next",
        EACH_WEIGHT,
        "kernels/gradients.py",
        "        self.pending.clear()\n",
        "",
    ),
    Plant(
        "exchanges of the second lane go over the first lane's groups",
        GROUP_CARRIES,
        "parallel/apply.py",
        "secondary = world.secondary if",
        "secondary = world if",
    ),
    Plant(
        "what computes does not wait for the exchange's event",
        EACH_LANE,
        "parallel/pipeline/lanes.py",
        "            torch.cuda.current_stream().wait_event(state.done)\n",
        "",
    ),
    Plant(
        "an exchange waits for an event that nobody recorded",
        "tests/gpu/test_step_gpu.py::test_two_lanes_give_what_one_after_the_other_does",
        "parallel/pipeline/lanes.py",
        "        ready.record()\n",
        "",
    ),
    Plant(
        "the host reads counts without a wait for their copy",
        "tests/gpu/test_kernels_gpu.py::test_counts_that_are_read_late_are_those_of_their_time",
        "moe/dispatch/routing_plan.py",
        "    copied.record()\n",
        "",
    ),
    Plant(
        "an exchange does not wait for the event of what was computed",
        EACH_LANE,
        "parallel/pipeline/lanes.py",
        "                stream.wait_event(ready)\n",
        "",
    ),
    Plant(
        "sums of gradients go on from the last step's",
        GRAPHS + "test_ten_steps_by_graphs_are_ten_steps",
        "parallel/pipeline/partial.py",
        "parameter.grad = sums.zero_()",
        "parameter.grad = sums",
    ),
    Plant(
        "the first micro-batch is one by the way it was recorded",
        GRAPHS + "test_ten_steps_by_graphs_are_ten_steps",
        "parallel/pipeline/partial.py",
        "parameter.grad = sums.zero_()",
        "parameter.grad = None",
    ),
    Plant(
        "what a graph reads is not copied to it",
        GRAPHS + "test_ten_steps_by_graphs_are_ten_steps",
        "parallel/pipeline/partial.py",
        "                    old.copy_(new)\n",
        "                    pass\n",
    ),
    Plant(
        "graphs of a micro-batch that is in flight run for another",
        GRAPHS + "test_passes_in_flight_have_graphs_of_their_own",
        "parallel/pipeline/partial.py",
        "graphs = free.pop()",
        "graphs = free[-1]",
    ),
    Plant(
        "each rank records what it has seen often enough itself",
        "tests/gloo/test_graphs.py::test_ranks_record_alike",
        "parallel/pipeline/recording.py",
        'hashes = gather(local, world.group("world")).tolist()',
        "hashes = [local.tolist()] * world.size",
    ),
    Plant(
        "passes in flight share memory",
        "tests/gloo/test_graphs.py::test_steps_by_graphs_are_the_steps",
        "parallel/pipeline/partial.py",
        "self._is_graphed, self._record())",
        "self._is_graphed, *[p.record for p in self.passes[:1]] or [self._record()])",
    ),
    Plant(
        "router terms lie where the next micro-batch leaves its own",
        GRAPHS + "test_ten_steps_by_graphs_are_ten_steps",
        "parallel/pipeline/passes.py",
        "values.clone() for layer, values in router_terms.items()",
        "values for layer, values in router_terms.items()",
    ),
    Plant(
        "a pass by graphs reads the rows of the one that was recorded",
        GRAPHS + "test_ten_steps_by_graphs_are_ten_steps",
        "parallel/pipeline/partial.py",
        "            refill(graphs.flow, flow)\n",
        "",
    ),
    Plant(
        "graphs read where a weight lay before it moved",
        GRAPHS + "test_weights_that_moved_are_read_where_they_are",
        "parallel/pipeline/graphs.py",
        "            self.recorded.clear()\n",
        "            pass\n",
    ),
    Plant(
        "memory that begins where it did is taken for the same",
        GRAPHS + "test_memory_that_is_larger_is_not_where_it_was",
        "parallel/pipeline/recording.py",
        "(tensor.data_ptr(), tensor.nbytes) for",
        "(tensor.data_ptr(), 0) for",
    ),
    Plant(
        "of rows that come from another stage no copy is planned",
        "tests/cpu/test_planner_graphs.py::test_what_graphs_hold_is_planned",
        "planner/memory_graphs.py",
        "len(static) + static[-1].writes_output + gradients",
        "len(static) + static[-1].writes_output + twice",
    ),
    Plant(
        "shapes beyond the most are recorded too",
        GRAPHS + "test_shapes_have_graphs_of_their_own_and_few_have_any",
        "parallel/pipeline/recording.py",
        " and len(self._recorded) < MAX_SHAPES",
        "",
    ),
    Plant(
        "products that wait are put on the queue as they are recorded alone",
        "tests/gloo/test_graphs.py::test_steps_by_graphs_are_the_steps",
        "parallel/pipeline/partial.py",
        "            pending += recorded.deferred\n",
        "",
    ),
)
