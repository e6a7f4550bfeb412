"""Conversations as documents: ``messages``, or ``prompt`` and ``completion``, with ``tools``.

Column names are TRL's; formats are JSON lines, Parquet files, and folders of Arrow files written by
``datasets``. Labels are the answers: the tokens of assistant messages including their end token, or
of a completion. A pair is one document: the conversation with the chosen answer, then the one with
the rejected answer. Its labels are the last answers: ``chosen`` and ``rejected``, or the last
messages of whole conversations. N tokens of an example.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moefold.data.config import Chat, DataError, Preferences
from moefold.data.packing import REJECTED
from moefold.data.records import BadDocument, iter_objects, parse_json_object
from moefold.data.sources import Encoded, FileReader, Skipped
from moefold.data.tables import is_table, open_table
from moefold.data.template import ASSISTANT, ChatTemplate, Message, Rendered
from moefold.data.tokenizer import Tokenizer

BATCH = 512
PAIR_KEYS = ("chosen", "rejected")
MAY_FOLLOW = {
    "system": ("",),
    "developer": ("", "system"),
    "user": ("", "system", "developer", ASSISTANT),
    ASSISTANT: ("user", "tool"),
    "tool": (ASSISTANT, "tool"),
}
"""Roles that each role may follow; the empty one stands for the beginning."""


class ExampleText(NamedTuple):
    """An example's text: a rendered template, followed by a completion without template."""

    rendered: Rendered
    completion: str = ""


