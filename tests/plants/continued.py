"""Planted bugs: what a changed run continues: its data, learning rate and batch."""

from tests.plants.plant import Plant

FORKS = "tests/cpu/test_data_forks.py::test_"
SOURCES = "tests/pure/test_data_continued.py::test_"
RATES = "tests/pure/test_optim_rates.py::test_"
ORDER, PACKING = "data/order.py", "data/packing.py"
RAMP = "tests/pure/test_training_ramp.py::test_"
RAMPED = "tests/cpu/test_training_ramp.py::test_"
CONTINUATION, PHASES = "training/continuation.py", "optim/rates.py"

PLANTS = (
    Plant(
        "the position of one source is used for another",
        SOURCES + "sources_are_recognised_by_their_tokens",
        ORDER,
        "if one.digest == digest and (one.name == name or not by_name):",
        "if one.name == name or not by_name:",
    ),
    Plant(
        "a new mixture is counted from the start of the run",
        FORKS + "another_mixture_reads_on_in_each_source",
        "data/loader.py",
        "return self.sizes.before(step) + self._offset - self._first",
        "return self.sizes.before(step) + self._offset",
    ),
    Plant(
        "what shorter sequences gave is forgotten when their length changes",
        SOURCES + "text_continues_at_any_length_and_seed",
        ORDER,
        "return replace(self, cuts=(*self.cuts, (seq, n)))",
        "return replace(self, cuts=((seq, n),))",
    ),
    Plant(
        "the rest of an epoch begins where a whole sequence of the new length would",
        SOURCES + "text_continues_at_any_length_and_seed",
        PACKING,
        "start = self.tokens_given + n * self.seq",
        "start = self.tokens_given // self.seq * self.seq + n * self.seq",
    ),
    Plant(
        "conversations that were given before a change of length are packed again",
        SOURCES + "conversations_continue_at_any_length_and_seed",
        PACKING,
        "for i in range(given, len(packs)))",
        "for i in range(len(packs)))",
    ),
    Plant(
        "the count of a source that is no longer read is dropped",
        FORKS + "a_source_that_was_left_out_goes_on_when_it_comes_back",
        "data/loader.py",
        "return (*given, *self._given_of_others)",
        "return tuple(given)",
    ),
    Plant(
        "the epoch in progress gets the order of the new seed",
        SOURCES + "an_epoch_in_progress_keeps_its_seed_and_name",
        PACKING,
        "self._begun = Epochs(given.seed, given.name, tokens, given.cuts[0][0])",
        "self._begun = Epochs(seed, name, tokens, given.cuts[0][0])",
    ),
    Plant(
        "after an epoch that was continued, the first one is read again",
        SOURCES + "an_epoch_in_progress_keeps_its_seed_and_name",
        PACKING,
        "return self.given.epoch + 1 + epoch, position",
        "return self.given.epoch + epoch, position",
    ),
    Plant(
        "repeats of a changed order are said and not refused",
        FORKS + "what_is_used_up_is_refused_with_counts_and_can_be_allowed",
        CONTINUATION,
        "if each.again and each.name not in accepted:",
        "if False:",
    ),
    Plant(
        "files added to a source make it another source",
        FORKS + "a_source_whose_files_changed_is_told_from_another_one",
        CONTINUATION,
        "if not _shares_files(source, to_dict(record)):",
        "if True:",
    ),
    Plant(
        "a checkpoint of an earlier version is converted without its mixture",
        FORKS + "checkpoints_with_one_position_are_converted",
        CONTINUATION,
        "one = replace(sequences.given_after(n), digest=part.digest)",
        "one = replace(sequences.given_after(0), digest=part.digest)",
    ),
    Plant(
        "an extension begins at the end of the curve, a step that was not taken",
        RATES + "an_extended_run_follows_the_stated_rule",
        PHASES,
        "before = rate_factor(phases, schedule, step - 1)\n    if extend",
        "before = rate_factor(phases, schedule, step)\n    if extend",
    ),
    Plant(
        "a second decay begins at the peak",
        RATES + "an_extended_run_follows_the_stated_rule",
        PHASES,
        "return _fall(schedule, done, steps, self.start)",
        "return _fall(schedule, done, steps, 1.0)",
    ),
    Plant(
        "a schedule of another length is taken without a word",
        RATES + "without_an_answer_the_rate_never_jumps",
        PHASES,
        "if abs(present - expected) > 1e-9 * max(present, expected):",
        "if False:",
    ),
    Plant(
        "a second warm-up starts from zero",
        RATES + "an_extended_run_follows_the_stated_rule",
        PHASES,
        "return self.start + missing * (done + 1) / (warmup + 1)",
        "return (done + 1) / (warmup + 1)",
    ),
    Plant(
        "sequences before a step are those of its own size",
        RAMP + "a_ramp_over_steps_rises_in_a_line",
        "data/config.py",
        "return self._before[stage] + (step - first) * size",
        "return step * size",
    ),
    Plant(
        "a ramp over tokens counts sequences",
        RAMP + "a_ramp_over_tokens_gives_each_size_its_share",
        "training/config.py",
        "until = -(-number * ramp.tokens // (increments * seq))",
        "until = -(-number * ramp.tokens // increments)",
    ),
    Plant(
        "a fork with another ramp begins at the sequence of its own steps",
        RAMPED + "a_fork_with_another_ramp_reads_on",
        "training/state.py",
        "offset = self.first_sequence(sizes) - new.before(self.step)",
        "offset = self.sequence_offset",
    ),
)
