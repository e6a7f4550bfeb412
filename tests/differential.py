"""Drawn conversations through chat templates and tokenizer folders, beside ``transformers``.

The rules by which messages are passed to a template, and by which answers have texts of their own,
are stated here a second time, without the package: ``NEEDS`` says by hand what each template takes.
Each part of a conversation has a tag, a word that occurs nowhere else, so that a search in the
reference's text says whether the part is in it.

Most templates have comments around the answers. Their *marked twin* has ``{% generation %}`` in the
place of these, so that the reference has masks of answers with which labels are compared.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from moefold.data.chats.conversations import ConversationReader
from moefold.data.config import Chat, FileTokenizer
from moefold.data.corpora.sources import Encoded, Skipped
from moefold.data.tokenizer import Tokenizer, from_record
from tests.chats import TEMPLATES, words
from tests.tokenizer_folders import FOLDERS

Message = dict[str, Any]
RECENT = TEMPLATES / "recent"
NAMES = sorted(path.stem for path in RECENT.glob("*.jinja"))
MARKED = "_marked"
"""Ends the name of a template's marked twin."""
PAIRS = 3
"""Pairs of template and folder for each conversation."""
TOKENS = 1 << 16
"""Longest text in tokens."""


class Needs(NamedTuple):
    """What a template takes, where templates differ."""

    parts: str = "joined"
    """``listed``: it walks over the parts of a list; ``first``: but reads one of a system text."""
    arguments: str = "object"
    """``text``: it concatenates arguments."""
    null: bool = False
    """Whether it tests content beside calls for null."""


NEEDS = {
    "deepseek_v3": Needs(arguments="text", null=True),
    "deepseek_r1": Needs(arguments="text", null=True),
    "glm4_5": Needs(parts="listed"),
    "minimax_m2": Needs(parts="listed"),
    "kimi_k2": Needs(parts="listed"),
    "granite4": Needs(parts="listed"),
    "gemma3": Needs(parts="first"),
}


class Tag(NamedTuple):
    """Where a tag is: in which message (-1: a tool's schema), and in which kind of part."""

    word: str
    message: int
    kind: str


class Drawn(NamedTuple):
    """A line of data, the tags of its parts, and what is trained of it."""

    row: dict[str, Any]
    tags: list[Tag]
    answers: str


