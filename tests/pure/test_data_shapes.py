"""Shapes of examples: what is read as what, and what is refused by the names that the data has."""

import json
import re
import resource
from typing import Any

import pytest

from moefold.data.chats.fields import check_messages, refuse_media, refuse_unread, untrained
from moefold.data.chats.messages import texts_of
from moefold.data.chats.shapes import (
    Conversation,
    PlainText,
    read_example,
    read_pair,
    refuse_variables,
    without_ignored,
)
from moefold.data.chats.template_names import (
    CommonValues,
    check_values,
    parse_values,
    template_variables,
)
from moefold.data.corpora.records import BadDocument

Row = dict[str, Any]


def said(*turns: str) -> list[dict[str, Any]]:
    """Messages from words such as ``user: hi``."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    pairs = (turn.split(":", 1) for turn in turns)
    return [{"role": names[role], "content": text} for role, text in pairs]


def sharegpt(*turns: str) -> list[dict[str, Any]]:
    pairs = (turn.split(":", 1) for turn in turns)
    return [{"from": name, "value": text} for name, text in pairs]


CALL = '{"name": "f", "arguments": {"x": 1}}'
CALLED = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("row", "messages", "first"),
    [
        ({"messages": said("u:1", "a:2")}, said("u:1", "a:2"), 0),
        ({"conversation": said("u:1", "a:2")}, said("u:1", "a:2"), 0),
        ({"conversations": said("u:1", "a:2")}, said("u:1", "a:2"), 0),
        (
            {"conversations": sharegpt("system:0", "human:1", "gpt:2"), "id": "x"},
            said("s:0", "u:1", "a:2"),
            0,
        ),
        (
            {"conversations": sharegpt("human:1", "function_call:" + CALL, "observation:3")},
            [
                *said("u:1"),
                {"role": "assistant", "content": "", "tool_calls": [CALLED]},
                *said("t:3"),
            ],
            0,
        ),
        ({"messages": said("u:1", "a:2"), "system": "0"}, said("s:0", "u:1", "a:2"), 0),
        ({"messages": said("s:0", "u:1", "a:2"), "system": "0"}, said("s:0", "u:1", "a:2"), 0),
        ({"prompt": said("u:1"), "completion": said("a:2")}, said("u:1", "a:2"), 1),
        (
            {"prompt": said("u:1"), "completion": said("a:2"), "system": "0"},
            said("s:0", "u:1", "a:2"),
            2,
        ),
        ({"instruction": "1", "input": "", "output": "2"}, said("u:1", "a:2"), 0),
        ({"instruction": "1", "input": "of", "output": "2"}, said("u:1\nof", "a:2"), 0),
        (
            {"instruction": "3", "output": "4", "history": [["1", "2"]], "system": "0"},
            said("s:0", "u:1", "a:2", "u:3", "a:4"),
            0,
        ),
    ],
)
def test_columns_of_other_tools_are_conversations(row: Row, messages: Any, first: int) -> None:
    example, unread = read_example(row)
    assert example == Conversation(messages, first)
    assert unread == [name for name in row if name == "id"]


def test_tools_and_values_come_with_every_shape() -> None:
    rest = {"tools": '[{"name": "f"}]', "chat_template_kwargs": {"deep": False}}
    for row in ({"messages": said("u:1", "a:2")}, {"instruction": "1", "output": "2"}):
        example, unread = read_example(row | rest)
        assert example == Conversation(said("u:1", "a:2"), 0, [{"name": "f"}], {"deep": False})
        assert not unread
    assert read_example({"prompt": "1", "completion": "2"} | rest)[0] == PlainText("1", "2")


ASKED, TWO = said("u:1"), (said("a:2"), said("a:3"))
WHOLE = {"chosen": ASKED + TWO[0], "rejected": ASKED + TWO[1]}


@pytest.mark.parametrize(
    "row",
    [
        WHOLE,
        {"prompt": ASKED, "chosen": TWO[0], "rejected": TWO[1]},
        {"prompt": ASKED, "chosen": TWO[0][0], "rejected": TWO[1][0]},
        {"prompt": "1", **WHOLE},
        {"prompt": "1", "messages": ASKED + TWO[0], **WHOLE},
        {"messages": ASKED + TWO[0], **WHOLE},
        {"messages": ASKED, "chosen": TWO[0], "rejected": TWO[1]},
        {"messages": ASKED + TWO[0], "rejected_response": "3"},
        {
            "conversations": sharegpt("human:1"),
            "chosen": sharegpt("gpt:2")[0],
            "rejected": sharegpt("gpt:3")[0],
        },
        {"instruction": "1", "chosen": "2", "rejected": "3"},
        {
            "input": {"messages": ASKED, "tools": [], "parallel_tool_calls": True},
            "preferred_output": TWO[0],
            "non_preferred_output": TWO[1],
        },
    ],
)
def test_pairs_of_other_tools_are_two_conversations(row: Row) -> None:
    (chosen, rejected), unread = read_pair(row | {"score_chosen": 9.0})
    assert (chosen, rejected) == tuple(Conversation(ASKED + side, 1) for side in TWO)
    assert set(unread) <= {"score_chosen", "messages"}


def test_what_follows_the_common_beginning_is_compared() -> None:
    """Answers with calls between them too; tools of OpenAI's form are kept."""
    row = {
        "input": {"messages": ASKED, "tools": TOOLS},
        "preferred_output": said("a:2", "t:3", "a:4"),
        "non_preferred_output": said("a:2", "t:5", "a:4"),
    }
    (chosen, rejected), _ = read_pair(row)
    assert isinstance(chosen, Conversation) and isinstance(rejected, Conversation)
    assert (chosen.first, rejected.first) == (2, 2) and chosen.tools == TOOLS == rejected.tools


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("\n\nHuman: a\n\nAssistant: cold", "\n\nHuman: a\n\nAssistant: warm", 22),
        ("Q: a A: cold", "Q: a A: cool", 10),
        ("Q: a A:  b", "Q: a A: c", 7),
    ],
)
def test_the_common_beginning_of_texts_is_the_prompt(
    chosen: str, rejected: str, prompt: int
) -> None:
    """As TRL's ``extract_prompt`` takes it: without a space at its end."""
    sides, _ = read_pair({"chosen": chosen, "rejected": rejected})
    assert sides == tuple(PlainText(t[:prompt], t[prompt:]) for t in (chosen, rejected))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"question": "1", "answer": "2"},
            r'\[\'answer\', \'question\'\].*"user", "content": row\["question"\]}, '
            r'.*"assistant", "content": row\["answer"\]',
        ),
        ({"text": "1"}, r"it has \['text'\], but needs .*row\[\"QUESTION\"\]"),
        ({"prompt": "1", "chosen": "2", "rejected": "3"}, "chosen and rejected need source: pref"),
        ({"preferred_output": [], "non_preferred_output": []}, "preferred_output and non_pref"),
        (
            {"prompt": "1", "completion": said("a:2")},
            r'prompt is text, but completion is not; convert .*{"prompt": \[{"role": "user"',
        ),
        (
            {"prompt": said("u:1"), "completion": "2"},
            r'completion is text, but prompt is not; .*"completion": \[{"role": "assistant"',
        ),
        ({"messages": '[{"role"'}, r'messages must .* but is text; .*json.loads\(row\["messages'),
        ({"conversations": sharegpt("narrator:1")}, "message 0 of conversations has from: 'narr"),
        (
            {"conversations": sharegpt("function_call:f()")},
            "message 0 of conversations has no JSON",
        ),
        ({"messages": said("u:1", "a:2"), "images": ["cat.png"]}, "it has images; this run reads"),
        ({"messages": said("u:1", "a:2"), "weight": 0.5}, "it has weight: 0.5; .*source a weight"),
        ({"prompt": "1", "completion": "2", "label": False}, "it has label: False; .*KTO"),
        ({"messages": said("u:1", "a:2"), "functions": [{"name": "f"}]}, "has functions.*as tools"),
        ({"messages": said("u:1", "a:2"), "input_ids": [1]}, "has input_ids, of data that is tok"),
        ({"messages": said("s:1", "u:1", "a:2"), "system": "3"}, "a column system and another"),
        ({"messages": said("u:1", "a:2"), "system": 3}, "system must be text, but is a int"),
        ({"messages": said("u:1", "a:2"), "tools": "[{"}, "text that is not JSON: tools: Exp"),
        ({"messages": said("u:1", "a:2"), "tools": {"f": 1}}, "tools must be a list of objects"),
        ({"messages": said("u:1", "a:2"), "tools": ["[3]"]}, r"tool 0 is no object .*but \[3\]"),
        ({"messages": said("u:1", "a:2"), "chat_template_kwargs": "[]"}, "must be an object"),
        ({"dialog": said("u:1", "a:2")}, r'convert each row: {"messages": row\["dialog"\]}'),
        ({"instruction": "1", "output": "2", "history": [["1"]]}, "turn 0 of history is not"),
        ({"instruction": "1", "output": ""}, "output is empty"),
        ({"instruction": "1", "input": 3, "output": "2"}, "input must be text, but is a int"),
    ],
)
def test_rows_that_nothing_reads_are_refused_by_their_columns(row: Row, told: str) -> None:
    with pytest.raises(BadDocument) as caught:
        read_example(row)
    assert_matches(caught.value, told)


