"""The tokens of a tokenizer's folder: ``tokenizer.json`` with what the other files add to it.

``transformers`` gathers them in this order (release 5.24, ``tokenization_utils_base.py`` and
``tokenization_utils_tokenizers.py``), which is followed here:

* the tokens of ``tokenizer.json``, unless a class builds a tokenizer of its own;
* those of ``added_tokens_decoder`` in ``tokenizer_config.json``; without that field, those of
  ``added_tokens.json`` and, for such a class, of ``tokenizer.json``;
* special tokens that are named, in ``tokenizer_config.json`` or, if it has no
  ``added_tokens_decoder``, in ``special_tokens_map.json``, which then precedes;
* the further special tokens that are listed there.

A token that the file has gets the flags said later; a new one gets the next id.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from moefold.data.errors import DataError
from moefold.data.folder.classes import (
    GENERAL,
    REBUILT,
    Content,
    Rebuilt,
    class_of_folder,
    rebuilt_by,
)
from moefold.data.folder.fields import check_fields, field_notes
from moefold.data.folder.files import (
    ADDED_TOKENS,
    CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from moefold.data.folder.mistral import correct_words
from moefold.data.folder.post_processor import around_texts

NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Names of special tokens in all tokenizers."""
OF_MODEL = "model_specific_special_tokens"
"""Field with named special tokens, which is not read beside others of that kind."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_PLAIN = dict.fromkeys(_FLAGS, False)
BYTE_LEVEL = "byte_level"
"""Name under which ``config.json`` of kept files has :func:`is_byte_level` of their tokenizer."""
Token = dict[str, Any]
"""An added token as ``tokenizer.json`` has it, without its id."""


class FolderTokens(NamedTuple):
    """A folder's tokenizer."""

    content: Content
    """``tokenizer.json`` with all tokens, and with the parts that a class replaces."""
    changed: bool
    """Whether ``content`` differs from the file's."""
    named: dict[str, str]
    """Special tokens by name, such as ``bos_token``."""
    notes: tuple[str, ...]
    """Notes on fields and files that are not used."""


def assemble(content: Content, files: Mapping[str, str], folder: str) -> FolderTokens:
    """Return a folder's tokenizer, from all of its files.

    Args:
        content: ``tokenizer.json``.
        files: text of the files next to it, and of ``config.json``, by name.
        folder: name of the folder in messages.

    Raises:
        DataError: if files contradict each other, or a field is malformed or not supported.
    """
    config = _object(files, TOKENIZER_CONFIG)
    check_fields(config, f"{folder}/{TOKENIZER_CONFIG}")
    name = class_of_folder(_object(files, CONFIG), config, is_byte_level(content))
    try:
        rebuilt = rebuilt_by(name, content, folder)
        said = _Said(config, files, content, rebuilt, folder)
        table = _Table(content, keep_added=rebuilt is None)
        table.add(said.missing(table))
        if rebuilt is not None and rebuilt.marks_special:
            table.add(said.marked(table, rebuilt.marks_special))
        _check_ids(said, table, folder)
        assembled = _assembled(content, table, rebuilt, said)
        notes = field_notes(config, assembled)
        corrected, more = correct_words(assembled, config, _object(files, CONFIG))
        notes += more
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{folder}/{TOKENIZER}: model.vocab, added_tokens or post_processor is missing or "
            "malformed"
        ) from error
    changed = rebuilt is not None or table.changed or corrected is not assembled
    if name != GENERAL:
        notes.append(
            f"tokenizer_class {name} replaces normalizer, pre_tokenizer and decoder of "
            f"{TOKENIZER}, as in transformers"
        )
    return FolderTokens(corrected, changed and corrected != content, said.named, tuple(notes))


def named_tokens(files: Mapping[str, str]) -> dict[str, str]:
    """Return the special tokens that files other than ``tokenizer.json`` name."""
    config, model = (_object(files, name) for name in (TOKENIZER_CONFIG, CONFIG))
    rebuilt = REBUILT.get(class_of_folder(model, config, model.get(BYTE_LEVEL) is True))
    return _Said(config, files, {}, rebuilt, "tokenizer").named


def is_byte_level(content: Content) -> bool:
    """Whether a ``tokenizer.json`` has a part for bytes besides its model."""
    parts = {key: value for key, value in content.items() if key != "model"}
    return '"ByteLevel"' in json.dumps(parts)


