"""Plants B01, B03, B13 and B30 of data ranks: what is summed, counted, begun anew."""

from tests.plants.plant import Plant

BUGS = "tests/gloo/test_parallel_data_bugs.py::"
B01 = BUGS + "test_b01_experts_gradients_are_sums_whatever_their_copies"
B03 = BUGS + "test_b03_each_element_counts_once_in_the_norm"
B13 = BUGS + "test_b13_ranks_without_rows_and_experts_without_tokens_have_zeros"
B30 = BUGS + "test_b30_no_micro_batch_and_no_rank_is_added_twice"
SHARING, BUCKET = "parallel/data/sharding.py", "parallel/data/bucket.py"

PLANTS = (
    Plant(
        "b01",
        "experts are summed over the ranks that hold copies of dense weights",
        B01,
        "layers/placement.py",
        'return "edp" if self.is_expert else "dp_cp"',
        'return "dp_cp"',
    ),
    Plant(
        "b01",
        "sums are divided by the ranks that share",
        B01,
        BUCKET,
        "        pending.wait()\n        self.summed_L",
        "        pending.wait()\n        part_L.div_(self.shard_group.size)\n        self.summed_L",
    ),
    Plant(
        "b03",
        "only the first rank's share enters the norm",
        B03,
        SHARING,
        "holders = world.group(placement.replicas) if bucket is None else bucket.replica_group",
        "holders = world.group(placement.replicas)",
    ),
    Plant(
        "b03",
        "what tensor ranks hold whole counts on each of them",
        B03,
        SHARING,
        "        if placement.replicated_over_tp:\n",
        "        if False:\n",
    ),
    Plant(
        "b03",
        "a tied table counts on both stages",
        B03,
        SHARING,
        "        if name == EMBEDDING_WEIGHT:\n",
        "        if False:\n",
    ),
    Plant(
        "b13",
        "whole gradients begin with what was in their memory",
        B13,
        BUCKET,
        "self.gradients = full\n",
        "self.gradients = full + 1\n",
    ),
    Plant(
        "b30",
        "the sums of the last step stay",
        B30,
        BUCKET,
        "        self.summed_L = None\n        self.free_gradients()\n",
        "        self.free_gradients()\n",
    ),
    Plant(
        "b30",
        "whole gradients that are summed stay and are summed again",
        B30,
        BUCKET,
        "self.summed_L.add_(part_L)\n        self.free_gradients()\n",
        "self.summed_L.add_(part_L)\n",
    ),
)
