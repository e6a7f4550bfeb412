"""Replies: reasoning and answers apart, whole or while they are written."""

from typing import Any

import pytest

from moefold.data.chats.replies import ReplyForm

THINKS = "{{ m.reasoning_content }}<think></think>"
CHANNELS = "{{ m.thinking }}<|channel|>"
REPLY = (
    "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant<|channel|>commentary to=f "
    "<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>cold"
)


@pytest.mark.parametrize(
    ("template", "prompt", "reply", "parts"),
    [
        (
            THINKS,
            "a\n",
            "<think>\nhm\n</think>\n\ncold",
            [("reasoning", "\nhm\n"), ("answer", "cold")],
        ),
        (
            THINKS,
            "a\n<think>\n",
            "hm\n</think>\n\ncold",
            [("reasoning", "hm\n"), ("answer", "cold")],
        ),
        (THINKS, "a\n<think>\n", "hm", [("reasoning", "hm")]),
        (THINKS, "a<think>\n\n</think>\n\n", "cold", [("answer", "cold")]),
        (THINKS, "a\n", "cold </think> b", [("answer", "cold </think> b")]),
        (THINKS, "a\n", "cold<|end|>", [("answer", "cold")]),
        (
            "[THINK][/THINK]",
            "a",
            "[THINK]hm[/THINK]cold",
            [("reasoning", "hm"), ("answer", "cold")],
        ),
        ("plain", "a", "<think>hm</think>cold", [("answer", "<think>hm</think>cold")]),
        (CHANNELS, "a", REPLY, [("reasoning", "hm\n"), ("commentary", "{}"), ("answer", "cold")]),
        (CHANNELS, "a", "cold", [("answer", "cold")]),
        (CHANNELS, "a", "<|channel|>analysis<|message|>hm", [("reasoning", "hm")]),
        (CHANNELS, "a", "<|message|>cold<|return|>", [("answer", "cold")]),
        (CHANNELS, "a", "<|channel|>fin", []),
    ],
)
def test_parts_of_a_reply(template: str, prompt: str, reply: str, parts: Any) -> None:
    form = ReplyForm(template, prompt, ("<|end|>",))
    assert [tuple(piece) for piece in form.split(reply)] == parts
    shown = list[str]()  # no piece that was shown is taken back
    for size in range(len(reply) + 1):
        found = ["|".join(piece) for piece in form.split(reply[:size], ended=False)]
        assert all(new.startswith(old) for old, new in zip(shown, found, strict=False))
        assert len(found) >= len(shown), reply[:size]
        shown = found


@pytest.mark.parametrize(
    ("template", "reply", "message"),
    [
        (THINKS, "<think>\nhm\n</think>\n\ncold", {"content": "cold", "reasoning_content": "hm"}),
        (THINKS, "cold", {"content": "cold"}),
        (CHANNELS, REPLY, {"content": "cold", "thinking": "hm"}),
        # Such a template cuts the reasoning out of the content itself.
        (
            "{{ m.content.split('</think>')[-1] }}",
            "<think>hm</think>\n\ncold",
            {"content": "<think>hm</think>\n\ncold"},
        ),
    ],
)
def test_a_reply_goes_back_as_its_template_wants(template: str, reply: str, message: Any) -> None:
    found = ReplyForm(template, "a").message(reply)
    assert found == {"role": "assistant"} | message