def _object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    return json.loads(files[name]) if name in files else {}


class _Said:
    """What the files next to ``tokenizer.json`` say of tokens."""

    def __init__(
        self,
        config: Mapping[str, Any],
        files: Mapping[str, str],
        content: Content,
        rebuilt: Rebuilt | None,
        folder: str,
    ) -> None:
        settings = dict(config)
        if settings.get("additional_special_tokens") and not settings.get("extra_special_tokens"):
            settings["extra_special_tokens"] = settings["additional_special_tokens"]
        if any(_is_token_of_model(name, value) for name, value in config.items()) or isinstance(
            config.get("extra_special_tokens"), Mapping
        ):
            settings.pop(OF_MODEL, None)
        self.listed: list[tuple[int, Token, str]] = []
        """Id, token and file of the tokens that are listed with their ids."""
        own = content.get("added_tokens") or []
        if "added_tokens_decoder" in config:
            where = f"{TOKENIZER_CONFIG}: added_tokens_decoder"
            for number, token in (config["added_tokens_decoder"] or {}).items():
                self.listed.append((int(number), read_token(token), where))
        else:
            _merge_special_tokens_map(settings, _object(files, SPECIAL_TOKENS_MAP))
            special = _texts_of(settings)
            for text, number in _object(files, ADDED_TOKENS).items():
                flags = {"normalized": text not in special, "special": text in special}
                token = _PLAIN | {"content": text} | flags
                if type(number) is not int:
                    raise DataError(f"{folder}/{ADDED_TOKENS}: {text!r} has the id {number!r}")
                self.listed.append((number, token, ADDED_TOKENS))
        self.from_file = [] if "added_tokens_decoder" in config else own
        defaults = rebuilt.named if rebuilt is not None else {}
        self.settings = {**defaults, **settings}
        self._tokens = _named(self.settings)
        self.named = {name: token["content"] for name, token in self._tokens.items()}
        extra = self.settings.get("extra_special_tokens")
        self.extra = [read_token(t, True) for t in extra] if isinstance(extra, list) else []

    def missing(self, table: "_Table") -> list[Token]:
        """Return the tokens to add to a table, in order."""
        by_id = {number: token for number, token, _ in self.listed}
        by_id |= {token["id"]: without_id(token) for token in self.from_file}
        listed = [by_id[number] for number in sorted(by_id)]
        present = {token["content"]: token for token in table.added.values()}
        found = [token for token in listed if token != present.get(token["content"])]
        known = present.keys() | {token["content"] for token in found}
        for token in (*self._tokens.values(), *self.extra):
            if token["content"] not in known:
                found.append(token)
                known.add(token["content"])
        special = {*self.named.values()}
        return [t | {"special": True} if t["content"] in special else t for t in found]

    def marked(self, table: "_Table", how: str) -> list[Token]:
        """Return the named and listed special tokens as special ones."""
        by_text = {token["content"]: token for token in table.added.values()}
        texts = dict.fromkeys([*self.named.values(), *(t["content"] for t in self.extra)])
        kept = {text: by_text.get(text, {}) if how == "kept" else {} for text in texts}
        return [_PLAIN | kept[text] | {"content": text, "special": True} for text in texts]