def assert_matches(error: BadDocument, told: str) -> None:
    text = ": ".join(error.args)
    assert re.search(told, text), text


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "1", "chosen": "2"}, r"it has .* but lacks \['rejected'\]"),
        (
            {"chosen": said("u:1", "a:2"), "rejected": said("u:4", "a:3")},
            r"different.*message 0 of",
        ),
        (
            {"chosen": said("s:1", "u:1", "a:2"), "rejected": said("s:2", "u:1", "a:3")},
            r"different questions: message 0 of chosen \(system\)",
        ),
        (
            {
                "chosen": said("u:1", "a:2", "u:5", "a:2"),
                "rejected": said("u:1", "a:2", "u:6", "a:3"),
            },
            r"different questions: message 2 of chosen \(user\)",
        ),
        (
            {"chosen": said("u:1", "a:2", "u:3", "a:2"), "rejected": said("u:1", "a:2")},
            "different qu",
        ),
        ({"chosen": said("a:1"), "rejected": said("a:2")}, "without a question: .*as prompt"),
        ({"chosen": said("u:1", "a:2"), "rejected": said("u:1", "a:2")}, "without a difference"),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, "without a difference: chosen and rej"),
        ({"chosen": "a b", "rejected": "x y"}, "no common beginning"),
        ({"chosen": "a b", "rejected": "a b c"}, "chosen is empty"),
        ({"chosen": "a b", "rejected": said("u:1", "a:2")}, "chosen is text, but rejected is not"),
        ({"prompt": "other", **WHOLE}, "prompt is text that is no question of chosen"),
        ({"prompt": "1", "chosen": TWO[0], "rejected": TWO[1]}, "prompt is text that is no quest"),
        (
            {"prompt": ASKED, "chosen": "2", "rejected": "3"},
            "chosen and rejected are text, but pro",
        ),
        ({"prompt": ASKED, **WHOLE}, "begin with the messages of prompt; remove"),
        ({"messages": ASKED, "rejected_response": "3"}, "last of messages must be the chosen"),
        (
            {
                "input": {"messages": ASKED, "mood": 1},
                "preferred_output": 1,
                "non_preferred_output": 1,
            },
            "input has mood, which is not read",
        ),
        ({**WHOLE, "images": ["cat.png"]}, "it has images"),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused(row: Row, told: str) -> None:
    with pytest.raises(BadDocument) as caught:
        read_pair(row)
    assert_matches(caught.value, told)


