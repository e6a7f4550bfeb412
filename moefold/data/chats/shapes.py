"""Shapes of examples: from the columns of a row to a conversation, or to a text to complete.

A shape is one entry of ``EXAMPLES`` or ``PAIRS``: the columns that it needs, those that it may
have, and the function that reads them. Names are those of TRL, and of formats that published data
has: ShareGPT's ``conversations``, Alpaca's ``instruction``, OpenAI's ``preferred_output``,
ms-swift's ``rejected_response``.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from moefold.data.chats.fields import CALLS, MEDIA, ONLY_TEXT, ROLES, empty, without
from moefold.data.chats.messages import ASSISTANT, Message
from moefold.data.corpora.records import BadDocument

Row = Mapping[str, Any]

COMMON = ("tools", "chat_template_kwargs", "system")
"""Columns that every shape may have."""
QUESTIONS = ("question", "query", "problem", "instruction", "prompt", "input", "user")
ANSWERS = ("answer", "response", "solution", "output", "completion", "chosen", "assistant")
REFUSED = {
    "weight": "a weight of whole examples is not read; repeat or leave out examples, or give the "
    "source a weight",
    "label": "labels of single answers need a loss that compares them (KTO), which there is not; "
    "keep the examples with label: true, without the column",
    "functions": "write them as tools: [{type: function, function: {...}}]",
    "function_call": "write it as tool_calls of the answer",
}
"""Columns with a meaning elsewhere that nothing here obeys, with what to do about them."""
TOKENIZED = ("input_ids", "labels", "assistant_masks", "completion_mask", "loss_mask")
"""Columns of data that another program has tokenized."""


class Conversation(NamedTuple):
    """A conversation to render, whose answers from message ``first`` on are trained."""

    messages: list[Message]
    first: int = 0
    tools: list[Any] | None = None
    values: dict[str, Any] = {}
    """Further variables of the template."""


class PlainText(NamedTuple):
    """A prompt and a completion without chat template; the completion is trained."""

    prompt: str
    completion: str


Example = Conversation | PlainText


class ExampleShape(NamedTuple):
    """Columns of an example, and the function that reads them."""

    needs: tuple[str, ...]
    may: tuple[str, ...]
    read: Callable[[Row], Any]


def read_example(row: Row) -> tuple[Example, list[str]]:
    """Return a row's conversation or text, and the names of the columns that were not read.

    Raises:
        BadDocument: if the row has no known shape, or a column that must not be ignored.
    """
    shape = _shape(row, EXAMPLES)
    if shape is None:
        if two := next((sides for sides in SIDES if sides[1] in row), None):
            detail = f"{' and '.join(two)} need source: preferences, for losses such as dpo"
            raise BadDocument("a pair of answers", detail)
        raise BadDocument("not a conversation", _unknown_shape(row))
    example = shape.read(row)
    if isinstance(example, Conversation):
        example = _with_common(row, example)
    return example, _unread(row, shape)


def read_pair(row: Row) -> tuple[tuple[Example, Example], list[str]]:
    """Return a row's chosen and rejected examples, and the columns that were not read.

    Raises:
        BadDocument: as :func:`read_example`, and if the two have different questions or are equal.
    """
    shape = _shape(row, PAIRS)
    if shape is None:
        missing = [name for name in SIDES[0] if name not in row]
        raise BadDocument("not a pair", f"it has {sorted(row)[:20]}, but lacks {missing}")
    chosen, rejected = shape.read(row)
    if chosen == rejected:
        detail = f"{shape.needs[-2]} and {shape.needs[-1]} are equal; remove the pair"
        raise BadDocument("pair without a difference", detail)
    if isinstance(chosen, Conversation):
        return (_with_common(row, chosen), _with_common(row, rejected)), _unread(row, shape)
    return (chosen, rejected), _unread(row, shape)


def without_ignored(row: Row, ignored: Collection[str]) -> Row:
    """Return a row without the columns, and without the fields of messages, of the given names."""
    kept = {name: value for name, value in row.items() if name not in ignored}
    for name in MESSAGE_COLUMNS.intersection(kept):
        kept[name] = without(kept[name], ignored)
    return kept


def refuse_variables(unread: Sequence[str], row: Row, variables: Sequence[str]) -> None:
    """Raise ``BadDocument`` if a column that was not read has the name of a template's variable."""
    for name in unread:
        if name in variables and not empty(row[name]):
            detail = (
                f"the template reads {name}, which a column does not set; "
                f'write it as "chat_template_kwargs": {{"{name}": ...}}, or remove the column'
            )
            raise BadDocument("a column that the template reads", detail)


