"""Plants in what is kept for backward: sent away twice or wrongly, or not back in time."""

from tests.plants.plant import Plant

ROOM = "tests/cpu/test_layers_offload.py::"
B60 = ROOM + "test_b60_what_leaves_and_what_stays_is_what_is_planned"
B62 = ROOM + "test_b62_layers_are_sent_for_before_they_are_taken"
B64 = (
    "tests/gloo/test_planner_schedules.py::"
    "test_b64_what_is_fetched_ahead_is_what_the_table_takes_next"
)

PLANTS = (
    Plant(
        "b60",
        "two views of one storage leave twice",
        B60,
        "layers/keeper.py",
        "        self._kept.put(tensor, ref(away))\n",
        "",
    ),
    Plant(
        "b60",
        "weights leave with the rows they are multiplied by",
        B60,
        "layers/linear.py",
        "        flow.keeper.stays(*found.tensors)\n",
        "",
    ),
    Plant(
        "b60",
        "what is made again holds its input on the device",
        B60,
        "layers/keeper.py",
        "tuple(self.keep(t.detach()) for t in inputs)",
        "tuple(t.detach() for t in inputs)",
    ),
    Plant(
        "b60",
        "the layer before the loss leaves too",
        B60,
        "layers/config.py",
        "round(share * max(layers - ends, 0))",
        "round(share * layers)",
    ),
    Plant(
        "b60",
        "an output that was changed in place is made again as it was before",
        "tests/cpu/test_model_edges.py::test_b60_what_is_changed_in_place_is_kept_not_made_again",
        "layers/keeper.py",
        "if place[2:] != self.place[2:]:",
        "if place[2:3] != self.place[2:3]:",
    ),
    Plant(
        "b60",
        "experts are chosen again where a block runs again",
        "tests/gloo/test_parallel_pipeline_counts.py::"
        "test_b60_what_is_made_again_is_made_once_and_nothing_else",
        "moe/layer.py",
        "flow, flow.decisions.get(self._key))",
        "flow, None)",
    ),
    Plant(
        "b60",
        "an action that makes gradients of weights alone exchanges",
        "tests/gloo/test_parallel_pipeline_counts.py::"
        "test_b60_w_exchanges_nothing_and_computes_nothing_again",
        "parallel/pipeline/executor.py",
        "            held.sink.drain()\n            return Chain((), ())\n",
        "            held.sink.drain()\n"
        "            from moefold.comm.collectives import sum_\n"
        "            sum_(torch.ones(1), self._placed.world.tp)\n"
        "            return Chain((), ())\n",
    ),
    Plant(
        "b62",
        "what is taken next is not sent for",
        B62,
        "layers/offload.py",
        "        departed.fetch(layer)\n",
        "",
    ),
    Plant(
        "b62",
        "all layers are sent for at once",
        B62,
        "layers/offload.py",
        "first - self._in_flight + (layer is None)",
        "0 * first",
    ),
    Plant(
        "b64",
        "what is fetched ahead is of the step after the next",
        B64,
        "parallel/pipeline/executor.py",
        "self.plan.line[at : at + 1]",
        "self.plan.line[at + 1 : at + 2]",
    ),
)