@pytest.mark.parametrize("value", [0, False, 0.0])
@pytest.mark.parametrize("name", ["weight", "train", "training", "loss", "loss_mask", "trainable"])
def test_answers_that_are_context_only(name: str, value: Any) -> None:
    messages = said("u:1", "a:2", "u:3", "a:4")
    messages[1][name], messages[3][name] = value, type(value)(1)
    assert untrained(messages) == {1}


@pytest.mark.parametrize(
    ("fields", "number", "told"),
    [
        ({"weight": 0.5}, 1, r"message 1 has weight: 0.5; only 0 and 1"),
        ({"train": "no"}, 1, r"message 1 has train: 'no'; only 0 and 1"),
        ({"weight": 0, "train": True}, 1, "contradict each other: message 1 has weight: 0, train"),
        ({"train": True}, 0, r"message 0 \(user\) has train: True, but only messages with role"),
    ],
)
def test_marks_of_training_that_cannot_be_obeyed(fields: Row, number: int, told: str) -> None:
    messages = said("u:1", "a:2")
    messages[number] |= fields
    with pytest.raises(BadDocument) as caught:
        untrained(messages)
    assert_matches(caught.value, told)


def by_role_and(name: str) -> Any:
    """A template that writes one more field of a message."""
    return lambda messages: "".join(f"{m['role']}{m['content']}{m.get(name)}" for m in messages)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"mood": "glad"},
            r"message 1 \(assistant\) has mood, which .*known fields: role, content",
        ),
        ({"refusal": "no"}, "has refusal, which .*write its text as content"),
        ({"function_call": {"name": "f"}}, "has function_call, which .*as tool_calls"),
        ({"train_detail": [{"train": False}]}, "has train_detail, which .*split the answer"),
        ({"name": "Ann"}, r"has name, which .*ignore: \[name\]"),
        ({"content": [{"type": "text", "text": "a", "cache_control": {"x": 1}}]}, "part 0 of mess"),
    ],
)
def test_fields_that_nothing_reads_are_refused_by_name(fields: Row, told: str) -> None:
    messages = said("u:1", "a:2", "t:3")
    messages[2]["name"] = "f"  # repeats the call's
    messages[1] |= {"annotations": [], "audio": None, "refusal": None}
    refuse_unread(messages, by_role_and("tone"))
    messages[1] |= fields
    with pytest.raises(BadDocument) as caught:
        refuse_unread(messages, by_role_and("tone"))
    assert_matches(caught.value, told)
    (name,) = fields
    if name != "content":
        refuse_unread(messages, by_role_and(name))  # the template makes it known
    (ignored,) = without_ignored({"messages": messages}, [name, "cache_control"]).values()
    refuse_unread(ignored, lambda given: str([m.get("content") for m in given]))


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            {"content": [{"type": "image", "image": "a.png"}]},
            "part 0 of message 1 is of type image",
        ),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "is of type image_url; this run"),
        ({"content": [{"type": "input_audio", "input_audio": {}}]}, "is of type input_audio"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "video"}]}, "part 1 of message 1"),
        ({"content": [{"image": "a.png"}]}, "is of type image"),
        ({"content": "a", "images": ["a.png"]}, "message 1 has images; this run reads text only"),
        ({"content": "a", "audio": {"id": "x"}}, "message 1 has audio"),
    ],
)
def test_what_is_not_text_is_refused(message: Row, told: str) -> None:
    messages = [*said("u:1"), {"role": "user"} | message, *said("a:2")]
    with pytest.raises(BadDocument) as caught:
        refuse_media(messages)
    assert_matches(caught.value, told)
    refuse_media([*said("u:1"), {"role": "user", "content": "a", "images": [], "audio": None}])


