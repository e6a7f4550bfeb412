"""Plants of losses beside cross-entropy, and of what they read."""

from tests.plants.plant import Plant

CPU = "tests/cpu/test_training_losses.py::"
PAIRS = CPU + "test_gradients_of_pairs_are_those_of_the_closed_form"
TEACHER = CPU + "test_gradients_of_a_divergence_are_those_of_the_closed_form"
CONTEXT = (
    "tests/gloo/test_training_losses.py::"
    "test_pairs_and_teachers_on_context_ranks_are_those_of_one_rank"
)
VOCABULARY = (
    "tests/gloo/test_training_losses.py::test_pairs_and_teachers_where_ranks_share_the_vocabulary"
)

PLANTS = (
    Plant(
        "the reference is scored with its adapters on",
        PAIRS,
        "training/losses/dpo.py",
        "with parts.model.precision_policy.without_adapters():",
        "with torch.no_grad():",
    ),
    Plant(
        "an answer's log-probability is a mean over its labels",
        PAIRS,
        "training/losses/dpo.py",
        "torch.where(in_segment_NP, valid_P, 0).sum(1)",
        "torch.where(in_segment_NP, valid_P, 0).sum(1) / in_segment_NP.sum(1)",
    ),
    Plant(
        "chosen and rejected change places",
        CPU + "test_a_stored_reference_is_the_model_as_the_run_began",
        "training/losses/dpo.py",
        "h = gain_N[0::2] - gain_N[1::2]",
        "h = gain_N[1::2] - gain_N[0::2]",
    ),
    Plant(
        "a pair's answers are one conversation",
        CPU + "test_a_pair_stands_in_a_sequence_one_answer_after_the_other",
        "data/packing.py",
        "parts = np.flatnonzero(np.diff(marks_N // REJECTED)) + 1",
        "parts = np.zeros(0, np.int64)",
    ),
    Plant(
        "a context rank's share of an answer is taken for the answer",
        CONTEXT,
        "training/losses/dpo.py",
        'return sum_(log_N, flow.world.group("cp"))',
        "return log_N",
    ),
    Plant(
        "the square of the temperature is missing",
        TEACHER,
        "layers/divergence.py",
        "return total * temperature**2, reduce_scatter(dx_PD, ranks)",
        "return total, reduce_scatter(dx_PD.div_(temperature**2), ranks)",
    ),
    Plant(
        "tokens that are not stored have no part in the divergence",
        TEACHER,
        "layers/divergence.py",
        "losses_C += torch.xlogy(m_C, m_C) - torch.xlogy(m_C, r_C)",
        "pass",
    ),
    Plant(
        "tokens that are not stored are all pushed down",
        TEACHER,
        "layers/divergence.py",
        "q_Cv.mul_(1 - ratio_C[:, None])",
        "pass",
    ),
    Plant(
        "scores of another temperature are read",
        CPU + "test_scores_are_stored_once_and_read_by_each_step",
        "training/losses/distill.py",
        '        "temperature": record.temperature,\n    }',
        "    }",
    ),
    Plant(
        "the largest probabilities of each share of the vocabulary are taken for the largest",
        VOCABULARY,
        "layers/divergence.py",
        "best, index = best.topk(k, 1)",
        "best, index = best[:, :k], torch.arange(k).expand(len(best), k)",
    ),
    Plant(
        "a share of the vocabulary is normalised by itself",
        VOCABULARY,
        "layers/divergence.py",
        "total_C1 = sum_(logits_Cv.exp().sum(1, keepdim=True), ranks)",
        "total_C1 = logits_Cv.exp().sum(1, keepdim=True)",
    ),
)
