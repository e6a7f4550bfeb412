"""Conversations as documents: ``messages``, or ``prompt`` and ``completion``, with ``tools``.

Column names are TRL's; formats are JSON lines, Parquet files, and folders of Arrow files written by
``datasets``. Labels are the answers: the tokens of assistants' messages, with the token that ends
each, or of a completion. A pair is one document, the conversation of the chosen answer and then
that of the rejected one, in which the last answers are labels: ``chosen`` and ``rejected``, or the
last messages of whole conversations. N tokens of an example.
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
from moefold.data.sources import (
    READ_ROWS,
    BadDocument,
    Coded,
    FileReader,
    Skipped,
    expand,
    json_object,
    lines_of,
)
from moefold.data.template import ANSWER, ChatTemplate, Message, Rendered
from moefold.data.tokenizer import Tokenizer

BATCH = 512
SIDES = ("chosen", "rejected")
BEFORE = {
    "system": ("",),
    "developer": ("", "system"),
    "user": ("", "system", "developer", ANSWER),
    ANSWER: ("user", "tool"),
    "tool": (ANSWER, "tool"),
}
"""Roles that may precede each role; the empty one stands for the beginning."""


class Written(NamedTuple):
    """An example's text: rendered by a template, and after it a completion without template."""

    rendered: Rendered
    completion: str = ""


