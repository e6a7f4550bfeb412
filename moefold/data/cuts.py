r"""Where a long text can be cut so that the ids of its parts, joined, are those of the whole.

The ``tokenizers`` library takes about 100 bytes per character while it encodes a text. A cut lies
beside a space or a line feed. It is exact where nothing that the tokenizer does reaches across: no
added token, no piece of the pre-tokenizer and no merge of the model contains both sides, and no
rule that is applied to one side depends on the other. For pre-tokenizers with an expression this is
known of those listed here. None of them looks back, and only ``\s+(?!\S)`` looks ahead, at what
follows white space; so pieces before a cut that follows no white space, or follows line feeds that
belong to signs, are the same before it as at the end of a text. Other texts stay whole.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from moefold.data.folder.classes import LETTERS, LETTERS_AND_MARKS, qwen_words
from moefold.data.folder.mistral import WORDS
from moefold.data.foreign_tokenizers import PATTERNS

Content = Mapping[str, Any]
"""The JSON object of a ``tokenizer.json``, or a part of it."""

PART = 16_000
"""Number of characters after which a text is cut at the next place."""
_METASPACE = "\u2581"
_SPACES = "[!-~](?= )"
"""Before a space: no expression has a piece with a space after another character."""
_LINES = rf"{_SPACES}|[!-~](?=\n)"
"""Also before a line feed, which begins a run of white space."""
_LINES_OF_SIGNS = rf"{_SPACES}|[A-Za-z0-9](?=\n)|[!-/:-@\[-`{{-~]\n(?= )"
"""Also before a line feed, or after it where it belongs to the signs before it."""
_SPANNED = re.compile(r"[!-~][ \n]|\n ")
"""The two characters beside any cut."""

_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = PATTERNS["r50k"][0]
DIVIDING: Mapping[str, str] = {
    **{expression: _LINES_OF_SIGNS for expression, _ in PATTERNS.values()},
    **dict.fromkeys((qwen_words(LETTERS), qwen_words(LETTERS_AND_MARKS)), _LINES_OF_SIGNS),
    **dict.fromkeys((_DEEPSEEK, WORDS), _LINES_OF_SIGNS),
    _GPT2: _LINES,
}
"""Where texts can be cut, by the expression of the pre-tokenizer."""
HARMLESS = frozenset(
    {r"\p{N}{1,3}", r"\p{N}", r"[0-9]", r"[0-9][0-9][0-9]", "[一-龥\u3040-ゟ゠-ヿ]+"}
)
"""Expressions that match no white space, and do not look around."""


def divide(text: str, places: re.Pattern[str], size: int = PART) -> Iterator[str]:
    """Yield the parts of a text: ``size`` characters, and what follows up to a place to cut."""
    start = 0
    while place := places.search(text, start + size):
        yield text[start : place.end()]
        start = place.end()
    yield text[start:]


def find_places(content: Content) -> re.Pattern[str] | None:
    """Return what ends at each place where texts can be cut; None if they have to stay whole.

    ``content`` is a ``tokenizer.json``.
    """
    model = content["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    if any(_reaches_across(token) for token in content.get("added_tokens") or []):
        return None
    found = _places_of_bytes(content) or (_SPACES if _divides_metaspace(content) else None)
    return None if found is None else re.compile(found)


def _reaches_across(token: Content) -> bool:
    """Return whether an added token may depend on both sides of a cut."""
    looks_around = any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip"))
    return looks_around or _SPANNED.search(token["content"]) is not None


def _places_of_bytes(content: Content) -> str | None:
    """Return where a byte-level tokenizer always ends a piece."""
    normalizer = content.get("normalizer")
    # The canonical composition of a text does not change at a character of ASCII.
    if normalizer and normalizer != {"type": "NFC"}:
        return None
    pre_tokenizer = content.get("pre_tokenizer") or {}
    parts = [pre_tokenizer]
    if pre_tokenizer.get("type") == "Sequence":
        parts = pre_tokenizer["pretokenizers"]
    if not all(map(_is_known, parts)):
        return None
    found = {places for part in parts if (places := _places_of(part))}
    # A space is put before parts that do not begin with one.
    puts_space = any(part.get("add_prefix_space") for part in parts)
    if len(found) == 1 and not puts_space:
        return found.pop()
    return _SPACES if found else None


def _is_known(part: Content) -> bool:
    """Return whether what a part of a pre-tokenizer does at a cut is known."""
    if part.get("type") in ("Digits", "ByteLevel"):
        return True
    if part.get("type") != "Split":
        return False
    expression = part["pattern"].get("Regex")
    how = part.get("behavior"), part.get("invert")
    if how == ("Isolated", False):
        return expression in DIVIDING or expression in HARMLESS
    return how == ("Removed", True) and expression in DIVIDING


def _places_of(part: Content) -> str | None:
    """Return where a part of a pre-tokenizer, which is known, always ends a piece."""
    if part["type"] == "ByteLevel":
        return _LINES if part.get("use_regex", True) else None
    return DIVIDING.get(part["pattern"]["Regex"]) if part["type"] == "Split" else None


def _divides_metaspace(content: Content) -> bool:
    """Return whether a BPE in which ``▁`` stands for a space has no merge across a cut.

    Merges on the two sides then do not depend on each other. A part that begins with a space gets
    no other one before it.
    """
    model = content["model"]
    normalizer = content.get("normalizer")
    pre_tokenizer = content.get("pre_tokenizer") or {}
    if pre_tokenizer.get("type") == "Metaspace":
        known = normalizer is None and pre_tokenizer.get("replacement") == _METASPACE
    else:
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _METASPACE}
        # A split at spaces does nothing, since there are none after the normalizer.
        split = pre_tokenizer.get("type") == "Split" and pre_tokenizer["pattern"] == {"String": " "}
        known = normalizer == spaces and (split or not pre_tokenizer)
    if not known or model.get("ignore_merges"):
        return False
    vocab = model["vocab"]
    # An unknown character could be fused with an unknown space.
    return _METASPACE in vocab and not any(
        re.search(f"[!-~]{_METASPACE}", token) for token in vocab
    )