def _merge_special_tokens_map(settings: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Take the fields of ``special_tokens_map.json``, which precede those of the configuration."""
    for key, value in stored.items():
        if key == "extra_special_tokens" and isinstance(value, list):
            present = settings.get(key)
            present = present if isinstance(present, list) else []
            settings[key] = [*present, *(token for token in value if token not in present)]
        elif key == "additional_special_tokens":
            settings.setdefault("extra_special_tokens", value)
        elif isinstance(value, Mapping) and key != "extra_special_tokens":
            settings[key] = read_token(value) | {"special": True}
        else:
            settings[key] = value


def _named(settings: Mapping[str, Any]) -> dict[str, Token]:
    """Return special tokens by name, those of all tokenizers first."""
    more = {key: value for key, value in settings.items() if _is_token_of_model(key, value)}
    for given in (settings.get("extra_special_tokens"), settings.get(OF_MODEL)):
        more |= given if isinstance(given, Mapping) else {}
    values = {key: settings.get(key) for key in NAMED} | more
    return {
        key: read_token(value, True)
        for key, value in values.items()
        if isinstance(value, str | Mapping)
    }


def _is_token_of_model(name: str, value: object) -> bool:
    """Return whether a field names a special token that not all tokenizers have."""
    return name.endswith("_token") and name not in NAMED and isinstance(value, str | Mapping)


def _texts_of(settings: Mapping[str, Any]) -> set[str]:
    """Return the text of named and listed special tokens."""
    extra = settings.get("extra_special_tokens")
    listed = extra if isinstance(extra, list) else []
    found = [token_text(settings.get(key)) for key in NAMED]
    found += [token_text(token) for token in listed]
    return {text for text in found if text}


def token_text(token: object) -> str | None:
    """Return a special token's text, given as a string or as an object with ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def read_token(value: object, special: bool = False) -> Token:
    """Return an added token, given as a string or as an object with flags.

    ``special`` applies to strings; a special token is by default not normalised.

    Raises:
        TypeError: if it is neither, or has no text.
    """
    text = token_text(value)
    if text is None:
        raise TypeError(f"{value!r} is not a token")
    given = value if isinstance(value, Mapping) else {"special": special}
    flags = {name: given[name] for name in _FLAGS if given.get(name) is not None}
    is_special = flags.get("special", False)
    return _PLAIN | {"normalized": not is_special} | flags | {"content": text}


def without_id(token: Mapping[str, Any]) -> Token:
    """Return a token of ``tokenizer.json`` without its id, with all flags."""
    return read_token({key: value for key, value in token.items() if key != "id"})


class _Table:
    """Vocabulary and added tokens, with the ids that the library ``tokenizers`` gives.

    A token of the vocabulary keeps its id; others get the ids after the last one. The ids in
    ``added_tokens`` of a file are not read by the library.
    """

    def __init__(self, content: Content, keep_added: bool) -> None:
        vocab = content["model"]["vocab"]
        if isinstance(vocab, dict):
            self._vocab: Mapping[str, int] = vocab
        else:
            self._vocab = {piece[0]: number for number, piece in enumerate(vocab)}
        self.added: dict[int, Token] = {}
        self.changed = False
        if keep_added:
            self.add(without_id(token) for token in content.get("added_tokens") or [])
            self.changed = False

    def id_of(self, text: str) -> int | None:
        """Return a token's id, None for an unknown one."""
        for number, token in self.added.items():
            if token["content"] == text:
                return number
        return self._vocab.get(text)

    def add(self, tokens: Iterable[Token]) -> None:
        """Add tokens, or change the flags of those that are there."""
        by_text = {token["content"]: number for number, token in self.added.items()}
        last = max(self.added, default=-1)
        following = max(len(self._vocab), last + 1)
        for token in tokens:
            text = token["content"]
            if not text:
                continue
            number = by_text.get(text, self._vocab.get(text))
            if number is None:
                number = following
                following += 1
            if self.added.get(number) != token:
                self.added[number] = token
                self.changed = True
            by_text[text] = number


def _check_ids(said: _Said, table: _Table, folder: str) -> None:
    """Raise ``DataError`` if a listed token gets another id than the one it is listed with."""
    ids = {token["content"]: number for number, token in table.added.items()}
    for number, token, where in said.listed:
        given = ids.get(token["content"])
        if given != number:
            what = "leaves it out" if given is None else f"gives it the id {given}"
            raise DataError(
                f"{folder}: {where} has {token['content']!r} with the id {number}, but {TOKENIZER} "
                f"{what}; correct one of them, so that each token has the id of its row in the "
                "embedding"
            )


def _assembled(content: Content, table: _Table, rebuilt: Rebuilt | None, said: _Said) -> Content:
    """Return ``tokenizer.json`` with the tokens of a table and the parts that a class replaces."""
    if not table.changed and rebuilt is None:
        return content
    added = [{"id": number} | table.added[number] for number in sorted(table.added)]
    assembled = content | {"added_tokens": added}
    if rebuilt is None:
        return assembled
    parts = rebuilt.parts(said.settings)
    assembled |= parts | {"model": content["model"] | parts["model"]}
    if rebuilt.around is not None:
        before, after = (said.named[name] for name in rebuilt.around)
        ids = {text: table.id_of(text) for text in (before, after)}
        known = {text: number for text, number in ids.items() if number is not None}
        assembled["post_processor"] = around_texts({before: known[before]}, {after: known[after]})
    return assembled