class ConversationReader(FileReader):
    """Reads conversations, named ``path:line`` from 1, or in tables ``path:row`` from 0."""

    whole = True
    unit = "conversation"
    shorten = "set long: cut (drops their ends) or long: skip (leaves them out) in the source"
    """Remedies for documents that are too long, besides a larger ``data.seq``."""

    def __init__(self, record: Chat | Preferences) -> None:
        super().__init__(record)
        self._answers, self._long = record.answers, record.long
        if any(file.suffix in (".parquet", ".arrow") for file in self.files()):
            self._arrow = import_module("pyarrow")
            self._parquet = import_module("pyarrow.parquet")

    def files(self) -> list[Path]:
        """Return the files that the patterns match, and the Arrow files in matching folders."""
        found: dict[Path, None] = {}
        for pattern in self._patterns:
            folder = Path(pattern)
            parts = sorted(folder.glob("*.arrow")) if folder.is_dir() else []
            if not parts and (folder / "dataset_dict.json").is_file():
                raise DataError(f"{folder}: contains several sets; name the folder of one of them")
            found.update(dict.fromkeys(parts or expand((pattern,))))
        return list(found)

    def examples(self, skipped: Skipped) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and content of the examples of all files."""
        for path in self.files():
            if path.suffix in (".parquet", ".arrow"):
                yield from self._rows(path, skipped)
                continue
            for name, line in lines_of(path):
                try:
                    yield name, json_object(line)
                except BadDocument as error:
                    self.refuse(name, *error.args, skipped=skipped)

    def _rows(self, path: Path, skipped: Skipped) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            with path.open("rb") as file:
                batches = self._batches(path, file)
                rows = (batch.slice(i, 1) for batch in batches for i in range(batch.num_rows))
                for number, row in enumerate(rows):
                    name = f"{path.as_posix()}:{number}"
                    try:
                        (found,) = row.to_pylist()
                    except UnicodeDecodeError as error:
                        said = f"byte {error.start}: {error.reason}"
                        self.refuse(name, "not UTF-8", said, skipped)
                    else:
                        # In a table each row has all rows' keys, with null for missing values.
                        yield name, _without_nulls(found)
        except (self._arrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from error

    def _batches(self, path: Path, file: Any) -> Iterator[Any]:
        if path.suffix == ".parquet":
            return self._parquet.ParquetFile(file).iter_batches(batch_size=READ_ROWS)
        try:
            return iter(self._arrow.ipc.open_stream(file))
        except self._arrow.ArrowInvalid:  # the file format, with a footer
            whole = self._arrow.ipc.open_file(file)
            return (whole.get_batch(i) for i in range(whole.num_record_batches))

    def coded(self, tokenizer: Tokenizer, seq: int, skipped: Skipped) -> Iterator[list[Coded]]:
        """Yield conversations as tokens, in groups."""
        templates = [chat_template(tokenizer, tools) for tools in (False, True)]
        batch: list[tuple[str, bytes, tuple[Written, ...]]] = []
        for name, example in self.examples(skipped):
            try:
                # Other columns of a table may hold dates or bytes, which JSON cannot represent.
                text = json.dumps(example, sort_keys=True, ensure_ascii=False, default=str)
                said = text.encode()
                template = templates[bool(example.get("tools"))]
                written = self._texts(example, template, tokenizer)
            except UnicodeEncodeError as error:
                self.refuse(name, "invalid text", f"{error.reason}", skipped)
            except BadDocument as error:
                self.refuse(name, *error.args, skipped=skipped)
            else:
                batch.append((name, said, written))
            if len(batch) == BATCH:
                yield self._encode(batch, tokenizer, seq, skipped)
                batch = []
        if batch:
            yield self._encode(batch, tokenizer, seq, skipped)

    def _texts(
        self, example: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
    ) -> tuple[Written, ...]:
        """Return the text of an example."""
        if any(side in example for side in SIDES):
            said = "chosen and rejected need source: preferences, for losses such as dpo"
            raise BadDocument("a pair of answers", said)
        return (self._written(example, template, tokenizer),)

    def _written(
        self, example: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
    ) -> Written:
        """Return a conversation's text, by the template unless prompt and completion are text."""
        if isinstance(prompt := example.get("prompt"), str):
            completion = example.get("completion")
            if not isinstance(completion, str) or not completion:
                raise BadDocument("example without an answer", "completion is empty or not text")
            begin = tokenizer.files.special().get("bos_token", "") if tokenizer.start else ""
            return Written(Rendered(begin + prompt, ()), completion + tokenizer.end)
        return Written(rendered(example, template, self._answers == "last"))

    def _encode(
        self,
        batch: Sequence[tuple[str, bytes, tuple[Written, ...]]],
        tokenizer: Tokenizer,
        seq: int,
        skipped: Skipped,
    ) -> list[Coded]:
        found = []
        coded = encoded([text for _, _, texts in batch for text in texts], tokenizer)
        for name, said, texts in batch:
            ids, trained = zip(*islice(coded, len(texts)), strict=True)
            ids_N = np.concatenate(ids)
            marks_N = np.concatenate([one + REJECTED * at for at, one in enumerate(trained)])
            if not all(one[1:].any() for one in trained):
                self.refuse(name, "example without an answer", "it has no labelled tokens", skipped)
            elif len(ids) > 1 and np.array_equal(*ids):
                said_so = "chosen and rejected have the same tokens"
                self.refuse(name, "pair without a difference", said_so, skipped)
            elif len(ids_N) <= seq or (self._long == "cut" and marks_N[1:seq].any()):
                found.append(Coded(name, said, ids_N[:seq], marks_N[:seq]))
            elif self._long == "refuse":
                size = f"{len(ids_N)} tokens does not fit a sequence of {seq}"
                skipped.refuse_long(f"{name}: a {self.unit} of {size}", len(ids_N), self.shorten)
            else:
                skipped.note(name, "longer than a sequence")
        return found


class PreferenceReader(ConversationReader):
    """Reads pairs of answers; each pair is one document."""

    unit, shorten = "pair", "set long: skip (leaves them out) in the source"

    def _texts(
        self, example: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
    ) -> tuple[Written, ...]:
        """Return a pair's two texts."""
        if missing := [side for side in SIDES if side not in example]:
            raise BadDocument("not a pair", f"it has {sorted(example)[:20]}, but lacks {missing}")
        shared = {name: value for name, value in example.items() if name not in SIDES}
        answer = "completion" if "prompt" in example else "messages"
        sides = [shared | {answer: example[side]} for side in SIDES]
        if sides[0] == sides[1]:
            raise BadDocument("pair without a difference", "chosen and rejected are equal")
        return tuple(self._written(side, template, tokenizer) for side in sides)


