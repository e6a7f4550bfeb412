"""Plants of vocabularies that tp does not divide."""

from tests.plants.plant import Plant

TRAIN = "tests/gloo/test_parallel_vocabulary.py::"
STEPS = TRAIN + "test_ranks_with_different_numbers_of_tokens_train_as_one"
LOSSES = (
    "tests/gloo/test_training_losses.py::"
    "test_pairs_and_teachers_where_ranks_have_different_numbers_of_tokens"
)
SAMPLES = TRAIN + "test_shares_of_tokens_are_sampled_as_on_one_rank"
SHARES = "tests/pure/test_mesh_shares.py::"

PLANTS = (
    Plant(
        "ids are looked up as if all ranks had as many",
        STEPS,
        "layers/linear.py",
        "local_vocab_ids(ids_T, self.first_row, len(table.value))",
        "local_vocab_ids(ids_T, ranks.index * len(table.value), len(table.value))",
    ),
    Plant(
        "labels are looked up as if all ranks had as many",
        STEPS,
        "layers/loss.py",
        '"vocab_start": head.first_row,',
        '"vocab_start": ranks.index * len(head.value),',
    ),
    Plant(
        "a tied head begins at the first token on each rank",
        STEPS,
        "model/decoder.py",
        "first_row=self.embed.first_row)",
        "first_row=0)",
    ),
    Plant(
        "a teacher's ids are counted as if all ranks had as many",
        LOSSES,
        "layers/divergence.py",
        "ids = index + head.first_row",
        "ids = index + ranks.index * local_vocab",
    ),
    Plant(
        "tokens that a rank does not have are chosen",
        LOSSES,
        "layers/divergence.py",
        "value=-torch.inf)",
        "value=0.0)",
    ),
    Plant(
        "columns that only fill a rank's share are sampled",
        SAMPLES,
        "parallel/pipeline/score.py",
        "logits_Pv[:, : end - start]",
        "logits_Pv",
    ),
    Plant(
        "a plan counts the emptiest rank",
        SHARES + "test_an_uneven_weight_is_planned_as_on_the_fullest_rank",
        "mesh/shares.py",
        "return -(-number // ranks)",
        "return number // ranks",
    ),
    Plant(
        "the last ranks have what is left over",
        SHARES + "test_shares_are_a_partition_in_order_and_differ_by_at_most_one",
        "mesh/shares.py",
        "start = index * each + min(index, longer)",
        "start = index * each",
    ),
)
