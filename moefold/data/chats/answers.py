"""Where the answers of a conversation are in the text of a chat template, and whether all is there.

An answer is *located at its own turn*: in the conversation up to it, after the beginning of an
answer that the template writes for a prompt. If the template writes it unchanged once more turns
follow, one text has several answers; else each answer has a text of its own.

All this is determined once for each shape of conversation (:mod:`moefold.data.chats.skeleton`) and
then applied to conversations of that shape.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from moefold.data.chats.fields import refuse_unread
from moefold.data.chats.messages import (
    ASSISTANT,
    Form,
    Message,
    apply_form,
    possible_forms,
)
from moefold.data.chats.skeleton import (
    REQUIRED,
    Faked,
    Part,
    Replace,
    Skeleton,
    chosen_sentinels,
    mark_words,
    marks_in,
    outline,
    replaced,
    sentinel,
    sentinels_in,
    translate,
    without_marks,
)
from moefold.data.chats.template import ChatTemplate, Rendered
from moefold.data.corpora.records import BadDocument

Answers = Literal["auto", "all", "each", "last"]
_SHAPES = 1024
"""Most shapes of conversations that are remembered."""
_ANSWER = "Vqz000zqV"
_OTHER = "0zqV"
"""Stand for an answer, to find where the beginning that the template writes ends."""
_LEAVES_OUT = "the template leaves out a part"
_CHANGES = "the template changes earlier messages"
_WRITE_IT = (
    "change the template so that it does (data.tokenizer.template names a file), or take the part "
    "out of the data"
)
_NOT_TAKEN = "the template does not take a message as it is"
_END_OF_REASONING = "</think>"
"""Ends reasoning that is in the text of an answer."""


class PartsLeftOut(BadDocument):
    """A conversation of which a template leaves out parts; its detail names the first of them.

    Attributes:
        count: how many parts are left out, counted for each text to train on.
    """

    def __init__(self, details: Sequence[str]) -> None:
        super().__init__(_LEAVES_OUT, details[0])
        self.count = len(details)


class TrainedConversation(NamedTuple):
    """Messages with what else a template gets, and which answers are trained."""

    messages: Sequence[Message]
    trained: Sequence[int]
    """Ascending indices of the messages that are trained, all of role ``assistant``."""
    answers: Answers = "auto"
    """Which of these, in which context; see :func:`examples_of`."""
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = {}
    """More variables of the template."""


class _Example(NamedTuple):
    """A text to train on: the first ``count`` messages, with spans of its ``trained`` answers."""

    count: int
    rendered: Rendered
    trained: tuple[int, ...]
    begins: tuple[str, ...] = ()
    """For each span what the prompt has at its place, and an answer of this shape has not."""


class _Plan(NamedTuple):
    """What holds for all conversations of a shape: either examples, or an error."""

    examples: Sequence[tuple[_Example, Skeleton]] = ()
    error: tuple[str, ...] = ()


class _Turns:
    """Prepared messages, rendered up to any of them, each once."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        conversation: TrainedConversation,
        tools: Sequence[Any] | None,
    ) -> None:
        self.messages = messages
        self._template = template
        self._tools = tools
        self._options = conversation.options
        self._max_chars = max_chars(template, conversation)
        self._rendered: dict[tuple[int, bool], Rendered] = {}

    def render(self, count: int, prompt: bool = False) -> Rendered:
        """Return the first ``count`` messages as text, with ``prompt`` for an answer to come."""
        if (count, prompt) not in self._rendered:
            shown = self.messages[:count]
            self._rendered[count, prompt] = self.render_others(shown, prompt)
        return self._rendered[count, prompt]

    def render_others(
        self, messages: Sequence[Mapping[str, Any]], prompt: bool = False, tools: Any = None
    ) -> Rendered:
        """Return other messages as text, with the same options, and tools unless others."""
        return self._template.render(
            messages,
            self._tools if tools is None else tools,
            self._options,
            prompt=prompt,
            max_chars=self._max_chars,
        )

    def at_own_turn(self, number: int) -> _Example:
        """Return the conversation up to an answer, with the answer's spans."""
        after = self.render(number + 1)
        trained = (number,)
        if after.marked:
            n_before = len(self.render(number).spans) if number else 0
            spans = after.spans[n_before:]
            return _Example(number + 1, after._replace(spans=spans), trained)
        start, begin = self._start(number, after.text)
        rendered = Rendered(after.text, ((start, len(after.text)),))
        return _Example(number + 1, rendered, trained, (begin,))

    def _start(self, number: int, after: str) -> tuple[int, str]:
        """Return where an answer begins in the text up to it, and the rest of the prompt."""
        prompt = ""
        before = None
        with suppress(BadDocument):  # of no messages, for example
            prompt = self.render(number, prompt=True).text
            before = self.render(number).text
        if prompt and after.startswith(prompt):
            return len(prompt), ""
        # The prompt has more than the assistant's mark, such as <think>, that this answer lacks, or
        # a text ends with more than its messages. Other answers show where this one begins.
        others = [self._with_answer(number, text) for text in (_ANSWER, _OTHER)]
        if before is not None and after.startswith(before):
            start = max(len(before), _common_prefix(after, prompt, others[0]))
            return start, prompt[start:]
        return _common_prefix(after, *others), ""

    def _with_answer(self, number: int, text: str) -> str:
        """Return the conversation up to an answer as text, with another answer in its place."""
        other = {"role": ASSISTANT, "content": text}
        return self.render_others([*self.messages[:number], other]).text


