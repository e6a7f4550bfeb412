"""Planted bugs: data ranks: what is summed, counted, begun anew."""

from tests.plants.plant import Plant

BUGS = "tests/gloo/test_parallel_data_bugs.py::"
EXPERTS_GRADIENTS = BUGS + "test_experts_gradients_are_sums_whatever_their_copies"
EACH_ELEMENT = BUGS + "test_each_element_counts_once_in_the_norm"
RANKS_WITHOUT = BUGS + "test_ranks_without_rows_and_experts_without_tokens_have_zeros"
MICRO_BATCH = BUGS + "test_no_micro_batch_and_no_rank_is_added_twice"
SHARING, BUCKET = "parallel/data/sharding.py", "parallel/data/bucket.py"

PLANTS = (
    Plant(
        "experts are summed over the ranks that hold copies of dense weights",
        EXPERTS_GRADIENTS,
        "layers/placement.py",
        'return "edp" if self.is_expert else "dp_cp"',
        'return "dp_cp"',
    ),
    Plant(
        "sums are divided by the ranks that share",
        EXPERTS_GRADIENTS,
        BUCKET,
        "        pending.wait()\n        self.summed_L",
        "        pending.wait()\n        part_L.div_(self.shard_group.size)\n        self.summed_L",
    ),
    Plant(
        "only the first rank's share enters the norm",
        EACH_ELEMENT,
        SHARING,
        "holders = world.group(placement.replicas) if bucket is None else bucket.replica_group",
        "holders = world.group(placement.replicas)",
    ),
    Plant(
        "what tensor ranks hold whole counts on each of them",
        EACH_ELEMENT,
        SHARING,
        "        if placement.replicated_over_tp:\n",
        "        if False:\n",
    ),
    Plant(
        "a tied table counts on both stages",
        EACH_ELEMENT,
        SHARING,
        "        if name == EMBEDDING_WEIGHT:\n",
        "        if False:\n",
    ),
    Plant(
        "whole gradients begin with what was in their memory",
        RANKS_WITHOUT,
        BUCKET,
        "self.gradients = full\n",
        "self.gradients = full + 1\n",
    ),
    Plant(
        "the sums of the last step stay",
        MICRO_BATCH,
        BUCKET,
        "        self.summed_L = None\n        self.free_gradients()\n",
        "        self.free_gradients()\n",
    ),
    Plant(
        "whole gradients that are summed stay and are summed again",
        MICRO_BATCH,
        BUCKET,
        "self.summed_L.add_(part_L)\n        self.free_gradients()\n",
        "self.summed_L.add_(part_L)\n",
    ),
)