def test_any_order_of_roles_is_the_templates_business() -> None:
    for turns in (("a:0", "u:1", "a:2"), ("u:1", "a:2", "a:3"), ("u:1", "u:2", "a:3"), ("a:0",)):
        check_messages(said(*turns))
    check_messages([{"role": "critic", "content": "x"}, *said("a:2", "t:3", "u:4")])
    check_messages([*said("u:1"), {"role": "assistant", "content": "", "thinking": "hm"}])


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            {"role": "tool", "content": {"t": 3}},
            r"content of message 0 \(tool\) is an object; write",
        ),
        ({"role": "user", "content": 3}, r"content of message 0 \(user\) is a int"),
        ({"role": "user", "content": None}, r"message 0 \(user\) has no content"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "only function_call: .*tool_calls"),
        ({"role": "tool_call", "content": CALL}, "role 'tool_call'; write it as tool_calls"),
        ({"role": "gpt", "content": "x"}, "know it as assistant: rename it"),
    ],
)
def test_messages_that_cannot_be_read_say_what_to_do(message: Row, told: str) -> None:
    with pytest.raises(BadDocument) as caught:
        check_messages([message, *said("a:1")])
    assert_matches(caught.value, told)


def test_parts_that_are_no_text_say_where_their_text_belongs() -> None:
    for kind, told in (("thinking", "reasoning_content"), ("tool_use", "tool_calls")):
        part = {"type": kind, "text": "x"}
        with pytest.raises(BadDocument) as caught:
            texts_of(1, {"role": "assistant", "content": [part]})
        assert_matches(caught.value, rf"part 0 of message 1 .*'{kind}', but only text .*{told}")


