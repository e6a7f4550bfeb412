"""Templates that fail, loop or allocate: one sentence with the file and the line, within limits."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moefold.data.chats.answers import TrainedConversation
from moefold.data.chats.renderer import Limits, Renderer, TemplateText
from moefold.data.chats.template import ChatTemplate
from moefold.data.config import DataError
from moefold.data.corpora.records import BadDocument

SMALL = Limits(seconds=0.2, chars=2**16, n_bytes=2**25)
TALK = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GROWS = "{% set ns = namespace(a=16 * 'abcd') %}\n{% for i in range(20) %}\n"


def said(text: str, limits: Limits = SMALL, content: str = "a") -> Sequence[str]:
    """Return what is rendered or said of two conversations."""
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
    with Renderer(TemplateText(text, {"eos_token": "</s>"}, "f.jinja"), limits) as renderer:
        answers = list(renderer.examples_of([TrainedConversation(messages, [1])] * 2))
    return [
        ": ".join(each.args) if isinstance(each, BadDocument) else each[0].text for each in answers
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # A few million steps, which the limit of 0.2 s ends at a twentieth.
        (
            "{% for i in range(2500) %}\n{% for j in range(2500) %}{% endfor %}{% endfor %}",
            "takes more than 0.2 s (line 2 of f.jinja)",
        ),
        ("\n{{ messages[0].content * 70000 }}", "writes more than 65,544 characters (line 2 of"),
        (
            "{% for i in range(7000) %}\n{{ '0123456789' }}{% endfor %}",
            "writes more than 65,544 characters (line",
        ),
        (GROWS + "{% set ns.a = ns.a + ns.a %}{% endfor %}b", "too much memory (line 3 of"),
        (GROWS + "{% set ns.a = (ns.a, ns.a) | join %}{% endfor %}b", "too much memory (line"),
        ("{% macro f(x) %}\n{{ f(x) }}{% endmacro %}{{ f(1) }}", "recurses without end"),
        ("{{ 'a' }}\n{{ '\\ud800' }}", "half of a surrogate pair, which is no character (line"),
        ("{{ 'a' }}\n{{ 1 // (messages | length - 2) }}", "by zero (line 2 of"),
        ("\n{{ 'ab' * 2 ** 29 }}", "needs too much memory (line 2 of"),
        ("{% set n = namespace() %}\n{% set n._x = 1 %}", "the name '_x' (line 2 of"),
        ("\n{{ messages | map(attribute='x.y.z') | sum }}", "(line 2 of f.jinja)"),
    ],
)
def test_what_a_template_does_wrong_is_told_with_its_line(text: str, reason: str) -> None:
    first, second = said(text)
    assert reason in first
    assert first == second
    if "more than" in reason or "memory" in reason:
        assert first.startswith("the template exceeds a limit: it ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "\n{% break %}",
            "f.jinja: line 2 of the chat template: SyntaxError: 'break' outside loop",
        ),
        ("{% for m in messages %}{% endfor %}\n\n{% continue %}", "f.jinja: line 3 of the chat"),
        ("\n{{ " + "9" * 5000 + " }}", "f.jinja: line 2 of the chat template: ValueError: "),
        ("\n{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "line 2 of the chat template: it recurses"),
        (
            "\n" + "{% for a in b %}" * 25 + "{% endfor %}" * 25,
            "line 2 of the chat template: SyntaxError: too many statically nested blocks",
        ),
        ("{{ a }}\n{{ 'b", "f.jinja: line 2 of the chat template: unexpected char"),
    ],
)
def test_what_cannot_be_compiled_is_told_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(DataError, match=r"correct it, or set data\.tokenizer") as caught:
        said(text)
    assert reason in str(caught.value)


def test_a_step_without_an_end_is_ended_with_its_process() -> None:
    """One multiplication of some seconds does not notice the alarm; others are answered."""
    slow = "{{ (7 + messages | length) ** (9 ** 7) % 7 }}"
    text = "{% if messages[0].content == 'slow' %}" + slow + "{% endif %}" + TALK
    talks = [
        [{"role": "user", "content": word}, {"role": "assistant", "content": "b"}]
        for word in ("a", "slow", "c")
    ]
    with Renderer(TemplateText(text, {"eos_token": "</s>"}, "f.jinja"), SMALL) as renderer:
        found = list(renderer.examples_of([TrainedConversation(each, [1]) for each in talks]))
        again = renderer.text_of(talks[2][:1], prompt=True)
    assert isinstance(found[1], BadDocument)
    assert found[1].args[0] == "the template exceeds a limit"
    assert isinstance(found[0], list) and isinstance(found[2], list)
    assert found[2][0].text == "<|user|>c</s><|assistant|>b</s>"
    assert again == "<|user|>c</s><|assistant|>"


def test_long_conversations_may_be_written_whole() -> None:
    long = "x" * 300_000
    assert said(TALK, content=long)[0] == f"<|user|>{long}</s><|assistant|>b</s>"


def test_the_process_ends_with_its_renderer() -> None:
    """Other tests of the process may have children of their own, which may end meanwhile."""
    before = set(os.listdir("/proc/self/fd"))
    others = _children()
    with Renderer(TemplateText(TALK, {})) as renderer:
        (child,) = _children() - others
        assert len(os.listdir(f"/proc/{child}/fd")) <= 5  # standard ones and two pipes
        renderer.text_of([{"role": "user", "content": "a"}])
    assert _children() <= others
    assert set(os.listdir("/proc/self/fd")) <= before


def _children() -> set[str]:
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(task.read_text().split())


def test_options_of_the_data_do_not_replace_the_conversation() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ tools }}{{ prompt }}{{ max_chars }}", {})
    options: dict[str, Any] = {"messages": [], "tools": [1], "prompt": "p", "max_chars": 3}
    assert template.render([{"content": "a"}], None, options).text == "aNonep3"
