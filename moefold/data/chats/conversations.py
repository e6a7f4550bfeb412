"""Conversations as documents: ``messages``, or ``prompt`` and ``completion``, with ``tools``.

Column names are TRL's; formats are JSON lines, Parquet files, and folders of Arrow files written by
``datasets``. Labels are the answers: the tokens of assistant messages including their end token, or
of a completion. A pair is one document: the conversation with the chosen answer, then the one with
the rejected answer. Its labels are the last answers: ``chosen`` and ``rejected``, or the last
messages of whole conversations. N tokens of an example.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moefold.data.chats.answer_end import answer_ends
from moefold.data.chats.answers import Answers, TrainedConversation
from moefold.data.chats.fields import TRAINED, check_messages, refuse_media, untrained
from moefold.data.chats.messages import ASSISTANT
from moefold.data.chats.renderer import EXCEEDS, Renderer, TemplateText
from moefold.data.chats.shapes import (
    Conversation,
    Example,
    PlainText,
    read_example,
    read_pair,
    refuse_variables,
    without_ignored,
)
from moefold.data.chats.template import CLOSE, OPEN, Rendered
from moefold.data.chats.template_names import CommonValues, check_values, template_variables
from moefold.data.config import Chat, DataError, Preferences
from moefold.data.corpora.records import BadDocument, iter_objects, parse_json_object
from moefold.data.corpora.sources import Encoded, FileReader, Skipped
from moefold.data.corpora.streams import holds_tar
from moefold.data.corpora.table_rows import row_decoder
from moefold.data.corpora.tables import is_table, open_table
from moefold.data.packing import REJECTED
from moefold.data.shards import require_webdataset, tar_objects
from moefold.data.tokenizer import Tokenizer

BATCH = 512


class ExampleText(NamedTuple):
    """An example's text: a rendered template, or a prompt and its completion without template."""

    rendered: Rendered
    completion: str = ""
    """The completion, with its end token; ``rendered`` is then the prompt."""


class _Row(NamedTuple):
    """What is read of a row: a conversation or a text, or both sides of a pair."""

    name: str
    split_key: bytes
    sides: tuple[TrainedConversation | ExampleText, ...]


class _Document(NamedTuple):
    """A document as text, or both texts of a pair."""

    name: str
    split_key: bytes
    texts: tuple[ExampleText, ...]