def test_schemas_and_values_in_tables_are_objects_as_json_text() -> None:
    row = {
        "messages": said("u:1", "a:2"),
        "tools": [json.dumps(TOOLS[0])],
        "chat_template_kwargs": '{"deep": false}',
    }
    found, _ = read_example(row)
    assert isinstance(found, Conversation)
    assert found.tools == TOOLS and found.values == {"deep": False}


def test_documents_that_a_template_reads_are_a_variable_of_it() -> None:
    known = template_variables("{% for d in documents %}{{ d.text }}{% endfor %}{{ messages }}")
    assert known == ("documents",)
    with pytest.raises(BadDocument) as caught:
        refuse_variables(["documents"], {"documents": [{"text": "a"}]}, known)
    assert_matches(caught.value, "the template reads documents")


def test_variables_and_values_of_a_template() -> None:
    template = (
        "{{ bos_token }}{% if deep is defined and not deep %}{% endif %}{% set x = mood %}"
        "{% for m in messages %}{% generation %}{{ m.content + tone|default('') }}"
        "{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}{{ raise_exception(x) }}"
    )
    known = template_variables(template)
    assert known == ("deep", "mood", "tone")
    assert template_variables("{% if") == ()
    check_values({"deep": 1}, known, "chat_template_kwargs")
    with pytest.raises(BadDocument) as caught:
        check_values({"deeper": 1}, known, "chat_template_kwargs")
    assert_matches(caught.value, "chat_template_kwargs has deeper, .*it reads deep, mood, tone")
    with pytest.raises(BadDocument) as caught:
        refuse_variables(["id", "mood"], {"id": 3, "mood": "glad"}, known)
    assert_matches(caught.value, r'reads mood, .*"chat_template_kwargs": {"mood": \.\.\.}')


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**9 }}{{ a }}",
        "{{ 'x' | center(10**9) }}{{ a }}",
        "{% autoescape 'x' * 10**9 %}{{ a }}{% endautoescape %}",
        "{% set b = 'x' * 10**9 %}{{ a ~ b }}",
    ],
)
def test_names_are_found_without_the_values_of_constants(template: str) -> None:
    """Jinja would compute them, in gigabytes, in a process that has no limit."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert template_variables(template) == ("a",)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_values_on_a_command_line_are_json_or_words() -> None:
    given = ["a=false", "b=3", 'c="x"', "d=high", 'e={"f": [1]}', "g=null"]
    values = {"a": False, "b": 3, "c": "x", "d": "high", "e": {"f": [1]}, "g": None}
    assert parse_values(given) == values
    for wrong, told in (
        ("a", "must be NAME=VALUE"),
        ("=1", "must be NAME=VALUE"),
        ("a=False", "value must be false"),
        ("a=[1", "value must be JSON"),
        ("a=", "value must be JSON"),
    ):
        with pytest.raises(ValueError, match=f"--template-value .*{told}"):
            parse_values([wrong])


def test_values_that_all_conversations_have() -> None:
    common = CommonValues()
    assert common.values == {}
    common.add({"deep": False, "mood": 1})
    common.add({"deep": False, "mood": True, "more": 1})
    assert common.values == {"deep": False}
    common.add({})
    assert common.values == {}