def _shape(row: Row, shapes: Sequence[ExampleShape]) -> ExampleShape | None:
    """Return the first shape all of whose columns the row has."""
    return next((s for s in shapes if all(row.get(name) is not None for name in s.needs)), None)


def _unread(row: Row, shape: ExampleShape) -> list[str]:
    """Return the columns that a shape does not read; refuse those that must not be ignored."""
    unread = [name for name in row if name not in (*shape.needs, *shape.may, *COMMON)]
    unread = [name for name in unread if not empty(row[name])]
    for name in unread:
        if name in MEDIA:
            raise BadDocument("not text", f"it has {name}; {ONLY_TEXT}")
        if name in TOKENIZED:
            detail = f"it has {name}, of data that is tokenized already; remove the column"
            raise BadDocument("a column that is not obeyed", detail)
        if name in REFUSED and not (name == "weight" and row[name] == 1):
            detail = f"it has {name}: {row[name]!r}"[:200]
            raise BadDocument("a column that is not obeyed", f"{detail}; {REFUSED[name]}")
    return unread


def _unknown_shape(row: Row) -> str:
    """Describe which columns are needed, with the line that makes them of the row's own."""
    names = sorted(row)[:20]
    needs = (
        f"it has {names}, but needs messages, conversations, prompt and completion, or "
        "instruction and output; convert each row:"
    )
    if whole := next((name for name in row if _is_conversation(row[name])), None):
        return f'{needs} {{"messages": row["{whole}"]}}'
    question = next((name for name in QUESTIONS if name in row), "QUESTION")
    answer = next((name for name in ANSWERS if name in row and name != question), "ANSWER")
    user = f'{{"role": "user", "content": row["{question}"]}}'
    assistant = f'{{"role": "{ASSISTANT}", "content": row["{answer}"]}}'
    return f'{needs} {{"messages": [{user}, {assistant}]}}'


def _is_conversation(value: Any) -> bool:
    """Say whether a column holds messages, under whatever name."""
    messages = value if isinstance(value, list) else []
    return bool(messages) and all(
        isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages
    )


def _with_common(row: Row, example: Conversation) -> Conversation:
    """Return a conversation with the columns that every shape may have."""
    tools = _tools(row.get("tools", example.tools))
    values = _parsed(row.get("chat_template_kwargs"), "chat_template_kwargs")
    if not isinstance(values, dict | None):
        raise BadDocument("not a conversation", "chat_template_kwargs must be an object")
    system = row.get("system")
    messages = example.messages
    first = example.first
    if not isinstance(system, str | None):
        detail = f"system must be text, but is a {type(system).__name__}"
        raise BadDocument("not a conversation", detail)
    if system:
        begin = messages[0] if messages else {}
        if begin.get("role") == "system" and begin.get("content") != system:
            detail = "it has a column system and another message with role system; keep one of them"
            raise BadDocument("two system messages", detail)
        if begin.get("role") != "system":
            messages = [{"role": "system", "content": system}, *messages]
            first += first > 0
    return Conversation(messages, first, tools, values or {})


def _tools(given: Any) -> list[Any] | None:
    """Return a row's tools: a list of schemas, each an object."""
    tools = _parsed(given, "tools")
    if not isinstance(tools, list | None):
        raise BadDocument("not a conversation", "tools must be a list of objects")
    schemas = [_parsed(tool, f"tool {number}") for number, tool in enumerate(tools or [])]
    for number, schema in enumerate(schemas):
        if not isinstance(schema, dict):
            detail = f"tool {number} is no object with the schema of a function, but {schema!r}"
            raise BadDocument("not a conversation", detail[:200])
    return schemas or None