class ConversationReader(FileReader):
    """Reads conversations, named ``path:line`` from 1, or ``path:row`` from 0 in tables."""

    whole_documents = True
    tables = True
    unit = "conversation"
    remedy = "set long: cut (drops their ends) or long: skip (leaves them out) in the source"
    """Remedies for documents that are too long, besides a larger ``data.seq``."""

    def __init__(self, record: Chat | Preferences) -> None:
        super().__init__(record)
        self._answers: Answers = record.answers
        self._long = record.long
        self._values = CommonValues()
        self._ignored = frozenset(record.ignore)
        files = self.files()
        self._tars = frozenset(file for file in files if holds_tar(file))
        # Optional dependencies: fail before reading.
        if any(is_table(file) for file in files):
            import_module("pyarrow.parquet")
        if self._tars:
            require_webdataset()

    def template_values(self) -> list[dict[str, Any]]:
        """Return the values that all rendered conversations have in common."""
        return [self._values.values]

    def examples(self, skipped: Skipped) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and content of the examples of all files."""
        for path, columns in self._table_files(skipped):
            if is_table(path):
                yield from self._table_rows(path, columns, skipped)
                continue
            objects = tar_objects(path) if path in self._tars else iter_objects(path)
            for name, line in objects:
                try:
                    yield name, parse_json_object(line)
                except BadDocument as error:
                    self.refuse(name, *error.args, skipped=skipped)

    def _table_rows(
        self, path: Path, columns: Sequence[str] | None, skipped: Skipped
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        with open_table(path, columns) as table:
            rows = (batch.slice(i, 1) for batch in table.batches for i in range(batch.num_rows))
            decode = row_decoder(table.schema)
            for number, row in enumerate(rows):
                name = f"{path.as_posix()}:{number}"
                try:
                    example = decode(row)
                except UnicodeDecodeError as error:
                    detail = f"byte {error.start}: {error.reason}"
                    self.refuse(name, "not UTF-8", detail, skipped)
                except BadDocument as error:
                    self.refuse(name, *error.args, skipped=skipped)
                else:
                    yield name, example

    def end_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids of the tokens that end the template's answers."""
        return answer_ends(tokenizer)

    def encode(self, tokenizer: Tokenizer, seq: int, skipped: Skipped) -> Iterator[list[Encoded]]:
        """Yield tokenized conversations, in groups."""
        templates = [chat_template(tokenizer, tools) for tools in (False, True)]
        if templates[0] == templates[1]:
            templates.pop()
        with ExitStack() as stack:
            renderers = [stack.enter_context(Renderer(template)) for template in templates]
            rows = self._rows(tokenizer, templates, skipped)
            while batch := list(islice(rows, BATCH)):
                texts = self._rendered(batch, renderers, skipped)
                yield self._encode_batch(texts, tokenizer, seq, skipped)

    def _rows(
        self, tokenizer: Tokenizer, templates: Sequence[TemplateText], skipped: Skipped
    ) -> Iterator[_Row]:
        """Yield the rows that are examples."""
        for name, example in self.examples(skipped):
            try:
                # Other columns of a table may hold dates or bytes, which JSON cannot represent.
                text = json.dumps(example, sort_keys=True, ensure_ascii=False, default=str)
                if OPEN in text or CLOSE in text:
                    detail = "it contains the noncharacter U+FDD0 or U+FDD1"
                    raise BadDocument("invalid text", detail)
                template = templates[-1 if example.get("tools") else 0]
                sides = self._sides(example, template, tokenizer, skipped)
                yield _Row(name, text.encode(), sides)
            except UnicodeEncodeError as error:
                self.refuse(name, "invalid text", f"{error.reason}", skipped)
            except BadDocument as error:
                self.refuse(name, *error.args, skipped=skipped)

    def _sides(
        self,
        row: Mapping[str, Any],
        template: TemplateText,
        tokenizer: Tokenizer,
        skipped: Skipped,
    ) -> tuple[TrainedConversation | ExampleText, ...]:
        """Return what is to be rendered of a row; a pair has two sides."""
        examples, unread = self._read(without_ignored(row, self._ignored))
        variables = template_variables(template.text)
        refuse_variables(unread, row, variables)
        sides = tuple(self._side(example, template, tokenizer) for example in examples)
        skipped.note_columns(unread)
        return sides

    def _read(self, row: Mapping[str, Any]) -> tuple[tuple[Example, ...], list[str]]:
        """Return a row's examples, and the columns that were not read."""
        example, unread = read_example(row)
        return (example,), unread

    def _side(
        self, example: Example, template: TemplateText, tokenizer: Tokenizer
    ) -> TrainedConversation | ExampleText:
        """Return a conversation with what is trained of it, or plain text as it is."""
        if isinstance(example, PlainText):
            completion = example.completion
            if not completion.endswith(tokenizer.end):
                completion += tokenizer.end
            return ExampleText(Rendered(example.prompt, ()), completion)
        known = template_variables(template.text)
        check_values(example.values, known, "chat_template_kwargs")
        self._values.add(example.values)
        return trained_conversation(example, self._answers)

    def _rendered(
        self, rows: Sequence[_Row], renderers: Sequence[Renderer], skipped: Skipped
    ) -> list[_Document]:
        """Return the documents of rows; ``renderers`` are one, or one without and one with tools.

        A conversation has several documents if its answers are trained in texts of their own.
        """
        examples = _examples(rows, renderers)
        documents = list[_Document]()
        for row in rows:
            texts = [examples.get(id(side), [side]) for side in row.sides]
            error = next((each for each in texts if isinstance(each, BadDocument)), None)
            if error is not None:
                self.refuse(row.name, *error.args, skipped=skipped)
                if error.args[0] == EXCEEDS:  # others would take as long to fail
                    skipped.raise_errors()
                continue
            for number, sides in enumerate(zip(*texts, strict=True)):
                name = f"{row.name}/{number}" if number else row.name
                whole = [s if isinstance(s, ExampleText) else ExampleText(s) for s in sides]
                documents.append(_Document(name, row.split_key, tuple(whole)))
        return documents

    def _encode_batch(
        self,
        batch: Sequence[_Document],
        tokenizer: Tokenizer,
        seq: int,
        skipped: Skipped,
    ) -> list[Encoded]:
        documents = []
        encoded = encode_examples([text for _, _, texts in batch for text in texts], tokenizer)
        for name, split_key, texts in batch:
            ids, masks = zip(*islice(encoded, len(texts)), strict=True)
            if texts[0].completion:
                masks = _begin_together(masks)
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

    unit = "pair"
    shorten = "set long: skip (leaves them out) in the source"

    def _read(self, row: Mapping[str, Any]) -> tuple[tuple[Example, ...], list[str]]:
        """Return a row's chosen and rejected examples, and the columns that were not read."""
        return read_pair(row)


