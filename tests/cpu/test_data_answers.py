"""What of a conversation is in a template's text, in which form, and which answers are labels.

Texts are compared with transformers' rendering of the messages as they should be passed.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moefold.data.chats.answers import AnswerFinder, TrainedConversation
from moefold.data.chats.template import ChatTemplate
from moefold.data.corpora.records import BadDocument
from moefold.finetune import PLAIN
from tests.chats import TOOLS, template_of

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HEAD = "{% for m in messages %}<|{{ m.role }}|>"
FOOT = "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
FUNCTION = "{% set f = c.function or c %}"
CALLS = "{% for c in m.tool_calls or [] %}" + FUNCTION
PLAIN_TEXT = HEAD + "{{ m.content }}" + FOOT
THINKS = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}"
    + HEAD
    + "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}"
    + "</think>{% endif %}{{ m.content }}"
    + FOOT
)
USER = {"role": "user", "content": "how warm is it?"}
NOT_PARSED = '{"city": "Oslo", "days": 2, "exact": true, "near": ["a", {"b": null}]}'


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"type": "function", "id": "call0000000001", "function": function, **more}


def asked(*others: dict[str, Any]) -> list[dict[str, Any]]:
    return [USER, *others]


def found(
    template: str,
    messages: Sequence[dict[str, Any]],
    answers: Any = "auto",
    tools: Any = None,
) -> list[str]:
    """Return the texts to train on, with labels between ⟦ and ⟧."""
    finder = AnswerFinder(ChatTemplate(template, SPECIAL, "f.jinja"))
    trained = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    texts = list[str]()
    for text, spans, _ in finder.examples_of(
        TrainedConversation(messages, trained, answers, tools)
    ):
        for start, end in reversed(spans):
            text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
        texts.append(text)
    return texts


def plain(texts: Sequence[str]) -> list[str]:
    return [re.sub("[⟦⟧]", "", text) for text in texts]


def theirs(template: str, messages: Sequence[dict[str, Any]], tools: Any = None) -> str:
    """Return what transformers renders of these very messages."""
    texts, _ = render_jinja_template([messages], tools=tools, chat_template=template, **SPECIAL)
    return texts[0]


def refused(template: str, messages: Sequence[dict[str, Any]], **how: Any) -> str:
    with pytest.raises(BadDocument) as caught:
        found(template, messages, **how)
    return ": ".join(caught.value.args)


WRITES_ARGUMENTS = {
    "as JSON": "{{ f.name }} {{ f.arguments | tojson }}",
    "each": "{{ f.name }}"
    "{% for k, v in f.arguments | items %}<{{ k }}>{{ v | tojson }}{% endfor %}",
    "sorted": "{{ f.name }}"
    "{% for k, v in f.arguments | dictsort %}{{ k }}{{ v | tojson }}{% endfor %}",
    "indented": "{{ f.name }}{{ f.arguments | tojson(indent=2) }}",
    "the call": "{{ f | tojson }}",
    "as ASCII": "{{ f.name }}{{ f.arguments | tojson(ensure_ascii=True, sort_keys=True) }}",
    "if no text": "{{ f.name }}"
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}",
}


@pytest.mark.parametrize("written", WRITES_ARGUMENTS.values(), ids=WRITES_ARGUMENTS)
@pytest.mark.parametrize("arguments", [NOT_PARSED, '{"s": "é \\n</s>"}', "{}", ""])
def test_arguments_as_text_become_objects(written: str, arguments: str) -> None:
    template = HEAD + "{{ m.content or '' }}" + CALLS + written + "{% endfor %}" + FOOT
    value = json.loads(arguments or "{}")
    rest = {"role": "tool", "content": "cold", "tool_call_id": "call0000000001"}, answer("cold!")
    as_text = found(template, asked(answer("", tool_calls=[call(arguments)]), *rest))
    as_object = found(template, asked(answer("", tool_calls=[call(value)]), *rest))
    assert as_text == as_object
    assert plain(as_text) == [theirs(template, asked(answer("", tool_calls=[call(value)]), *rest))]


@pytest.mark.parametrize(
    "written", ["{{ f.name + ' ' + f.arguments }}", "{{ f.name }} {{ f.arguments }}"]
)
def test_templates_that_take_text_get_text(written: str) -> None:
    """An object would fail, or be printed as Python does."""
    template = HEAD + "{{ m.content or '' }}" + CALLS + written + "{% endfor %}" + FOOT
    (text,) = found(template, asked(answer(None, tool_calls=[call(NOT_PARSED)])))
    assert text == f"<|user|>{USER['content']}</s><|assistant|>⟦weather {NOT_PARSED}</s>⟧"
    (text,) = found(template, asked(answer(None, tool_calls=[call({"é": [1, "x"]})])))
    assert text.endswith('⟦weather {"é": [1, "x"]}</s>⟧')


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{", "arguments of call 0 of message 1 (assistant) are not JSON"),
        ("[1]", "are not an object, but a list"),
        ([1], "are not an object, but a list"),
        ("oslo", "are not JSON"),
        ("3", "are not an object, but a int"),
    ],
)
def test_arguments_that_are_no_object_are_refused(arguments: Any, said: str) -> None:
    template = HEAD + "{{ m.content or '' }}" + CALLS + "{{ f | tojson }}{% endfor %}" + FOOT
    assert said in refused(template, asked(answer("", tool_calls=[call(arguments)])))


PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}, "three"]
LISTS = {
    "of text alone": (PLAIN_TEXT, None),
    "that trims": (HEAD + "{{ m.content | trim }}" + FOOT, None),
    "that concatenates": ("{% for m in messages %}{{ m.role + m.content }}" + FOOT, None),
    "that prints JSON": (HEAD + "{{ m.content | tojson }}" + FOOT, None),
    "that walks": (
        HEAD + "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}" + FOOT,
        [{"type": "text", "text": t} for t in ("one ", "two", "three")],
    ),
    "that takes the first": (
        HEAD + "{{ m.content if m.content is string else m.content[0].text }}" + FOOT,
        None,
    ),
}


@pytest.mark.parametrize(("template", "passed"), LISTS.values(), ids=LISTS)
def test_lists_of_text_are_joined_unless_a_template_walks_over_them(
    template: str, passed: Any
) -> None:
    content = passed or "one \ntwo\nthree"
    for role in ("user", "system"):
        given = [{"role": role, "content": PARTS}, answer(PARTS)]
        wanted = [{"role": role, "content": content}, answer(content)]
        assert plain(found(template, given)) == [theirs(template, wanted)]


def test_a_list_of_text_does_not_hide_what_is_left_out() -> None:
    """Not "part 0", which a template of text alone gets joined."""
    given = [{"role": "user", "content": PARTS}, answer("three", reasoning_content="hm")]
    assert "the reasoning of message 1 (assistant)" in refused(PLAIN_TEXT, given)


def test_templates_of_lists_get_text_as_a_list() -> None:
    template = HEAD + "{% for p in m.content %}{{ p.text or '' }}{% endfor %}" + FOOT
    listed = [{"type": "text", "text": "warm"}]
    wanted = [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}]
    assert plain(found(template, asked(answer("warm")))) == [
        theirs(template, [*wanted, answer(listed)])
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image"},
        {"type": "audio", "audio": "a.wav"},
        {"type": "text"},
        {"text": 3},
        7,
    ],
)
def test_parts_that_are_not_text_are_refused(part: Any) -> None:
    given = [{"role": "user", "content": ["look", part]}, answer("a")]
    assert "a part that is not text: part 1 of message 0 (user)" in refused(PLAIN_TEXT, given)


ASKS_FOR_NULL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m['content'] is none %}<A>"
    + CALLS
    + "{{ f.name }}{{ f.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'assistant' and m['content'] is not none %}<A>{{ m['content'] }}"
    "{% else %}<U>{{ m['content'] }}{% endif %}" + FOOT.replace("<|assistant|>", "<A>")
)
NULLS = {
    "asks for null": (ASKS_FOR_NULL, {"content": None}),
    "prints it": (HEAD + "{{ m.content }}" + CALLS + "{{ f | tojson }}{% endfor %}" + FOOT, ""),
    "as JSON": (HEAD + "{{ m.content | tojson }}" + CALLS + "{{ f }}{% endfor %}" + FOOT, ""),
    "tests it": (
        HEAD + "{% if m.content is string %}{{ m.content }}{% endif %}"
        "{% if m.content is not defined %}#{% endif %}"
        + CALLS
        + "{{ f | tojson }}{% endfor %}"
        + FOOT,
        None,
    ),
    "adds it": (
        "{% for m in messages %}{{ m.role + m.content }}"
        + CALLS
        + "{{ f | tojson }}{% endfor %}"
        + FOOT,
        "",
    ),
}


@pytest.mark.parametrize("name", NULLS)
def test_null_stays_null_where_a_template_asks_for_it(name: str) -> None:
    template, content = NULLS[name]
    passed = {"role": "assistant", "tool_calls": [call({"a": 1})]}
    if content is not None:
        passed |= content if isinstance(content, dict) else {"content": content}
    rest = {"role": "tool", "content": "cold"}, answer("it is cold")
    for given in (answer(None, tool_calls=[call('{"a": 1}')]), passed):
        if name == "as JSON":  # a call as Python prints it
            assert "as Python does" in refused(template, asked(given, *rest))
            continue
        assert plain(found(template, asked(given, *rest))) == [
            theirs(template, asked(passed, *rest))
        ]
    if name == "asks for null":
        empty = answer("", tool_calls=[call("{}")])
        assert "<A>⟦weather{}</s>⟧" in found(template, asked(empty, *rest))[0]
        both = answer("hm", tool_calls=[call("{}")])
        assert "the name of call 0 of message 1" in refused(template, asked(both, *rest))


WRITES_ALL = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    + HEAD
    + "{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    + CALLS
    + "{{ f | tojson }}{% endfor %}"
    + FOOT
)
WHOLE = [
    {"role": "system", "content": "be brief"},
    USER,
    answer("one moment", reasoning_content="hm", tool_calls=[call(NOT_PARSED)]),
    {"role": "tool", "content": "cold"},
    answer("it is cold"),
]
LOSSES = {
    "the name of call": ("{{ f | tojson }}", "{{ f.arguments | tojson }}"),
    "the key 'city' in the arguments of call": (
        "{{ f | tojson }}",
        "{{ f.name }}{{ f.arguments.city }}",
    ),
    "the key 'city' in the arguments of call 0": (
        "{{ f | tojson }}",
        "{{ f.name }}{{ f.arguments.values() | list | tojson }}",
    ),
    "the reasoning of message 2": ("{{ m.reasoning_content or '' }}", ""),
    "the text of message 0 (system)": (HEAD, "{% for m in messages if m.role != 'system' %}<|a|>"),
    "the text of message 3 (tool)": (HEAD, "{% for m in messages if m.role != 'tool' %}<|a|>"),
    "the text of message 2 (assistant)": (
        "{{ m.content or '' }}",
        "{{ '' if m.tool_calls else m.content }}",
    ),
    "the key 'expert' in the schema of tool 0": (
        "{{ t | tojson }}",
        "{{ t.function.name }}{{ t.function.description }}",
    ),
    'description "charge d\'un expert 日本" in the schema of tool 0': (
        "{{ t | tojson }}",
        "{{ t.function.name }}{{ t.function.parameters | tojson }}",
    ),
    "name 'load' in the schema of tool 0": ("{{ t | tojson }}", ""),
}


@pytest.mark.parametrize("part", LOSSES)
def test_what_a_template_leaves_out_is_refused_by_name(part: str) -> None:
    assert plain(found(WRITES_ALL, WHOLE, tools=TOOLS))[0].count("cold") == 2
    old, new = LOSSES[part]
    assert old in WRITES_ALL
    said = refused(WRITES_ALL.replace(old, new), WHOLE, tools=TOOLS)
    assert said.startswith(f"the template leaves out a part: it does not write all of {part}")


def test_a_short_word_elsewhere_hides_no_loss() -> None:
    """The word "a" is in every text."""
    given = asked(answer("a", reasoning_content="a"))
    assert "the reasoning of message 1" in refused(PLAIN_TEXT, given)


def test_the_plain_template_writes_all() -> None:
    (text,) = found(PLAIN.read_text(), WHOLE, tools=TOOLS)
    parsed = [
        m | {"tool_calls": [call(json.loads(NOT_PARSED))]} if "tool_calls" in m else m
        for m in WHOLE
    ]
    assert plain([text]) == [theirs(PLAIN.read_text(), parsed, TOOLS)]
    assert text.split("\n", 1)[1] == (
        "System: be brief\nUser: how warm is it?\nAnswer: ⟦<think>\nhm\n</think>\none moment\n"
        f'Call: {{"name": "weather", "arguments": {NOT_PARSED}}}</s>⟧'
        "Tool: cold\nAnswer: ⟦it is cold</s>⟧"
    )


TALK = [
    USER,
    answer("cold", reasoning_content="hm"),
    {"role": "user", "content": "sure?"},
    answer("yes", reasoning_content="well"),
]


def test_each_answer_is_trained_in_the_text_before_it() -> None:
    first = "<|user|>how warm is it?</s><|assistant|>"
    alone = first + "⟦<think>hm</think>cold</s>⟧"
    last = first + "cold</s><|user|>sure?</s><|assistant|>⟦<think>well</think>yes</s>⟧"
    assert found(THINKS, TALK) == found(THINKS, TALK, "each") == [alone, last]
    assert found(THINKS, TALK, "last") == [last]
    assert plain([alone, last]) == [theirs(THINKS, TALK[:2]), theirs(THINKS, TALK)]
    said = refused(THINKS, TALK, answers="all")
    assert said.startswith("the template changes earlier messages: up to message 1 it writes '<thi")
    assert "(answers: each)" in said
    marked = THINKS.replace(HEAD, HEAD + "{% if m.role == 'assistant' %}{% generation %}").replace(
        FOOT, "</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}" + FOOT[4:]
    )
    assert found(marked, TALK) == [alone, last]
    assert "the reasoning of message 1" in refused(marked, TALK, answers="all")


def test_a_beginning_that_stays_is_trained_once() -> None:
    """Only the reasoning before the last question is left out."""
    talk = [USER, answer("a"), {"role": "user", "content": "b"}, *TALK[1:]]
    texts = found(THINKS, talk, "each")
    assert len(texts) == 2 and texts[0].count("⟦") == 2 and texts[1].count("⟦") == 1
    assert plain(texts) == [theirs(THINKS, talk[:4]), theirs(THINKS, talk)]
    unmarked = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in talk]
    (one,) = found(THINKS, unmarked, "each")
    assert [one] == found(THINKS, unmarked, "all") and one.count("⟦") == 3


MOVES = (
    "{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>"
    "{% if m is sameas last %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }};{% endif %}{% endif %}"
    "{{ m.content }}" + FOOT
)


def test_a_system_text_that_moves_to_the_last_question() -> None:
    talk = [{"role": "system", "content": "brief"}, *TALK]
    talk = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in talk]
    texts = found(MOVES, talk)
    assert plain(texts) == [theirs(MOVES, talk[:3]), theirs(MOVES, talk)]
    assert texts[1].endswith("<|user|>brief;sure?</s><|assistant|>⟦yes</s>⟧")


def test_channels_whose_last_answer_ends_otherwise() -> None:
    template = template_of("gpt_oss", marked=False)
    texts = found(template, TALK)
    assert plain(texts) == [
        theirs(template, _thinking(TALK[:2])),
        theirs(template, _thinking(TALK)),
    ]
    assert all(text.endswith("<|return|>⟧") and text.count("⟦") == 1 for text in texts)


def _thinking(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    known = [m | {"thinking": m.get("reasoning_content")} for m in messages]
    return [{k: v for k, v in m.items() if v is not None} for m in known]


BEGINS = "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"


@pytest.mark.parametrize("content", ["it is cold", "<b>cold</b>", "<think", "<think>\n"])
def test_the_prompts_own_beginning_of_an_answer_is_not_written(content: str) -> None:
    """As of models that always think: the conversation has what comes after."""
    template = PLAIN_TEXT.replace(FOOT, "</s>{% endfor %}" + BEGINS)
    (text,) = found(template, asked(answer(content)))
    expected = f"<|assistant|>⟦{content}</s>⟧"
    if content == "<think>\n":  # it is the prompt's beginning, which is given at inference
        expected = "<|assistant|><think>\n⟦</s>⟧"
    assert text.endswith(expected)


def test_a_text_that_ends_with_more_than_its_messages() -> None:
    """An answer is where texts with other answers differ from this one."""
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|end|>"
    talk = [*asked(answer("cold")), *asked(answer("yes"))]
    texts = found(template, talk)
    assert plain(texts) == [theirs(template, talk[:2]), theirs(template, talk)]
    assert texts[1].endswith("<|assistant|>⟦yes</s><|end|>⟧")


def test_reasoning_that_is_cut_from_an_answers_text_is_told() -> None:
    cuts = HEAD + "{{ m.content.split('</think>')[-1] }}</s>{% endfor %}" + BEGINS
    given = asked(answer("<think>\nhmm\n</think>\n\nit is cold"))
    for answers in ("auto", "all", "each", "last"):
        said = refused(cuts, given, answers=answers)
        assert "it does not write all of the text of message 1 (assistant); change the tem" in said
        assert "answers:" not in said
    (text,) = found(cuts, asked(answer("it is cold")), "last")
    assert text.endswith("<|assistant|>⟦it is cold</s>⟧")


def test_a_template_that_reads_reasoning_out_of_the_text_is_followed() -> None:
    """It writes what it found, so that nothing is lost, except in the history."""
    template = (
        HEAD + "{% if '</think>' in m.content and loop.last %}"
        "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}\n</think>\n\n"
        "{% endif %}{{ m.content.split('</think>')[-1].strip() }}" + FOOT
    )
    one = asked(answer("<think>hmm, 3 < 4\n</think>cold  "))
    assert found(template, one) == [
        theirs(template, one).replace("<|assistant|>", "<|assistant|>⟦") + "⟧"
    ]
    two = [*one, USER, answer("<think>well</think>yes")]
    assert "(answers: each)" in refused(template, two, answers="all")
    assert plain(found(template, two)) == [theirs(template, one), theirs(template, two)]