class _Draw:
    """Draws one conversation."""

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.reasons = self.chance(0.3)
        self.tags: list[Tag] = []
        self.messages: list[Message] = []
        self.tools: list[dict[str, Any]] = []

    def chance(self, share: float) -> bool:
        return self.draws.random() < share

    def tag(self, kind: str, message: int | None = None) -> str:
        """Return a new tag of the message that is being drawn."""
        place = len(self.messages) if message is None else message
        word = f"zk{len(self.tags)}k"
        self.tags.append(Tag(word, place, kind))
        return word

    def text(self, kind: str = "text") -> str:
        """Return text with a tag, now and then with white space at its edges."""
        said = f"{words(self.draws, 4)} {self.tag(kind)}"
        if self.chance(0.3):
            said = f"{said}{self.draws.choice(['!', ' {x: 1}', ' <b>', ' 12 + 3', '.'])}"
        if self.chance(0.2):
            said = f"{said}\n\n{words(self.draws, 3)}"
        if self.chance(0.15):
            edge = self.draws.choice([" ", "\n", "  \n"])
            said = self.draws.choice([edge + said, said + edge, edge + said + edge])
        return said

    def content(self, lists: float = 0.12) -> Any:
        """Return text, or a list of parts."""
        if not self.chance(lists):
            return self.text()
        count = self.draws.randint(1, 3)
        return [
            self.text() if self.chance(0.1) else {"type": "text", "text": self.text()}
            for _ in range(count)
        ]

    def draw_tools(self) -> None:
        for _ in range(self.draws.randint(1, 2)):
            properties = {
                self.tag("schema", -1): {
                    "type": "string",
                    "description": f"where? {self.tag('schema', -1)}",
                    "enum": [self.tag("schema", -1), self.tag("schema", -1)],
                },
                self.tag("schema", -1): {"type": "integer", "description": "how many"},
            }
            function = {
                "name": self.tag("schema", -1),
                "description": f"où 日本 {self.tag('schema', -1)}",
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": [next(iter(properties))],
                },
            }
            self.tools.append({"type": "function", "function": function})

    def call(self) -> dict[str, Any]:
        place = len(self.messages)
        if self.tools:
            function = self.draws.choice(self.tools)["function"]
            name, keys = function["name"], list(function["parameters"]["properties"])
            self.tags += [Tag(word, place, "call") for word in (name, *keys)]
        else:
            name, keys = self.tag("call"), [self.tag("call"), "count"]
        values: dict[str, Any] = {keys[0]: f"é {self.tag('call')}", keys[1]: 3}
        if self.chance(0.3):
            values["deep"] = {"list": [1, True, None, self.tag("call")]}
        arguments: Any = values
        if self.chance(0.4):
            arguments = json.dumps(values, ensure_ascii=self.chance(0.5))
        letters = "".join(self.draws.choices("abcdefgh123", k=9))
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return call | ({"id": letters} if self.chance(0.85) else {})

    def thought(self) -> dict[str, Any]:
        if not (self.reasons and self.chance(0.6)):
            return {}
        name = self.draws.choice(["reasoning_content", "reasoning_content", "thinking"])
        return {name: self.text("reasoning")}

    def add(self, role: str, content: Any, **more: Any) -> None:
        self.messages.append({"role": role, "content": content} | more)

    def calls(self) -> None:
        """Add an answer with calls, and their results."""
        thought = self.thought()
        content = self.draws.choice([None, None, "", "text"])
        content = self.text() if content == "text" else content
        calls = [self.call() for _ in range(self.draws.choice([1, 1, 1, 2]))]
        self.add("assistant", content, tool_calls=calls, **thought)
        if content is None and self.chance(0.4):
            del self.messages[-1]["content"]
        if self.chance(0.05):
            return
        for call in calls:
            more = {"tool_call_id": call["id"]} if "id" in call else {}
            if self.chance(0.5):
                more["name"] = call["function"]["name"]
            self.add("tool", self.content(0.06), **more)

    def turn(self) -> None:
        """Add a question and its answer."""
        if self.chance(0.97):
            self.add("user", "" if self.chance(0.03) else self.content())
        if self.chance(0.03):
            self.add("user", self.text())
        if self.chance(0.65 if self.tools else 0.1):
            self.calls()
        if self.chance(0.06):
            hidden = self.text("inline")
            self.add("assistant", f"<think>\n{hidden}\n</think>\n\n{self.text()}")
            return
        thought = self.thought()
        self.add("assistant", "" if self.chance(0.02) else self.content(0.06), **thought)

    def drawn(self) -> Drawn:
        if self.chance(0.35):
            self.draw_tools()
        if self.chance(0.5):
            self.add("system", self.content())
        for number in range(self.draws.randint(1, 3)):
            self.turn()
            if number and self.chance(0.04):
                self.add("system", self.text())
        if self.chance(0.06):
            self.add("user", self.text())
        row: dict[str, Any] = {"messages": self.messages}
        if self.tools:
            row["tools"] = json.dumps(self.tools) if self.chance(0.2) else self.tools
        answers = self.draws.choices(["auto", "each", "all", "last"], [7, 1, 1, 1])[0]
        return Drawn(row, self.tags, answers)


def draw(draws: random.Random) -> Drawn:
    """Return a drawn conversation."""
    return _Draw(draws).drawn()


# ------------------------------------------------------------------ the rules, a second time


def passed(messages: Sequence[Message], needs: Needs) -> list[Message]:
    """Return messages as they are to be given to ``apply_chat_template``."""
    joined = needs.parts == "joined"
    if needs.parts == "first" and messages[0]["role"] == "system":
        content = messages[0]["content"]
        joined = isinstance(content, list) and len(content) > 1
    return [_passed(message, needs, joined) for message in messages]