class ConversationReader(FileReader):
    """Reads conversations, named ``path:line`` from 1, or ``path:row`` from 0 in tables."""

    whole_documents = True
    tables = True
    unit = "conversation"
    remedy = "set long: cut (drops their ends) or long: skip (leaves them out) in the source"
    """Remedies for documents that are too long, besides a larger ``data.seq``."""

    def __init__(self, record: Chat | Preferences) -> None:
        super().__init__(record)
        self._answers, self._long = record.answers, record.long
        if any(is_table(file) for file in self.files()):
            import_module("pyarrow.parquet")  # an optional dependency: fail before reading

    def examples(self, skipped: Skipped) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and content of the examples of all files."""
        for path, columns in self._table_files(skipped):
            if is_table(path):
                yield from self._table_rows(path, columns, skipped)
                continue
            for name, line in iter_objects(path):
                try:
                    yield name, parse_json_object(line)
                except BadDocument as error:
                    self.refuse(name, *error.args, skipped=skipped)

    def _table_rows(
        self, path: Path, columns: Sequence[str] | None, skipped: Skipped
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        with open_table(path, columns) as table:
            rows = (batch.slice(i, 1) for batch in table.batches for i in range(batch.num_rows))
            for number, row in enumerate(rows):
                name = f"{path.as_posix()}:{number}"
                try:
                    (example,) = row.to_pylist()
                except UnicodeDecodeError as error:
                    detail = f"byte {error.start}: {error.reason}"
                    self.refuse(name, "not UTF-8", detail, skipped)
                else:
                    # A row of a table has all keys, with null for missing values.
                    yield name, _drop_nulls(example)

    def encode(self, tokenizer: Tokenizer, seq: int, skipped: Skipped) -> Iterator[list[Encoded]]:
        """Yield tokenized conversations, in groups."""
        templates = [load_chat_template(tokenizer, tools) for tools in (False, True)]
        batch: list[tuple[str, bytes, tuple[ExampleText, ...]]] = []
        for name, example in self.examples(skipped):
            try:
                # Other columns of a table may hold dates or bytes, which JSON cannot represent.
                text = json.dumps(example, sort_keys=True, ensure_ascii=False, default=str)
                split_key = text.encode()
                template = templates[bool(example.get("tools"))]
                texts = self._example_texts(example, template, tokenizer)
            except UnicodeEncodeError as error:
                self.refuse(name, "invalid text", f"{error.reason}", skipped)
            except BadDocument as error:
                self.refuse(name, *error.args, skipped=skipped)
            else:
                batch.append((name, split_key, texts))
            if len(batch) == BATCH:
                yield self._encode_batch(batch, tokenizer, seq, skipped)
                batch = []
        if batch:
            yield self._encode_batch(batch, tokenizer, seq, skipped)

    def _example_texts(
        self, example: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
    ) -> tuple[ExampleText, ...]:
        """Return an example's text; a pair has two."""
        if any(side in example for side in PAIR_KEYS):
            detail = "chosen and rejected need source: preferences, for losses such as dpo"
            raise BadDocument("a pair of answers", detail)
        return (self._conversation_text(example, template, tokenizer),)

    def _conversation_text(
        self, example: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
    ) -> ExampleText:
        """Return a conversation's text, rendered unless prompt and completion are strings."""
        if isinstance(prompt := example.get("prompt"), str):
            completion = example.get("completion")
            if not isinstance(completion, str) or not completion:
                raise BadDocument("example without an answer", "completion is empty or not text")
            begin = tokenizer.files.special_tokens().get("bos_token", "") if tokenizer.start else ""
            return ExampleText(Rendered(begin + prompt, ()), completion + tokenizer.end)
        return ExampleText(render_example(example, template, self._answers == "last"))

    def _encode_batch(
        self,
        batch: Sequence[tuple[str, bytes, tuple[ExampleText, ...]]],
        tokenizer: Tokenizer,
        seq: int,
        skipped: Skipped,
    ) -> list[Encoded]:
        documents = []
        encoded = encode_examples([text for _, _, texts in batch for text in texts], tokenizer)
        for name, split_key, texts in batch:
            ids, masks = zip(*islice(encoded, len(texts)), strict=True)
            ids_N = np.concatenate(ids)
            marks_N = np.concatenate([mask + REJECTED * i for i, mask in enumerate(masks)])
            if not all(mask[1:].any() for mask in masks):
                self.refuse(name, "example without an answer", "it has no labelled tokens", skipped)
            elif len(ids) > 1 and np.array_equal(*ids):
                detail = "chosen and rejected have the same tokens"
                self.refuse(name, "pair without a difference", detail, skipped)
            elif len(ids_N) <= seq or (self._long == "cut" and marks_N[1:seq].any()):
                documents.append(Encoded(name, split_key, ids_N[:seq], marks_N[:seq]))
            elif self._long == "refuse":
                size = f"{len(ids_N)} tokens does not fit a sequence of {seq}"
                skipped.refuse_long(f"{name}: a {self.unit} of {size}", len(ids_N), self.remedy)
            else:
                skipped.note(name, "longer than a sequence")
        return documents


class PreferenceReader(ConversationReader):
    """Reads pairs of answers; each pair is one document."""

    unit, shorten = "pair", "set long: skip (leaves them out) in the source"

    def _example_texts(
        self, example: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
    ) -> tuple[ExampleText, ...]:
        if missing := [side for side in PAIR_KEYS if side not in example]:
            raise BadDocument("not a pair", f"it has {sorted(example)[:20]}, but lacks {missing}")
        shared = {name: value for name, value in example.items() if name not in PAIR_KEYS}
        answer = "completion" if "prompt" in example else "messages"
        sides = [shared | {answer: example[side]} for side in PAIR_KEYS]
        if sides[0] == sides[1]:
            raise BadDocument("pair without a difference", "chosen and rejected are equal")
        return tuple(self._conversation_text(side, template, tokenizer) for side in sides)


