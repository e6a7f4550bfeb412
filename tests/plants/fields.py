"""Plants of what fields of data mean, and of settings with which text is generated."""

from tests.plants.plant import Plant

FIELDS = "tests/cpu/test_data_fields.py::"
SETTINGS = "tests/cpu/test_generation_settings.py::"
SHAPES = "tests/pure/test_data_shapes.py::"

PLANTS = (
    Plant(
        "an answer that is marked as context is trained",
        FIELDS + "test_answers_that_are_context_have_no_labels",
        "data/chats/conversations.py",
        "trained = [number for number in chosen if number >= first and number not in context]",
        "trained = [number for number in chosen if number >= first]",
    ),
    Plant(
        "a field that nothing reads is ignored",
        SHAPES + "test_fields_that_nothing_reads_are_refused_by_name",
        "data/chats/fields.py",
        "if empty(value) or (name in KNOWN and not _names_a_speaker(message, name)):",
        "if name:",
    ),
    Plant(
        "answers to different questions are compared",
        SHAPES + "test_pairs_that_cannot_be_compared_are_refused",
        "data/chats/shapes.py",
        "if asking and n >= shared]",
        "if asking and n < 0]",
    ),
    Plant(
        "a column of JSON is read as text",
        FIELDS + "test_columns_of_json_give_what_lines_give",
        "data/corpora/table_rows.py",
        "return partial(_parse, column)",
        "return _same",
    ),
    Plant(
        "a space at the end of a common beginning belongs to the prompt",
        SHAPES + "test_the_common_beginning_of_texts_is_the_prompt",
        "data/chats/shapes.py",
        "        end -= 1\n",
        "        end -= 0\n",
    ),
    Plant(
        "a penalty raises logits below zero",
        SETTINGS + "test_distributions_are_those_of_transformers",
        "model/logits.py",
        "torch.where(found < 0, found * penalty, found / penalty)",
        "found / penalty",
    ),
    Plant(
        "the token after which a sequence repeats is one too early",
        SETTINGS + "test_distributions_are_those_of_transformers",
        "model/logits.py",
        "text[i + size - 1] for i in starts",
        "text[i + size - 2] for i in starts",
    ),
    Plant(
        "the logits of end tokens below zero fall where they should grow",
        SETTINGS + "test_distributions_are_those_of_transformers",
        "model/logits.py",
        "found + found.abs() * by",
        "found + found * by",
    ),
    Plant(
        "a cutoff rises with the entropy",
        SETTINGS + "test_distributions_are_those_of_transformers",
        "model/truncation.py",
        "(-_entropy(probability_PV)).exp()",
        "_entropy(probability_PV).exp()",
    ),
    Plant(
        "least shares of the likeliest token are ignored",
        SETTINGS + "test_distributions_are_those_of_transformers",
        "model/generate.py",
        "return torch.minimum(last_P1 + 1, likely_P1)",
        "return last_P1 + 1",
    ),
    Plant(
        "values of the template do not reach the prompt",
        SETTINGS + "test_sample_writes_what_generate_writes",
        "training/text_generator.py",
        "given = self.tokenizer.files.template_values() | values",
        "given = self.tokenizer.files.template_values()",
    ),
    Plant(
        "reasoning stays in the answer that goes back",
        "tests/pure/test_data_replies.py::test_a_reply_goes_back_as_its_template_wants",
        "data/chats/replies.py",
        "if reasoning and field:",
        "if field is None:",
    ),
)
