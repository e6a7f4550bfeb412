"""Fields of messages: which are known, which of them say that an answer is not trained.

No field is ignored: a field is read by the rendering of conversations, obeyed here, read by the
template, or refused by name. Names are those of OpenAI's fine-tuning files (``weight``), axolotl
(``train``, ``training``), verl (``loss_mask``, ``trainable``) and ms-swift (``loss``), and those of
messages as ``transformers`` passes them to templates.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from moefold.data.chats.messages import ASSISTANT, REASONING, Message
from moefold.data.corpora.records import BadDocument

TRAINED = ("weight", "train", "training", "loss", "loss_mask", "trainable")
"""Fields that say whether an answer is trained: false or 0, true or 1."""
KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)
"""Fields that rendering reads."""
MEDIA = (
    "image",
    "images",
    "image_url",
    "input_image",
    "audio",
    "audios",
    "audio_url",
    "input_audio",
    "video",
    "videos",
    "video_url",
    "file",
    "files",
)
"""Names of fields, columns and types of parts with what is not text."""
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "tool_call": ASSISTANT,
    "observation": "tool",
    "tool_response": "tool",
    "tool": "tool",
}
"""Roles by their names in ShareGPT's format (``from``)."""
CALLS = ("function_call", "tool_call")
"""ShareGPT's names of the role of an answer that is a call, as JSON text."""
PART = ("type", "text")
"""Fields of a part of a message's content."""
CONVERSIONS = {
    "function_call": "write it as tool_calls: [{type: function, function: {name, arguments}}]",
    "train_detail": "a part of an answer cannot be left untrained; split the answer, or set train",
    "training_detail": "a part of an answer cannot be left untrained; split it, or set training",
    "refusal": "write its text as content",
}
"""What to do about fields of other tools that are not read."""
ONLY_TEXT = "this run reads text only; remove it, or leave out the example"


def empty(value: Any) -> bool:
    """Return whether a field's value says nothing, as in tables, whose rows have all fields."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def without(value: Any, ignored: Collection[str]) -> Any:
    """Return messages, or a part of them, without the fields of the given names."""
    if isinstance(value, list):
        return [without(each, ignored) for each in value]
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if name not in ignored}
        return kept | {name: without(kept[name], ignored) for name in kept if name == "content"}
    return value


def is_trained(message: Message, number: int) -> bool:
    """Return whether a message's own fields let it be trained, as they do by default.

    Raises:
        BadDocument: if the fields contradict each other, are neither true nor false, or ask to
            train a message that is no answer.
    """
    said = {name: message[name] for name in TRAINED if not empty(message.get(name))}
    for name, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            detail = f"message {number} has {name}: {value!r}; only 0 and 1, or false and true, "
            raise BadDocument("a share of an answer", f"{detail}are obeyed")
    values = {bool(value) for value in said.values()}
    if len(values) > 1:
        fields = ", ".join(f"{name}: {value!r}" for name, value in said.items())
        detail = f"message {number} has {fields}; keep one of them"
        raise BadDocument("fields that contradict each other", detail)
    role = message.get("role")
    if values == {True} and role != ASSISTANT:
        (name, *_) = said
        answers = f"only messages with role {ASSISTANT} are trained"
        detail = f"message {number} ({role}) has {name}: {said[name]!r}, but {answers}; remove it"
        raise BadDocument("training of a question", detail)
    return values != {False}


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ``BadDocument`` for a message without role or content, or if there is no answer.

    The order of roles is the template's business.
    """
    for number, message in enumerate(messages):
        role = message.get("role")
        content = message.get("content")
        place = f"message {number} ({role})"
        if not isinstance(role, str) or not role:
            detail = (
                f"message {number} has role {role!r}, which is not a name; write user, or others"
            )
            raise BadDocument("unknown role", detail)
        if ROLES.get(role, role) != role:
            remedy = f"templates know it as {ROLES[role]}: rename it"
            if role in CALLS:
                remedy = CONVERSIONS["function_call"]
            raise BadDocument("unknown role", f"message {number} has role {role!r}; {remedy}")
        answers = any(message.get(name) for name in ("content", "tool_calls", *REASONING))
        if role == ASSISTANT and not answers:
            other = next((name for name in CONVERSIONS if not empty(message.get(name))), None)
            detail = f"has only {other}: {CONVERSIONS[other]}" if other else "is empty"
            raise BadDocument("example without an answer", f"{place} {detail}")
        if content is None and role != ASSISTANT:
            raise BadDocument("no content", f"{place} has no content")
        if not isinstance(content, str | list | None):
            kind = "an object" if isinstance(content, dict) else f"a {type(content).__name__}"
            detail = f"the content of {place} is {kind}; write it as text, such as its JSON"
            raise BadDocument("content that is no text", detail)
    if not any(message["role"] == ASSISTANT for message in messages):
        detail = f"the last message has role {messages[-1]['role']}" if messages else ""
        detail = detail or "it has no messages"
        detail += f"; there must be one with role {ASSISTANT}"
        raise BadDocument("example without an answer", detail)


def untrained(messages: Sequence[Message]) -> frozenset[int]:
    """Return the numbers of the messages whose own fields say that they are not trained."""
    return frozenset(n for n, message in enumerate(messages) if not is_trained(message, n))


def refuse_media(messages: Sequence[Message]) -> None:
    """Raise ``BadDocument`` for the first message with an image, audio, video or file."""
    for number, message in enumerate(messages):
        for name in MEDIA:
            if not empty(message.get(name)):
                raise BadDocument("not text", f"message {number} has {name}; {ONLY_TEXT}")
        for place, part in enumerate(_parts(message)):
            kinds = [part.get("type"), *(n for n in part if not empty(part[n]))]
            if media := next((kind for kind in kinds if kind in MEDIA), None):
                detail = f"part {place} of message {number} is of type {media}; {ONLY_TEXT}"
                raise BadDocument("not text", detail)


def refuse_unread(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> None:
    """Raise ``BadDocument`` for the first field of a message that changes nothing in its text.

    Args:
        messages: the conversation, without fields that are obeyed otherwise.
        render: writes a conversation as text. It is called only if there are uncommon fields.
    """
    written: str | None = None
    for number, message in enumerate(messages):
        for name, value in message.items():
            if empty(value) or (name in KNOWN and not _names_a_speaker(message, name)):
                continue
            written = render(messages) if written is None else written
            others = {key: each for key, each in message.items() if key != name}
            if render([*messages[:number], others, *messages[number + 1 :]]) == written:
                raise _unknown(f"message {number} ({message.get('role')})", name, KNOWN + TRAINED)
        for place, part in enumerate(_parts(message)):
            if part.get("type") == "text":
                for name in (n for n in part if n not in PART and not empty(part[n])):
                    raise _unknown(f"part {place} of message {number}", name, PART)


def _parts(message: Message) -> list[dict[str, Any]]:
    """Return the parts of a message's content; one that is no object is empty here."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [part if isinstance(part, dict) else {} for part in parts]


def _names_a_speaker(message: Message, name: str) -> bool:
    # The name of a tool's result repeats the call's, so templates need not write it.
    return name == "name" and message.get("role") not in ("tool", "function")


def _unknown(place: str, name: str, known: Sequence[str]) -> BadDocument:
    remedy = CONVERSIONS.get(name, f"known fields: {', '.join(known)}")
    detail = (
        f"{place} has {name}, which neither this run nor the template reads; {remedy}; remove it, "
        f"or set ignore: [{name}] in the source"
    )
    return BadDocument("a field that nothing reads", detail)