def max_chars(template: ChatTemplate, conversation: TrainedConversation) -> int:
    """Return the most characters that a template may write for a conversation."""
    given = sum(len(str(m.get("content") or "")) for m in conversation.messages)
    return template.max_chars + 4 * given


class AnswerFinder:
    """Renders conversations in a template, with the spans of their answers.

    What is found out about a shape of conversation is kept for others of this shape.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._plans: OrderedDict[Any, _Plan] = OrderedDict()

    def examples_of(self, conversation: TrainedConversation) -> list[Rendered]:
        """Return the texts to train on, with the spans of the answers in each.

        ``answers`` of the conversation selects them:

        - ``all``: one text with every answer.
        - ``each``: every answer in the text that the template writes up to it. A text that another
          one begins with is part of that.
        - ``last``: the last answer only.
        - ``auto``: ``all``, or ``each`` where the template writes earlier turns otherwise once
          others follow.

        Raises:
            BadDocument: if the template fails, if it leaves out a part of the conversation, or if
                an answer cannot be located.
        """
        forms = possible_forms(conversation.messages)
        errors = list[tuple[Form, BadDocument]]()
        refuse_unread(conversation.messages, lambda changed: self._text(conversation, changed))
        for form in forms:
            with suppress(BadDocument):  # its words would be the sentinels
                examples = self._by_shape(conversation, form)
                if examples is not None:
                    return examples
        for form in forms:
            if form.parts == "wrapped":  # for templates that take no text, whatever it says
                continue
            messages = apply_form(conversation.messages, form)
            turns = _Turns(self._template, messages, conversation, conversation.tools)
            try:
                return self._by_content(conversation, form, turns)
            except BadDocument as error:
                errors.append((form, error))
        raise BadDocument(*_most_telling(errors).args)

    def text_of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        prompt: bool,
    ) -> str:
        """Return a conversation as text; with ``prompt``, up to the beginning of the next answer.

        Raises:
            BadDocument: if the template fails.
        """
        conversation = TrainedConversation(messages, (), tools=tools, options=options)
        return self._text(conversation, messages, prompt)

    def _text(
        self, conversation: TrainedConversation, messages: Sequence[Message], prompt: bool = False
    ) -> str:
        """Return messages as text, with the tools of a conversation, in the first possible form."""
        errors = list[BadDocument]()
        for form in possible_forms(messages):
            tools = conversation.tools
            ready = apply_form(messages, form)
            turns = _Turns(self._template, ready, conversation, tools)
            try:
                return turns.render(len(messages), prompt).text
            except BadDocument as error:
                errors.append(error)
        raise errors[0]

    def _by_shape(self, conversation: TrainedConversation, form: Form) -> list[Rendered] | None:
        """Return the examples if what holds for the shape holds for the conversation, else None."""
        messages = apply_form(conversation.messages, form)
        shape: Faked | None = None
        known = None if conversation.tools else outline(messages)
        if known is None:
            shape = replaced(messages, conversation.tools)
            known = shape.key(), [part.value for part in shape.parts]
        options = conversation.options and json.dumps(conversation.options, default=str)
        key = (known[0], form, conversation.answers, *conversation.trained, options or "")
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(conversation, form, shape or replaced(messages, conversation.tools))
            self._plans[key] = plan
            if len(self._plans) > _SHAPES:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        if plan.error:
            raise BadDocument(*plan.error)
        turns = _Turns(self._template, messages, conversation, conversation.tools)
        examples = list[Rendered]()
        for example, skeleton in plan.examples:
            text = turns.render(example.count).text
            places = skeleton.fill(known[1], text)
            if places is None:
                return None
            spans = list[tuple[int, int]]()
            begins = example.begins or ("",) * len(example.rendered.spans)
            for (first, end), begin in zip(example.rendered.spans, begins, strict=True):
                start = translate(places, first)
                if begin and text.startswith(begin, start):  # this answer has it
                    start += len(begin)
                spans.append((start, translate(places, end)))
            examples.append(Rendered(text, tuple(spans), example.rendered.marked))
        return examples

    def _plan(self, conversation: TrainedConversation, form: Form, shape: Faked) -> _Plan:
        """Find out what holds for a shape."""

        def present(count: int) -> set[int]:
            return sentinels_in(turns.render(count).text)

        def in_other_form(other: Form) -> str:
            messages = apply_form(conversation.messages, other)
            faked = replaced(messages, conversation.tools)
            others = _Turns(self._template, faked.messages, conversation, faked.tools)
            return others.render(len(messages)).text

        turns = _Turns(self._template, shape.messages, conversation, shape.tools)
        written = [(p.kind, sentinel(i, p)) for i, p in enumerate(shape.parts)]
        try:
            examples = _locate(conversation, turns, shape.parts, present)
            _check_form(form, examples[-1].rendered.text, written, in_other_form)
        except BadDocument as error:
            return _Plan(error=error.args)
        return _Plan([(example, Skeleton(example.rendered.text)) for example in examples])

    def _by_content(
        self, conversation: TrainedConversation, form: Form, turns: "_Turns"
    ) -> list[Rendered]:
        """Return the examples of a conversation whose texts decide what the template writes."""

        def in_other_form(other: Form) -> str:
            messages = apply_form(conversation.messages, other)
            others = _Turns(self._template, messages, conversation, conversation.tools)
            return others.render(len(messages)).text

        parts = replaced(turns.messages, conversation.tools).parts
        written = [(part.kind, part.value) for part in parts]
        present = _Presence(turns, conversation.tools, parts)
        examples = _locate(conversation, turns, parts, present.parts_in)
        _check_form(form, examples[-1].rendered.text, written, in_other_form)
        return [example.rendered for example in examples]


class _Presence:
    """Finds the parts of a conversation in its text, by marks at the words of its texts."""

    def __init__(self, turns: _Turns, tools: Sequence[Any] | None, parts: Sequence[Part]) -> None:
        self._turns = turns
        self._tools = tools
        self._parts = parts

    def parts_in(self, count: int) -> set[int]:
        """Return the indices of the parts that the text of the first ``count`` messages has."""
        text = self._turns.render(count).text
        shown = [i for i, part in enumerate(self._parts) if part.message < count]
        texts = [i for i in shown if self._parts[i].kind in ("text", "reasoning")]
        others = [i for i in shown if self._parts[i].kind in ("call", "schema")]
        marked = self._written(mark_words, count)
        if without_marks(marked) == text:
            found = {i for i in texts if self._all_words(i, marked, text)}
        else:  # a mark changes what the template writes: one part at a time
            found = {i for i in texts if self._all_words(i, self._marked(i, count), text)}
        found |= sentinels_in(self._written(chosen_sentinels(others), count))
        missing = set(others) - found
        alone = {i for i in missing if i in sentinels_in(self._chosen(i, count))}
        return found | alone

    def _written(self, replace: Replace, count: int) -> str:
        """Return the text of the conversation with parts replaced; none if the template fails."""
        shape = replaced(self._turns.messages, self._tools, replace)
        try:
            return self._turns.render_others(shape.messages[:count], tools=shape.tools).text
        except BadDocument:
            return ""

    def _marked(self, index: int, count: int) -> str:
        def replace(i: int, part: Part) -> Any:
            return mark_words(i, part) if i == index else part.value

        return self._written(replace, count)

    def _chosen(self, index: int, count: int) -> str:
        return self._written(chosen_sentinels({index}), count)

    def _all_words(self, index: int, marked: str, text: str) -> bool:
        """Say whether all words of a part are in the marked text."""
        part = self._parts[index]
        words = marks_in(str(mark_words(index, part)))
        if not words:  # nothing but tags and punctuation
            return str(part.value).strip() in text
        return words <= marks_in(marked)


def _locate(
    conversation: TrainedConversation,
    turns: _Turns,
    parts: Sequence[Part],
    present: Callable[[int], set[int]],
) -> list[_Example]:
    """Return a conversation's examples, in which every part is present."""
    trained = conversation.trained
    answers = conversation.answers
    if answers == "last":
        examples = [turns.at_own_turn(trained[-1])]
    elif answers == "each":
        examples = _own_turns(turns, trained)
    else:
        try:
            examples = [_together(turns, trained)]
            _check_parts(examples, parts, present)
        except BadDocument:
            if answers == "all":
                raise
            examples = _own_turns(turns, trained)
    _check_parts(examples, parts, present)
    return examples