def encode_examples(
    texts: Sequence[ExampleText], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the token ids of each example, and a mask of its labels."""
    chats = tokenizer.encode_chats([written.rendered.text for written in texts])
    suffixes = tokenizer.encode_chats([written.completion for written in texts])
    for (rendered, _), (ids_N, spans_N2), (more_N, _) in zip(texts, chats, suffixes, strict=True):
        mask_N = np.zeros(len(ids_N), bool)
        for start, stop in rendered.spans:
            overlapping = np.flatnonzero((spans_N2[:, 0] < stop) & (spans_N2[:, 1] > start))
            if not len(overlapping):
                continue
            first, end = int(overlapping[0]), int(overlapping[-1]) + 1
            if not rendered.marked:  # the template's own text follows an answer's last end token
                ends = np.flatnonzero(np.isin(ids_N[first:end], tokenizer.end_ids))
                end = first + int(ends[-1]) + 1 if len(ends) else end
            mask_N[first:end] = True
        yield np.append(ids_N, more_N), np.append(mask_N, np.ones(len(more_N), bool))


def load_chat_template(tokenizer: Tokenizer, tools: bool = False, **options: Any) -> ChatTemplate:
    """Return a tokenizer's chat template; raise ``DataError`` if it has none."""
    text = tokenizer.files.chat_template(tools)
    if text is None:
        raise DataError(
            f"{tokenizer.source}: has no chat template, which conversations need; put one beside "
            "it as chat_template.jinja, or set data.tokenizer.template to its file"
        )
    source = tokenizer.template_source or tokenizer.source
    return ChatTemplate(text, tokenizer.files.special_tokens(), source, **options)


def render_example(example: Mapping[str, Any], template: ChatTemplate, last_only: bool) -> Rendered:
    """Render an example's conversation; with ``last_only``, only its last answer is a label.

    Raises:
        BadDocument: if the example is malformed, has no answer or has roles out of order, or if
            the template fails.
    """
    first = 0
    if "messages" in example:
        messages = example["messages"]
    elif "prompt" in example and "completion" in example:
        prompt, completion = example["prompt"], example["completion"]
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            detail = "prompt and completion must be both text or both lists of messages"
            raise BadDocument("not a conversation", detail)
        messages, first = [*prompt, *completion], len(prompt)
    else:
        detail = f"it has {sorted(example)[:20]}, but needs messages, or prompt and completion"
        raise BadDocument("not a conversation", detail)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        detail = "messages must be a list of objects with role and content"
        raise BadDocument("not a conversation", detail)
    check_roles(messages)
    if last_only:
        first = len(messages) - 1
    if not any(m["role"] == ASSISTANT for m in messages[first:]):
        detail = f"completion must contain a message with role {ASSISTANT}"
        raise BadDocument("example without an answer", detail)
    tools, options = example.get("tools"), example.get("chat_template_kwargs")
    if isinstance(tools, str):  # tables store schemas of different shapes as text
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadDocument("tools are not JSON", str(error)) from error
    if not isinstance(tools, list | None) or not isinstance(options, dict | None):
        detail = "tools must be a list, and chat_template_kwargs an object"
        raise BadDocument("not a conversation", detail)
    return template.render_answers(messages, tools or None, first, **(options or {}))


def check_roles(messages: Sequence[Message]) -> None:
    """Raise ``BadDocument`` for unknown roles, wrong order, empty messages, or no last answer."""
    previous = ""
    for number, message in enumerate(messages):
        role, text = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in MAY_FOLLOW:
            detail = f"message {number} has role {role!r}; known roles: {', '.join(MAY_FOLLOW)}"
            raise BadDocument("unknown role", detail)
        if previous not in MAY_FOLLOW[role]:
            place = f"follows {previous}" if previous else "comes first"
            detail = f"message {number} ({role}) {place}; reorder messages, or merge neighbours"
            raise BadDocument("roles out of order", detail)
        if not (isinstance(text, str | list) or (role == ASSISTANT and message.get("tool_calls"))):
            raise BadDocument("no content", f"message {number} ({role}) has no content")
        if role == ASSISTANT and not text and not message.get("tool_calls"):
            raise BadDocument("example without an answer", f"message {number} ({role}) is empty")
        previous = role
    if previous != ASSISTANT:
        detail = f"the last message has role {previous}" if previous else "it has no messages"
        detail += f"; the last must have role {ASSISTANT}"
        raise BadDocument("example without an answer", detail)


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    return [_drop_nulls(v) for v in value] if isinstance(value, list) else value