def _examples(
    rows: Sequence[_Row], renderers: Sequence[Renderer]
) -> dict[int, list[Rendered] | BadDocument]:
    """Return the texts of the rows' conversations, or errors, by the conversations' ``id``."""
    sides = [side for row in rows for side in row.sides if isinstance(side, TrainedConversation)]
    examples = dict[int, Any]()
    for tools, renderer in zip((False, True), renderers, strict=False):
        # A template for tools may differ from the other.
        asked = [side for side in sides if len(renderers) == 1 or bool(side.tools) == tools]
        found = renderer.examples_of(asked)
        examples |= {id(side): each for side, each in zip(asked, found, strict=True)}
    return examples


def encode_examples(
    texts: Sequence[ExampleText], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the token ids of each example, and a mask of its labels."""
    chats = iter(tokenizer.encode_chats([text.rendered.text for text in texts]))
    pairs = [(text.rendered.text, text.completion) for text in texts if text.completion]
    encoded_pairs = encode_pairs(pairs, tokenizer)
    ends = answer_ends(tokenizer)
    for text, (ids_N, spans_N2) in zip(texts, chats, strict=True):
        if text.completion:
            yield next(encoded_pairs)
        else:
            yield ids_N, _label_mask(text.rendered, ids_N, spans_N2, ends or tokenizer.end_ids)


def _begin_together(masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return masks of completions that all begin where the first does, as one prompt has them."""
    first = min(int(mask.argmax()) for mask in masks)
    return [np.arange(len(mask)) >= first for mask in masks]


def encode_pairs(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield token ids and label mask of each prompt with its completion, both without template.

    Both are encoded as one text, so tokens may cross from one to the other. Labels begin where the
    ids differ from those of the prompt alone, as in TRL (release 1.16, ``sft_trainer.py``).
    """
    prompts = tokenizer.encode_texts([prompt for prompt, _ in pairs])
    whole = tokenizer.encode_texts([prompt + completion for prompt, completion in pairs])
    for prompt_N, ids_N in zip(prompts, whole, strict=True):
        shorter = min(len(prompt_N), len(ids_N))
        differing = np.flatnonzero(prompt_N[:shorter] != ids_N[:shorter])
        first = int(differing[0]) if len(differing) else shorter
        yield ids_N, np.arange(len(ids_N)) >= first


def _label_mask(
    rendered: Rendered, ids_N: np.ndarray, spans_N2: np.ndarray, ends: Sequence[int]
) -> np.ndarray:
    """Return a mask [N] of the tokens of a rendered conversation's answers."""
    mask_N = np.zeros(len(ids_N), bool)
    for start, stop in rendered.spans:
        overlapping = np.flatnonzero((spans_N2[:, 0] < stop) & (spans_N2[:, 1] > start))
        if not len(overlapping):
            continue
        first = int(overlapping[0])
        end = int(overlapping[-1]) + 1
        if not rendered.marked:  # the template's own text follows an answer's last end token
            found = np.flatnonzero(np.isin(ids_N[first:end], ends))
            end = first + int(found[-1]) + 1 if len(found) else end
        mask_N[first:end] = True
    return mask_N


def chat_template(tokenizer: Tokenizer, tools: bool = False, **options: Any) -> TemplateText:
    """Return a tokenizer's chat template; raise ``DataError`` if it has none."""
    text = tokenizer.files.chat_template(tools)
    if text is None:
        raise DataError(
            f"{tokenizer.source}: has no chat template, which conversations need; put one beside "
            "it as chat_template.jinja, or set data.tokenizer.template to its file"
        )
    source = tokenizer.template_source or tokenizer.source
    return TemplateText(text, tokenizer.files.special_tokens(), source, **options)


def trained_conversation(conversation: Conversation, answers: Answers) -> TrainedConversation:
    """Return a conversation with the answers that are trained.

    Raises:
        BadDocument: if it is malformed, or has no trained answer.
    """
    given, first, tools, values = conversation
    check_messages(given)
    refuse_media(given)
    context = untrained(given)
    messages = [{k: v for k, v in message.items() if k not in TRAINED} for message in given]
    numbers = [n for n, m in enumerate(messages) if m["role"] == ASSISTANT]
    chosen = numbers[-1:] if answers == "last" else numbers
    trained = [number for number in chosen if number >= first and number not in context]
    if not trained:
        detail = f"completion must contain a message with role {ASSISTANT}"
        if context.intersection(chosen):
            detail = "its messages say that no answer of it is trained; leave it out"
        raise BadDocument("example without an answer", detail)
    return TrainedConversation(messages, trained, answers, tools, values)