def _own_turns(turns: _Turns, trained: Sequence[int]) -> list[_Example]:
    """Return each answer at its own turn; a text that the next one begins with is part of it."""
    examples = list[_Example]()
    for number in trained:
        example = turns.at_own_turn(number)
        if examples and example.rendered.text.startswith(examples[-1].rendered.text):
            earlier = examples.pop()
            spans = earlier.rendered.spans + example.rendered.spans
            rendered = example.rendered._replace(spans=spans)
            trained = earlier.trained + example.trained
            begins = earlier.begins + example.begins
            example = example._replace(rendered=rendered, trained=trained, begins=begins)
        examples.append(example)
    full = turns.render(len(turns.messages)).text
    last = examples[-1].rendered
    if full.startswith(last.text):  # messages that follow the last answer
        rendered = last._replace(text=full)
        examples[-1] = examples[-1]._replace(count=len(turns.messages), rendered=rendered)
    return examples


def _together(turns: _Turns, trained: Sequence[int]) -> _Example:
    """Return one text with all trained answers.

    Raises:
        BadDocument: if an answer cannot be located in it.
    """
    count = len(turns.messages)
    full = turns.render(count)
    if not full.marked:
        examples = _own_turns(turns, trained)
        if len(examples) == 1:
            return examples[0]
        last = examples[0]
        number = examples[1].trained[0]
        ours = last.rendered.text
        theirs = examples[1].rendered.text
        at = _common_prefix(ours, theirs)
        before = ours[at : at + 40]
        after = theirs[at : at + 40]
        raise BadDocument(
            _CHANGES,
            f"up to message {last.count - 1} it writes {before!r}, which becomes "
            f"{after!r} once message {number} follows; train each answer in the text before it "
            "(answers: each), or mark answers in the template with {% generation %}",
        )
    others = [n for n, m in enumerate(turns.messages) if m["role"] == ASSISTANT]
    if list(trained) == others:
        return _Example(count, full, tuple(trained))
    spans = list[tuple[int, int]]()
    for number in trained:
        first, end = (len(turns.render(n).spans) for n in (number, number + 1))
        spans += full.spans[first:end]
    return _Example(count, full._replace(spans=tuple(spans)), tuple(trained))