def _passed(message: Message, needs: Needs, joined: bool) -> Message:
    out = {key: value for key, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking"):
        if name in message:
            out["reasoning_content"] = out["thinking"] = message[name]
    if isinstance(out.get("content"), list):
        texts = [part if isinstance(part, str) else part["text"] for part in out["content"]]
        listed = [{"type": "text", "text": text} for text in texts]
        out["content"] = "\n".join(texts) if joined else listed
    if "tool_calls" not in message:
        return out
    if needs.null and not message.get("content"):
        out["content"] = None
    out["tool_calls"] = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        given = function["arguments"]
        if needs.arguments == "object" and isinstance(given, str):
            function["arguments"] = json.loads(given)
        if needs.arguments == "text" and not isinstance(given, str):
            function["arguments"] = json.dumps(given, ensure_ascii=False)
        out["tool_calls"].append(call | {"function": function})
    return out


class Reference:
    """What ``transformers`` writes of a conversation, and which texts should be trained."""

    def __init__(self, drawn: Drawn, name: str, tokenizer: Any) -> None:
        self.drawn = drawn
        self.template = template_of(name)
        needs = NEEDS.get(name.removesuffix(MARKED), Needs())
        self.tokenizer = tokenizer
        self.given: list[Message] = drawn.row["messages"]
        self.messages = passed(self.given, needs)
        tools = drawn.row.get("tools")
        self.tools = json.loads(tools) if isinstance(tools, str) else tools
        self.marked = "generation %}" in self.template
        self.answers = [n for n, m in enumerate(self.given) if m["role"] == "assistant"]
        self.texts: dict[tuple[int, bool], str] = {}

    def text(self, count: int, prompt: bool = False) -> str:
        """Return the text of the first messages; raises what the template raises."""
        if (count, prompt) in self.texts:
            return self.texts[count, prompt]
        texts, _ = render_jinja_template(
            [self.messages[:count]],
            tools=self.tools,
            chat_template=self.template,
            add_generation_prompt=prompt,
            **self.tokenizer.special_tokens_map,
        )
        self.texts[count, prompt] = texts[0]
        return texts[0]

    def fails(self) -> bool:
        """Say whether the template fails on the conversation, or on one up to an answer."""
        counts = [(len(self.given), False)]
        counts += [(n + 1, False) for n in self.answers] + [(n, True) for n in self.answers]
        try:
            for count, prompt in counts:
                self.text(count, prompt)
        except Exception:  # a template raises what it wants
            return True
        return False

    def ids(self, count: int) -> tuple[list[int], list[int]]:
        """Return ids and assistant mask of the first messages."""
        messages = self.messages[:count]
        if any(None in message.values() for message in messages):
            # apply_chat_template takes null out before the template sees it.
            return self.tokenizer(self.text(count), add_special_tokens=False)["input_ids"], []
        found = self.tokenizer.apply_chat_template(
            messages,
            tools=self.tools,
            chat_template=self.template,
            return_dict=True,
            return_assistant_tokens_mask=self.marked,
        )
        return found["input_ids"], found.get("assistant_masks", [])

    @cached_property
    def own(self) -> list[tuple[int, list[int]]]:
        """Texts of answers at their own turns: how many messages each has, and its answers."""
        trained = self.answers[-1:] if self.drawn.answers == "last" else self.answers
        found: list[tuple[int, list[int]]] = []
        for number in trained:
            numbers = [number]
            if found and self.text(number + 1).startswith(self.text(found[-1][0])):
                numbers = found.pop()[1] + numbers
            found.append((number + 1, numbers))
        count, numbers = found[-1]
        whole = len(self.given)
        if self.drawn.answers != "last" and self.text(whole).startswith(self.text(count)):
            found[-1] = (whole, numbers)
        return found

    def expected(self) -> list[tuple[int, list[int]]]:
        """Return the texts that are trained, with their answers."""
        whole = (len(self.given), self.answers)
        in_one = self.drawn.answers in ("auto", "all")
        if in_one and self.marked and not self.lost([whole]):
            return [whole]
        return self.own

    def lost(self, texts: Sequence[tuple[int, list[int]]]) -> set[Tag]:
        """Return the tags that are missing from texts in which they should be."""
        missing: set[Tag] = set()
        for count, numbers in texts:
            text = self.text(count)
            for tag in self.drawn.tags:
                if tag.word in text or tag.message >= count:
                    continue
                history = tag.kind in ("reasoning", "inline") and tag.message not in numbers
                if history and tag.word in self.text(tag.message + 1):
                    continue
                missing.add(tag)
        return missing


# ----------------------------------------------------------------------------- moefold's path


class _Collected(Skipped):
    """Keeps refusals instead of raising them."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def refuse(self, document: str) -> None:
        self.refused.append(document)


def prepared(
    drawn: Drawn, tokenizer: Tokenizer, file: Path
) -> tuple[list[tuple[list[int], list[bool]]], str]:
    """Return ids and labels of each document of a line, or why it is refused."""
    file.write_text(json.dumps(drawn.row, ensure_ascii=False) + "\n", encoding="utf-8")
    record = Chat(files=[str(file)], answers=drawn.answers)  # type: ignore[arg-type]
    skipped = _Collected()
    groups = ConversationReader(record).encode(tokenizer, TOKENS, skipped)
    found = [each for group in groups for each in group]
    refusal = skipped.refused[0].partition(".jsonl:1: ")[2] if skipped.refused else ""
    return [(e.ids_N.tolist(), _labels(e)) for e in found], refusal


def _labels(encoded: Encoded) -> list[bool]:
    assert encoded.loss_mask_N is not None
    return [bool(each) for each in encoded.loss_mask_N]


# -------------------------------------------------------------------------------- comparison

NO_ANSWER = "example without an answer"
LEFT_OUT = "the template leaves out a part"
FAILS = "the template fails"
MISSING = "the template needs a missing value"
CHANGES = "the template changes earlier messages"


def why_wrong(reference: Reference, refusal: str) -> str:
    """Return why a refusal is not legitimate; nothing if it is."""
    reason = refusal.partition(": ")[0]
    if reason == NO_ANSWER:
        empty = (
            not any(m.get(k) for k in ("content", "tool_calls", "reasoning_content", "thinking"))
            for m in reference.given
            if m["role"] == "assistant"
        )
        return "" if any(empty) else "each answer has something"
    if reason in (FAILS, MISSING):
        return "" if reference.fails() else "the reference's template does not fail"
    if reference.fails():
        return ""  # another form got further
    if reason == LEFT_OUT:
        texts = reference.own
        if reference.drawn.answers == "all" and reference.marked:
            texts = [(len(reference.given), reference.answers)]
        lost = reference.lost(texts)
        if not lost:
            return "the reference writes each part"
        return "" if _named(refusal) & _names(lost) else f"another part is lost: {sorted(lost)}"
    if reason == CHANGES and reference.drawn.answers == "all":
        return "" if len(reference.own) > 1 else "the reference changes nothing"
    return "the reason is not one of those that are known to be right"


_PLACE = re.compile(r"(part \d+|text|reasoning|call \d+) of message (\d+)")
_KINDS = {"text": ("text", "inline"), "reasoning": ("reasoning",), "call": ("call",)}


def _named(refusal: str) -> set[tuple[int, str]]:
    """Return the message and possible kinds of the part that a refusal names."""
    part = refusal.partition("; ")[0]
    if re.search(r"the schema of tool \d+$", part):
        return {(-1, "schema")}
    found = list(_PLACE.finditer(part))
    if not found:
        return set()
    kind = found[-1][1].split()[0]
    kinds = _KINDS["text" if kind == "part" else kind]
    return {(int(found[-1][2]), each) for each in kinds}


def _names(tags: set[Tag]) -> set[tuple[int, str]]:
    return {(tag.message, tag.kind) for tag in tags}


def difference(
    reference: Reference, found: Sequence[tuple[list[int], list[bool]]], refusal: str
) -> str:
    """Return how what is trained differs from the reference; nothing if it does not."""
    if refusal:
        return why_wrong(reference, refusal)
    try:
        texts = reference.expected()
    except Exception as error:  # a template raises what it wants
        return f"the reference's template fails: {error}"
    if lost := reference.lost(texts):
        return f"it is trained without {sorted(lost)}"
    if len(texts) != len(found):
        return f"{len(found)} texts instead of {len(texts)}"
    for (count, numbers), (ids, labels) in zip(texts, found, strict=True):
        wanted, mask = reference.ids(count)
        if ids != wanted:
            return f"other ids in the text of {count} messages: {reference.text(count)!r}"
        every = numbers == [n for n in reference.answers if n < count]
        if reference.marked and every and labels != [bool(each) for each in mask]:
            return f"other labels in the text of {count} messages"
        if wrong := _wrong_labels(reference, reference.text(count), numbers, labels):
            return wrong
    return ""


def _wrong_labels(
    reference: Reference, text: str, numbers: Sequence[int], labels: Sequence[bool]
) -> str:
    """Return which tags are labelled though they should not be, or the other way round."""
    encoded = reference.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    letters = [False] * len(text)
    for (start, end), label in zip(encoded["offset_mapping"], labels, strict=True):
        if label:
            letters[start:end] = [True] * (end - start)
    labelled = "".join(c if on else "\0" for c, on in zip(text, letters, strict=True))
    tags = reference.drawn.tags
    ours = {tag.word for tag in tags if tag.message in numbers and tag.word in text}
    others = {tag.word for tag in tags if tag.message not in numbers} - ours
    if missing := [word for word in sorted(ours) if word not in labelled]:
        return f"no labels on {missing} in {text!r}"
    if extra := [word for word in sorted(others) if word in labelled]:
        return f"labels on {extra} in {text!r}"
    return ""


class Outcome(NamedTuple):
    """What one conversation gave with one template and folder."""

    template: str
    folder: str
    refusal: str
    difference: str
    drawn: Drawn

    def reason(self) -> str:
        """Return the reason of a refusal without its detail, or ``equal``."""
        return self.refusal.partition(": ")[0] or "equal"


@lru_cache
def template_of(name: str) -> str:
    """Return a template's text, or that of its marked twin."""
    text = (RECENT / f"{name.removesuffix(MARKED)}.jinja").read_text(encoding="utf-8")
    if not name.endswith(MARKED):
        return text
    text = text.replace("{#- answer #}", "{%- generation %}")
    return text.replace("{#- end of answer #}", "{%- endgeneration %}")


def _with_twins() -> dict[str, str]:
    """Return the name of each template's marked twin, if it has one, or else its own."""
    twins = {name: f"{name}{MARKED}" for name in NAMES}
    return {n: twin if template_of(twin) != template_of(n) else n for n, twin in twins.items()}


def outcomes(seed: int, count: int, folder: Path) -> Iterator[Outcome]:
    """Yield what each of ``count`` drawn conversations gives with its drawn pairs.

    ``folder`` takes the tokenizers' folders and the lines of data.
    """
    draws = random.Random(seed)
    paths = {name: write(folder / name) for name, write in FOLDERS.items()}
    theirs = {name: AutoTokenizer.from_pretrained(path) for name, path in paths.items()}
    twins = _with_twins()
    for name in {*twins, *twins.values()}:
        (folder / f"{name}.jinja").write_text(template_of(name), encoding="utf-8")
    ours: Callable[[str, str], Tokenizer] = lru_cache(maxsize=None)(
        lambda name, template: from_record(
            FileTokenizer(path=str(paths[name]), template=str(folder / f"{template}.jinja")),
            lambda *_: iter(()),  # type: ignore[arg-type,return-value]
        )
    )
    for _ in range(count):
        drawn = draw(draws)
        for _ in range(PAIRS):
            template = draws.choice(NAMES)
            template = draws.choice([template, twins[template]])
            name = draws.choice(list(FOLDERS))
            reference = Reference(drawn, template, theirs[name])
            found, refusal = prepared(drawn, ours(name, template), folder / "line.jsonl")
            differs = difference(reference, found, refusal)
            yield Outcome(template, name, refusal, differs, drawn)


def tally(found: Sequence[Outcome]) -> dict[str, int]:
    """Count outcomes by reason, the most frequent first."""
    return dict(Counter(outcome.reason() for outcome in found).most_common())
