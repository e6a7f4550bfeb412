"""Plants of losses of further tokens."""

from tests.plants.plant import Plant

CPU = "tests/cpu/test_model_multi_token.py::"
STEP = CPU + "test_a_step_is_that_of_a_plain_reference"
ZERO = CPU + "test_a_weight_of_zero_leaves_all_other_gradients_as_they_are"
FOLDER = "tests/cpu/test_convert_multi_token.py::"
RANKS = "tests/gloo/test_model_multi_token.py::test_ranks_compute_what_one_rank_computes"

APART = "tests/gloo/test_planner_schedules.py::"
APART += "test_so_it_is_where_further_tokens_have_a_stage_of_their_own"

PLANTS = (
    Plant(
        "losses of further tokens are planned on their layers' stage",
        APART,
        "planner/case.py",
        "return 1 + self.multi_token + self.ahead_before if self.loss else 0",
        "return self.loss + self.multi_token",
    ),
    Plant(
        "rows of further tokens weigh nothing among messages",
        APART,
        "parallel/pipeline/p2p.py",
        'return sent_rows[result.stage - (result.kind == "gradient")]',
        "return 1",
    ),
    Plant(
        "a label of a further token crosses a document's end",
        STEP,
        "data/batch.py",
        "end_T = lengths_N.cumsum(0).repeat_interleave(lengths_N)",
        "end_T = lengths_N.sum().expand(self.n_valid)",
    ),
    Plant(
        "the label behind a piece of a document is that of a further token too",
        CPU + "test_rows_of_later_tokens",
        "data/batch.py",
        "inside_T[: self.n_valid] = later_T < end_T",
        "inside_T[: self.n_valid] = later_T < self.n_valid",
    ),
    Plant(
        "losses of further tokens are divided by the labels of the next",
        STEP,
        "training/figures.py",
        "scale_L = float_counts[:-1].reciprocal()",
        "scale_L = float_counts[:1].reciprocal().repeat(losses)",
    ),
    Plant(
        "the embedding that is joined is a token too early",
        STEP,
        "data/batch.py",
        "ids_T=self.ids_T[from_T]",
        "ids_T=self.ids_T[(from_T - 1).clamp(min=0)]",
    ),
    Plant(
        "the row that is joined is taken after the norm where it should be before",
        STEP,
        "model/decoder.py",
        'x_TD if layer.reads == "residual" else normed_TD',
        "normed_TD",
    ),
    Plant(
        "the row is joined before the embedding",
        STEP,
        "model/block.py",
        "[self.embed_norm(next_TD, flow), self.row_norm(x_TD, flow)]",
        "[self.row_norm(x_TD, flow), self.embed_norm(next_TD, flow)]",
    ),
    Plant(
        "router terms of further tokens weigh in full",
        ZERO,
        "model/block.py",
        "self.moe.balance.weight = record.multi_token.weight",
        "self.moe.balance.weight = 1.0",
    ),
    Plant(
        "copies of embedding and head are not written",
        FOLDER + "test_import_then_export_gives_the_same_folder",
        "convert/plan.py",
        "for copy in copies.get(name, ())",
        "for copy in ()",
    ),
    Plant(
        "copies of embedding and head are taken unseen",
        FOLDER + "test_a_copy_that_is_none_is_refused",
        "convert/importer.py",
        "for copy in self._copies.get(name, ()):",
        "for copy in ():",
    ),
    Plant(
        "what the last stage adds to the embedding's gradient stays there",
        RANKS,
        "parallel/apply.py",
        'letters = "EmL" if model.record.tied else "Em"',
        'letters = "EL" if model.record.tied else "E"',
    ),
    Plant(
        "labels of further tokens are those of a first micro-batch alone",
        RANKS,
        "training/figures.py",
        "sum(b.shift(offset).n_labels for b in batches)",
        "sum(b.shift(offset).n_labels for b in batches[:1])",
    ),
)