def _parsed(value: Any, name: str) -> Any:
    """Return a value; tables store objects of different shapes as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadDocument("text that is not JSON", f"{name}: {error}") from error


# ------------------------------------------------------------------------ messages of all shapes


def _messages(row: Row, column: str) -> list[Message]:
    """Return a column's messages, from ShareGPT's names to those of templates."""
    value = row[column]
    if isinstance(value, dict) and ({"role", "from"} & value.keys()):
        value = [value]  # a single answer
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        kind = "text" if isinstance(value, str) else f"a {type(value).__name__}"
        detail = f"{column} must be a list of objects with role and content, but is {kind}"
        if isinstance(value, str):
            as_json = value.lstrip().startswith(("[", "{"))
            line = f'json.loads(row["{column}"])' if as_json else _one_message(column)
            detail += f'; convert each row: {{"{column}": {line}}}'
        raise BadDocument("not a conversation", detail)
    return [_renamed(message, column, number) for number, message in enumerate(value)]


def _one_message(column: str) -> str:
    role = "user" if column == "prompt" else ASSISTANT
    return f'[{{"role": "{role}", "content": row["{column}"]}}]'


def _renamed(message: Message, column: str, number: int) -> Message:
    """Return a message with ``role`` and ``content`` if it has ``from`` and ``value``."""
    if "from" not in message or "role" in message:
        return message
    kept = {name: each for name, each in message.items() if name not in ("from", "value")}
    said = message["from"]
    text = message.get("value", message.get("content"))
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        detail = f"message {number} of {column} has from: {said!r}; known: {', '.join(ROLES)}"
        raise BadDocument("unknown role", detail)
    if said not in CALLS:
        return {"role": role, "content": text} | kept
    try:
        calls = json.loads(text) if isinstance(text, str) else text
        calls = calls if isinstance(calls, list) else [calls]
        functions = [{"name": c["name"], "arguments": c.get("arguments", {})} for c in calls]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        detail = f"message {number} of {column} has no JSON object with name and arguments"
        raise BadDocument("a call that cannot be read", detail) from error
    called = [{"type": "function", "function": function} for function in functions]
    return {"role": role, "content": "", "tool_calls": called} | kept


def _conversation(column: str) -> Callable[[Row], Conversation]:
    return lambda row: Conversation(_messages(row, column))


def _prompt_completion(row: Row) -> Example:
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadDocument("example without an answer", "completion is empty")
        return PlainText(prompt, completion)
    _refuse_mixture(row, "prompt", ("completion",))
    messages = _messages(row, "prompt")
    return Conversation([*messages, *_messages(row, "completion")], len(messages))


def _refuse_mixture(row: Row, prompt: str, answers: Sequence[str]) -> None:
    """Raise ``BadDocument`` if one of the columns is text and another one messages."""
    as_text = [name for name in (prompt, *answers) if isinstance(row[name], str)]
    as_messages = [name for name in (prompt, *answers) if not isinstance(row[name], str)]
    if as_text and as_messages:
        listed = ", ".join(f'"{name}": {_one_message(name)}' for name in as_text)
        texts = f"{' and '.join(as_text)} {'are' if len(as_text) > 1 else 'is'} text"
        others = f"{' and '.join(as_messages)} {'are' if len(as_messages) > 1 else 'is'} not"
        detail = f"{texts}, but {others}; convert each row: {{{listed}}}"
        raise BadDocument("text beside messages", detail)


def _instruction(row: Row) -> list[Message]:
    """Return the messages before an answer: history, then instruction and input on two lines."""
    messages: list[Message] = []
    history = row.get("history") or []
    if not isinstance(history, list):
        detail = "history must be a list of [question, answer]"
        raise BadDocument("not a conversation", detail)
    for number, turn in enumerate(history):
        texts = isinstance(turn, list) and all(isinstance(text, str) for text in turn)
        if not texts or len(turn) != 2:
            detail = f"turn {number} of history is not [question, answer]"
            raise BadDocument("not a conversation", detail)
        messages.append({"role": "user", "content": turn[0]})
        messages.append({"role": ASSISTANT, "content": turn[1]})
    texts = [row.get(name) for name in ("instruction", "input")]
    for name, text in zip(("instruction", "input"), texts, strict=True):
        if not isinstance(text, str | None):
            detail = f"{name} must be text, but is a {type(text).__name__}"
            raise BadDocument("not a conversation", detail)
    return [*messages, {"role": "user", "content": "\n".join(filter(None, texts))}]


def _answer(row: Row, column: str) -> Message:
    """Return the answer in a column of text, or of a message."""
    if isinstance(text := row[column], str):
        if not text:
            raise BadDocument("example without an answer", f"{column} is empty")
        return {"role": ASSISTANT, "content": text}
    answers = _messages(row, column)
    if len(answers) != 1:
        detail = f"{column} must be text or one message, but has {len(answers)} messages"
        raise BadDocument("not a conversation", detail)
    return answers[0]


def _instruction_output(row: Row) -> Conversation:
    return Conversation([*_instruction(row), _answer(row, "output")])


EXAMPLES = (
    ExampleShape(("messages",), (), _conversation("messages")),
    ExampleShape(("conversations",), (), _conversation("conversations")),
    ExampleShape(("prompt", "completion"), (), _prompt_completion),
    ExampleShape(("instruction", "output"), ("input", "history"), _instruction_output),
    ExampleShape(("conversation",), (), _conversation("conversation")),
)


# ---------------------------------------------------------------------------------------- pairs


def _sides(
    prompt: Sequence[Message],
    answers: Sequence[Sequence[Message]],
    names: Sequence[str] = ("chosen", "rejected"),
) -> tuple[Example, ...]:
    """Return two conversations after checking that they answer the same question."""
    chosen, rejected = ([*prompt, *answer] for answer in answers)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((n for n, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    for name, side in zip(names, (chosen, rejected), strict=True):
        asks = [m.get("role") in ("system", "developer", "user") for m in side]
        asked = [n for n, asking in enumerate(asks) if asking and n >= shared]
        if asked:
            role = side[asked[0]].get("role")
            detail = (
                f"message {asked[0]} of {name} ({role}) is not in the other conversation; give "
                "both the same messages before the answers that are compared"
            )
            raise BadDocument("pair with different questions", detail)
    if not shared:
        detail = f"{' and '.join(names)} have no message in common; give the question, as prompt"
        raise BadDocument("pair without a question", detail)
    return Conversation(chosen, shared), Conversation(rejected, shared)


def _prompted_pair(row: Row) -> tuple[Example, ...]:
    prompt = row["prompt"]
    if all(isinstance(row[name], str) for name in ("prompt", *SIDES[0])):
        return tuple(_plain_side(prompt, row[name], name) for name in SIDES[0])
    if isinstance(prompt, str) and not any(isinstance(row[name], str) for name in SIDES[0]):
        return _whole_pair_with_text(row)
    _refuse_mixture(row, "prompt", SIDES[0])
    begin = _messages(row, "prompt")
    sides = [_messages(row, name) for name in SIDES[0]]
    if all(side[: len(begin)] == begin for side in sides):
        detail = "chosen and rejected begin with the messages of prompt; remove the column prompt"
        raise BadDocument("a prompt that is written twice", detail)
    return _sides(begin, sides)


def _plain_side(prompt: str, completion: str, name: str) -> PlainText:
    if not completion:
        raise BadDocument("example without an answer", f"{name} is empty")
    return PlainText(prompt, completion)


def _whole_pair_with_text(row: Row) -> tuple[Example, ...]:
    """Read whole conversations, one of whose questions is also in ``prompt``, as UltraFeedback."""
    sides = [_messages(row, name) for name in SIDES[0]]
    for name, side in zip(SIDES[0], sides, strict=True):
        if not any(m.get("role") == "user" and m.get("content") == row["prompt"] for m in side):
            detail = (
                f"prompt is text that is no question of {name}, which is a list of messages; "
                f'convert each row: {{"prompt": {_one_message("prompt")}}}'
            )
            raise BadDocument("text beside messages", detail)
    return _sides((), sides)


def _whole_pair(row: Row) -> tuple[Example, ...]:
    """Read two whole conversations or texts; their common beginning is the prompt."""
    chosen, rejected = (row[name] for name in SIDES[0])
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        _refuse_mixture(row, *SIDES[0][:1], SIDES[0][1:])
        return _sides((), [_messages(row, name) for name in SIDES[0]])
    letters = enumerate(zip(chosen, rejected, strict=False))
    end = next((n for n, (a, b) in letters if a != b), min(len(chosen), len(rejected)))
    if chosen[:end].endswith(" "):  # as TRL: the space before a word belongs to the answer
        end -= 1
    if not end:
        detail = "chosen and rejected have no common beginning; give the question, as prompt"
        raise BadDocument("pair without a question", detail)
    return tuple(_plain_side(row[name][:end], row[name][end:], name) for name in SIDES[0])


def _pair_after(column: str) -> Callable[[Row], tuple[Example, ...]]:
    """Return a function that reads answers to the messages in a column (LLaMA-Factory's pairs)."""

    def read(row: Row) -> tuple[Example, ...]:
        begin = _messages(row, column)
        if all(isinstance(row[n], list) and len(row[n]) > 1 for n in SIDES[0]):
            return _whole_pair(row)  # the column repeats one of them
        return _sides(begin, [[_answer(row, name)] for name in SIDES[0]])

    return read


def _instructed_pair(row: Row) -> tuple[Example, ...]:
    return _sides(_instruction(row), [[_answer(row, name)] for name in SIDES[0]])


def _openai_pair(row: Row) -> tuple[Example, ...]:
    given = row["input"]
    if not isinstance(given, dict) or "messages" not in given:
        raise BadDocument("not a pair", "input must be an object with messages")
    unread = [name for name in given if name not in ("messages", "tools", "parallel_tool_calls")]
    if unread:
        raise BadDocument("not a pair", f"input has {unread[0]}, which is not read; remove it")
    begin = _messages(given, "messages")
    chosen, rejected = _sides(begin, [_messages(row, name) for name in SIDES[1]], SIDES[1])
    assert isinstance(chosen, Conversation) and isinstance(rejected, Conversation)
    tools = given.get("tools") or None
    return chosen._replace(tools=tools), rejected._replace(tools=tools)


def _rejected_response(row: Row) -> tuple[Example, ...]:
    """Read a conversation, and the rejected form of its last answer."""
    messages = _messages(row, "messages")
    if not messages or messages[-1].get("role") != ASSISTANT:
        detail = "the last of messages must be the chosen answer"
        raise BadDocument("not a pair", detail)
    sides = [messages[-1:], [_answer(row, "rejected_response")]]
    return _sides(messages[:-1], sides, SIDES[2])


SIDES = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("messages", "rejected_response"),
)
"""Columns of the two answers of a pair."""
PAIRS = (
    ExampleShape(("prompt", *SIDES[0]), (), _prompted_pair),
    ExampleShape(("conversations", *SIDES[0]), (), _pair_after("conversations")),
    ExampleShape(("messages", *SIDES[0]), (), _pair_after("messages")),
    ExampleShape(("instruction", *SIDES[0]), ("input", "history"), _instructed_pair),
    ExampleShape(SIDES[0], (), _whole_pair),
    ExampleShape(("input", *SIDES[1]), (), _openai_pair),
    ExampleShape(SIDES[2], (), _rejected_response),
)
MESSAGE_COLUMNS = frozenset(name for shape in (*EXAMPLES, *PAIRS) for name in shape.needs)
"""Columns that may hold messages."""
