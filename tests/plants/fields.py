"""Plants of what fields of data mean, and of settings with which text is generated."""

from tests.plants.plant import Plant

FIELDS = "tests/cpu/test_data_fields.py::"
SHAPES = "tests/pure/test_data_shapes.py::"

PLANTS = (
    Plant(
        "b58",
        "an answer that is marked as context is trained",
        FIELDS + "test_b58_answers_that_are_context_have_no_labels",
        "data/conversations.py",
        "trained = [number for number in chosen if number >= first and number not in context]",
        "trained = [number for number in chosen if number >= first]",
    ),
    Plant(
        "b58",
        "a field that nothing reads is ignored",
        SHAPES + "test_b58_fields_that_nothing_reads_are_refused_by_name",
        "data/fields.py",
        "if empty(value) or (name in KNOWN and not _names_a_speaker(message, name)):",
        "if name:",
    ),
    Plant(
        "b58",
        "answers to different questions are compared",
        SHAPES + "test_b58_pairs_that_cannot_be_compared_are_refused",
        "data/shapes.py",
        "if asking and n >= shared]",
        "if asking and n < 0]",
    ),
    Plant(
        "b58",
        "a column of JSON is read as text",
        FIELDS + "test_b58_columns_of_json_give_what_lines_give",
        "data/table_rows.py",
        "return partial(_parse, column)",
        "return _same",
    ),
    Plant(
        "b58",
        "a space at the end of a common beginning belongs to the prompt",
        SHAPES + "test_b58_the_common_beginning_of_texts_is_the_prompt",
        "data/shapes.py",
        "        end -= 1\n",
        "        end -= 0\n",
    ),
)
