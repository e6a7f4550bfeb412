"""Drawn texts, prompts with completions and pairs of texts, beside ``AutoTokenizer``.

TRL's rules (release 1.16: ``sft_trainer.py``, ``dpo_trainer.py``, ``data_utils.py``) are stated
here a second time: the end token is written after a completion that does not end with it; a
completion's labels begin where the ids of prompt and completion differ from those of the prompt, in
a pair at the smaller of both places; two texts without a prompt have their common beginning as
prompt, but for a space at its end.

A document ends with the end token itself. TRL writes it as text, which gives the same ids unless
the tokenizer splits special tokens or adds others after a text.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from moefold.data.chats.conversations import ConversationReader, PreferenceReader
from moefold.data.config import Chat, Jsonl, Preferences
from moefold.data.corpora.sources import JsonlReader, Skipped
from moefold.data.packing import REJECTED
from moefold.data.tokenizer import Tokenizer, from_path
from tests.chats import words
from tests.tokenizer_folders import FOLDERS

KINDS = ("text", "completion", "pair", "whole pair")
TOKENS = 1 << 12
Marked = tuple[list[int], list[int]]
"""Ids of an example, and 1 where a token is trained; 2 is added to those of a rejected text."""


def draw(draws: random.Random, kind: str, theirs: Any) -> dict[str, str]:
    """Return a drawn row of a kind, now and then with tokens of the tokenizer as text."""
    end = theirs.eos_token
    inside = draws.choice([*theirs.all_special_tokens, "é 12", "\n\n  x", "🙂", "▁"])
    start = draws.choice(["", "", theirs.bos_token or " "])
    question = start + words(draws, 3) + draws.choice(["", inside, " "]) + words(draws, 2)
    question += draws.choice(["", " ", "\n", ":"])

    def answer(first: str = "") -> str:
        said = draws.choice(["", " ", "\n"]) + first + words(draws, 3)
        return said + draws.choice(["", " ", inside, end, f"{end}\n"])

    if kind == "text":
        return {"text": question + answer()}
    if kind == "completion":
        return {"prompt": question, "completion": answer()}
    # Neither begins with the other, which would leave it without an answer.
    sides = {"chosen": answer("yes "), "rejected": answer("no ")}
    if kind == "pair":
        return {"prompt": question, **sides}
    return {name: question + side for name, side in sides.items()}


# --------------------------------------------------------------------------------- TRL's rules


def expected(kind: str, row: dict[str, str], theirs: Any) -> Marked:
    """Return what TRL trains of a row."""
    if kind == "text":
        ids = _ids(row["text"], theirs)
        ids += [theirs.eos_token_id] if ids[-1:] != [theirs.eos_token_id] else []
        return ids, [1] * len(ids)
    sides = [name for name in ("completion", "chosen", "rejected") if name in row]
    prompt = row.get("prompt")
    texts = [row[name] for name in sides]
    if prompt is None:
        shared = _common(*texts)
        shared -= texts[0][shared - 1] == " "
        prompt = texts[0][:shared]
        texts = [text[shared:] for text in texts]
    before = _ids(prompt, theirs)
    whole = [_ids(prompt + _ended(text, theirs), theirs) for text in texts]
    begin = min(_common(before, ids) for ids in whole)
    marks = [[int(n >= begin) for n in range(len(ids))] for ids in whole]
    found = [n + REJECTED * side for side, each in enumerate(marks) for n in each]
    return [i for ids in whole for i in ids], found


def _ended(text: str, theirs: Any) -> str:
    return text if text.endswith(theirs.eos_token) else text + theirs.eos_token


def _ids(text: str, theirs: Any) -> list[int]:
    """Return a text's ids; a token around it that is written in it is not added once more."""
    ids = theirs(text)["input_ids"]
    starts = (theirs.bos_token_id, theirs.cls_token_id)
    ends = (theirs.sep_token_id,)
    ids = ids[1:] if ids[0] in starts and ids[:1] == ids[1:2] else ids
    return ids[:-1] if ids[-1] in ends and ids[-1:] == ids[-2:-1] else ids


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


# ------------------------------------------------------------------------------- moefold's path

_READERS = {
    "text": (JsonlReader, Jsonl),
    "completion": (ConversationReader, Chat),
    "pair": (PreferenceReader, Preferences),
    "whole pair": (PreferenceReader, Preferences),
}


def prepared(
    kind: str, rows: Sequence[dict[str, str]], ours: Tokenizer, file: Path
) -> Iterator[Marked]:
    """Yield what is trained of each of the rows, which are read from a file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reader, record = _READERS[kind]
    groups = reader(record(files=(str(file),))).encode(ours, TOKENS, Skipped())  # type: ignore[arg-type]
    for found in (each for group in groups for each in group):
        ids = found.ids_N.tolist()
        mask = found.loss_mask_N
        yield ids, [1] * len(ids) if mask is None else mask.astype(int).tolist()


class TextOutcome(NamedTuple):
    """What a row gave with a folder, here and there."""

    kind: str
    folder: str
    row: dict[str, str]
    found: Marked
    wanted: Marked


def text_outcomes(seed: int, count: int, folder: Path) -> Iterator[TextOutcome]:
    """Yield what ``count`` drawn rows of each kind give with each tokenizer folder."""
    draws = random.Random(seed)
    paths = {name: write(folder / "texts" / name) for name, write in FOLDERS.items()}
    for name, path in paths.items():
        theirs = AutoTokenizer.from_pretrained(path)
        ours = from_path(str(path))
        for kind in KINDS:
            rows = [draw(draws, kind, theirs) for _ in range(count)]
            found = prepared(kind, rows, ours, folder / "rows.jsonl")
            for row, each in zip(rows, found, strict=True):
                yield TextOutcome(kind, name, row, each, expected(kind, row, theirs))