def encoded(
    texts: Sequence[Written], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the token ids of each example, and a mask of the trained ones."""
    coded = tokenizer.encode_chats([written.rendered.text for written in texts])
    answers = tokenizer.encode_chats([written.completion for written in texts])
    for (rendered, _), (ids_N, spans_N2), (more_N, _) in zip(texts, coded, answers, strict=True):
        trained_N = np.zeros(len(ids_N), bool)
        for start, stop in rendered.spans:
            touched = np.flatnonzero((spans_N2[:, 0] < stop) & (spans_N2[:, 1] > start))
            if not len(touched):
                continue
            first, end = int(touched[0]), int(touched[-1]) + 1
            if not rendered.marked:  # after an answer's last end token, text of the template
                ends = np.flatnonzero(np.isin(ids_N[first:end], tokenizer.ends))
                end = first + int(ends[-1]) + 1 if len(ends) else end
            trained_N[first:end] = True
        yield np.append(ids_N, more_N), np.append(trained_N, np.ones(len(more_N), bool))


def chat_template(tokenizer: Tokenizer, tools: bool = False, **how: Any) -> ChatTemplate:
    """Return a tokenizer's chat template; raises ``DataError`` if it has none."""
    text = tokenizer.files.template(tools)
    if text is None:
        raise DataError(
            f"{tokenizer.source}: has no chat template, which conversations need; put one beside "
            "it as chat_template.jinja, or set data.tokenizer.template to its file"
        )
    source = tokenizer.template_source or tokenizer.source
    return ChatTemplate(text, tokenizer.files.special(), source, **how)


def rendered(found: Mapping[str, Any], template: ChatTemplate, last: bool) -> Rendered:
    """Return an example's conversation as text; with ``last``, only its last answer is trained.

    Raises:
        BadDocument: if the example has another form, no answer or roles out of order, or the
            template fails on it.
    """
    first = 0
    if "messages" in found:
        messages = found["messages"]
    elif "prompt" in found and "completion" in found:
        prompt, completion = found["prompt"], found["completion"]
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            said = "prompt and completion must be both text or both lists of messages"
            raise BadDocument("not a conversation", said)
        messages, first = [*prompt, *completion], len(prompt)
    else:
        said = f"it has {sorted(found)[:20]}, but needs messages, or prompt and completion"
        raise BadDocument("not a conversation", said)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        said = "messages must be a list of objects with role and content"
        raise BadDocument("not a conversation", said)
    check_roles(messages)
    if last:
        first = len(messages) - 1
    if not any(m["role"] == ANSWER for m in messages[first:]):
        said = f"completion must contain a message with role {ANSWER}"
        raise BadDocument("example without an answer", said)
    tools, more = found.get("tools"), found.get("chat_template_kwargs")
    if isinstance(tools, str):  # in tables, schemas of different forms are stored as text
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadDocument("tools are not JSON", str(error)) from error
    if not isinstance(tools, list | None) or not isinstance(more, dict | None):
        said = "tools must be a list, and chat_template_kwargs an object"
        raise BadDocument("not a conversation", said)
    return template.answers(messages, tools or None, first, **(more or {}))


def check_roles(messages: Sequence[Message]) -> None:
    """Raise ``BadDocument`` for unknown roles, wrong order or empty messages; answers come last."""
    before = ""
    for number, message in enumerate(messages):
        role, text = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in BEFORE:
            said = f"message {number} has role {role!r}; known roles: {', '.join(BEFORE)}"
            raise BadDocument("unknown role", said)
        if before not in BEFORE[role]:
            after = f"follows {before}" if before else "comes first"
            said = f"message {number} ({role}) {after}; reorder messages, or merge neighbours"
            raise BadDocument("roles out of order", said)
        if not (isinstance(text, str | list) or (role == ANSWER and message.get("tool_calls"))):
            raise BadDocument("no content", f"message {number} ({role}) has no content")
        if role == ANSWER and not text and not message.get("tool_calls"):
            raise BadDocument("example without an answer", f"message {number} ({role}) is empty")
        before = role
    if before != ANSWER:
        said = f"the last message has role {before}" if before else "it has no messages"
        raise BadDocument("example without an answer", f"{said}; the last must have role {ANSWER}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