def _check_parts(
    examples: Sequence[_Example],
    parts: Sequence[Part],
    present: Callable[[int], set[int]],
) -> None:
    """Raise ``PartsLeftOut`` if a part is in none of the texts in which it should be.

    Templates may leave reasoning out of the history of an answer, if they write it at its own turn.
    """
    details = list[str]()
    for example in examples:
        found = present(example.count)
        for index, part in enumerate(parts):
            if index in found or part.message >= example.count or part.kind not in REQUIRED:
                continue
            reasons = part.kind == "reasoning" or _END_OF_REASONING in str(part.value)
            in_history = part.message not in example.trained
            if reasons and in_history and index in present(part.message + 1):
                continue
            detail = f"it does not write all of {part.name}; {_WRITE_IT}"
            if part.kind == "reasoning" and len(example.trained) > 1:
                detail += ", or train each answer in the text before it (answers: each)"
            details.append(detail)
    if details:
        raise PartsLeftOut(details)


def _check_form(
    form: Form,
    text: str,
    written: Sequence[tuple[str, Any]],
    in_other_form: Callable[[Form], str],
) -> None:
    """Raise ``BadDocument`` if a text shows that the template does not take a form.

    A template may print null, objects and lists as Python does, which is not meant to be read.
    ``written`` are kinds and values of the parts in the text.
    """

    def is_printed(key: Any) -> bool:
        """Say whether the template, not a part, has a key of an object as Python prints it."""
        printed = f"'{key}': "
        return text.count(printed) > sum(str(value).count(printed) for _, value in written)

    def printed_more(words: tuple[str, ...], other: Form) -> bool:
        try:
            less = in_other_form(other)
        except BadDocument:  # it takes this form alone
            return False
        return sum(map(text.count, words)) > sum(map(less.count, words))

    keys = [value for kind, value in written if kind == "call"]
    if keys and any(map(is_printed, ("arguments", *keys))):
        raise BadDocument(
            _NOT_TAKEN, "it prints tool calls or their arguments as Python does, not as JSON"
        )
    if form.nulls == "null" and printed_more(("None", "null"), form._replace(nulls="empty")):
        raise BadDocument(_NOT_TAKEN, "it prints null content as a word")
    structure = ("'text'", '"text"')
    if form.parts != "joined" and printed_more(structure, form._replace(parts="joined")):
        raise BadDocument(_NOT_TAKEN, "it prints a list of parts with its structure")


def _common_prefix(*texts: str) -> int:
    """Return the number of characters that texts have in common at their beginning."""
    pairs = enumerate(zip(*texts, strict=False))
    return next((i for i, chars in pairs if len(set(chars)) > 1), min(map(len, texts)))


def _most_telling(errors: Sequence[tuple[Form, BadDocument]]) -> BadDocument:
    """Return one of the errors of several forms: of a form that the template could render.

    A template that takes text alone leaves out each part of a list, whatever else it leaves out, so
    errors of joined parts say more. Of forms with parts left out, the one with the fewest names
    what no form would write.
    """
    ordered = [error for _, error in sorted(errors, key=lambda each: each[0].parts != "joined")]
    left_out = [error for error in ordered if isinstance(error, PartsLeftOut)]
    if left_out:
        return min(left_out, key=lambda error: error.count)
    reasons = [error.args[0] for error in ordered]
    found = (reasons.index(reason) for reason in (_CHANGES, _NOT_TAKEN) if reason in reasons)
    return ordered[next(found, 0)]
