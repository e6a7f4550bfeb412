"""The files next to a ``tokenizer.json``: chat template, special tokens, generation settings.

They are kept as text from import to export, so that an exported folder contains them again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.data.config import DataError
from moefold.data.folder.classes import GENERAL
from moefold.data.folder.files import (
    CONFIG,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TEMPLATE_VALUES,
    TOKENIZER_CONFIG,
    read_sidecars,
)
from moefold.data.folder.tokens import BYTE_LEVEL, named_tokens
from moefold.model.families.hub import SPECIAL

_NAMES = ("model_type", "tokenizer_class")
"""Fields of ``config.json`` that decide which class of ``transformers`` reads the folder."""
_INPUTS = {"model_input_names": ["input_ids", "attention_mask"]}
FAST = "PreTrainedTokenizerFast"
"""The name, in all releases, of the class that reads ``tokenizer.json`` as it is."""


class TokenizerFiles(dict[str, str]):
    """Contents of the files by name."""

    @classmethod
    def read(
        cls, folder: Path, end: str | None, start: str | None, byte_level: bool
    ) -> "TokenizerFiles":
        """Read a folder's files; ``end`` and ``start`` override the tokens named there.

        ``byte_level`` is :func:`moefold.data.folder.tokens.is_byte_level` of its tokenizer.

        Raises:
            DataError: if a file is too large, or a ``.json`` file does not hold an object.
        """
        files = cls(read_sidecars(folder))
        stored = files.json(CONFIG)
        kept = {k: stored[k] for k in (*SPECIAL, *_NAMES) if stored.get(k) is not None}
        files[CONFIG] = json.dumps(kept | {BYTE_LEVEL: byte_level})
        tokens = {"eos_token": end, "bos_token": start}
        named = files.special_tokens()
        tokenizer_config = files.json(TOKENIZER_CONFIG)
        changed: dict[str, Any] = {k: v for k, v in tokens.items() if v and named.get(k) != v}
        if TOKENIZER_CONFIG not in files or "auto_map" in tokenizer_config:
            # Code in the folder is neither run nor kept.
            changed["tokenizer_class"] = FAST
        if changed:
            files.change_config(changed)
        return files

    def change_config(self, changed: Mapping[str, Any]) -> None:
        """Change fields of ``tokenizer_config.json``, and in files that precede it."""
        kept = {k: v for k, v in self.json(TOKENIZER_CONFIG).items() if k != "auto_map"}
        self[TOKENIZER_CONFIG] = json.dumps({**kept, **changed}, indent=2)
        stored = self.json(SPECIAL_TOKENS_MAP)
        if both := {k: v for k, v in changed.items() if k in stored}:
            self[SPECIAL_TOKENS_MAP] = json.dumps(stored | both, indent=2)

    @classmethod
    def of(cls, end: str, end_id: int, start: str | None, start_id: int | None) -> "TokenizerFiles":
        """Return the files of a tokenizer that moefold trained."""
        tokens = {"eos_token": end, "bos_token": start}
        ids = {"eos_token_id": end_id, "bos_token_id": start_id}
        fixed = {"tokenizer_class": FAST, "clean_up_tokenization_spaces": False, **_INPUTS}
        config = fixed | {k: v for k, v in tokens.items() if v is not None}
        known = {k: v for k, v in ids.items() if v is not None}
        return cls({TOKENIZER_CONFIG: json.dumps(config, indent=2), CONFIG: json.dumps(known)})

    def json(self, name: str) -> dict[str, Any]:
        """Return a file's JSON object, empty if the file is missing."""
        return json.loads(self.get(name, "{}"))

    def _ids(self) -> dict[str, Any]:
        """Return the special token ids of ``config.json``."""
        return {k: v for k, v in self.json(CONFIG).items() if k in SPECIAL}

    def special_ids(self, end_id: int) -> dict[str, Any]:
        """Return special token ids for ``config.json``; ``eos_token_id`` includes ``end_id``."""
        ids = self._ids()
        return ids | {"eos_token_id": _with_end_id(ids.get("eos_token_id"), end_id)}

    def generation_config(self, end_id: int) -> dict[str, Any]:
        """Return the generation settings; ``eos_token_id`` includes ``end_id``."""
        config = self.json(GENERATION_CONFIG) if GENERATION_CONFIG in self else self._ids()
        return config | {"eos_token_id": _with_end_id(config.get("eos_token_id"), end_id)}

    def end_ids(self, end_id: int) -> tuple[int, ...]:
        """Return the ids of all tokens that end a text."""
        end_ids = [end_id]
        for config in (self.special_ids(end_id), self.generation_config(end_id)):
            ids = config["eos_token_id"]
            end_ids += ids if isinstance(ids, list) else [ids]
        return tuple(dict.fromkeys(i for i in end_ids if isinstance(i, int) and i >= 0))

    def add_end(self, end_id: int, more: int) -> None:
        """Make ``more`` an end of generated texts, besides those there are and ``end_id``."""
        settings = self.generation_config(end_id)
        ids = settings["eos_token_id"]
        listed = ids if isinstance(ids, list) else [ids]
        if more not in listed:
            self[GENERATION_CONFIG] = json.dumps(settings | {"eos_token_id": [*listed, more]})

    @property
    def cleans_spaces(self) -> bool:
        """Whether spaces before punctuation are removed from decoded text."""
        return self.json(TOKENIZER_CONFIG).get("clean_up_tokenization_spaces") is True

    @property
    def splits_special(self) -> bool:
        """Whether special tokens that a text contains are encoded as text."""
        return self.json(TOKENIZER_CONFIG).get("split_special_tokens") is True

    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens' text by name, such as ``bos_token``."""
        return named_tokens(self)

    def replace_template(self, text: str) -> None:
        """Make ``text`` the only chat template, with tools and without."""
        for name in [name for name in self if name.startswith(f"{TEMPLATE_FOLDER}/")]:
            del self[name]
        self[TEMPLATE_FILE] = text

    def chat_template(self, tools: bool = False) -> str | None:
        """Return the chat template; of several, the one with or without ``tools``.

        Files precede ``tokenizer_config.json``, as in ``transformers``.

        Raises:
            DataError: if there are only templates for other uses.
        """
        prefix = f"{TEMPLATE_FOLDER}/"
        by_name = {
            name.removeprefix(prefix).removesuffix(".jinja"): text
            for name, text in self.items()
            if name.startswith(prefix)
        }
        if TEMPLATE_FILE in self:
            by_name["default"] = self[TEMPLATE_FILE]
        stored = self.json(TOKENIZER_CONFIG).get("chat_template")
        where = prefix
        if not by_name:
            where = f"chat_template in {TOKENIZER_CONFIG}"
            by_name = _templates_by_name(stored)
        if not by_name:
            return None
        chosen = (tools and by_name.get("tool_use")) or by_name.get("default")
        if chosen is None:
            raise DataError(
                f"{where} has the chat templates {', '.join(sorted(by_name))}, but no default; "
                f"save the one to use as {TEMPLATE_FILE}, which precedes {TOKENIZER_CONFIG}"
            )
        return chosen

    def template_values(self) -> dict[str, Any]:
        """Return values of the template that all conversations of the training data had."""
        return self.json(TEMPLATE_VALUES)

    def set_template_values(self, values: Mapping[str, Any]) -> None:
        """Keep values of the template; none are kept if there are none."""
        self.pop(TEMPLATE_VALUES, None)
        if values:
            self[TEMPLATE_VALUES] = json.dumps(values, indent=2)

    def write(self, folder: Path, end_id: int, context: int | None) -> dict[str, Any]:
        """Write the files; return special token ids for ``config.json``.

        ``context``, the model's maximum length in tokens, becomes ``model_max_length``.
        """
        files = dict(self)
        config = self.json(TOKENIZER_CONFIG)
        settings = self.generation_config(end_id)
        portable = _for_release_4(config)
        if context is not None and "model_max_length" not in config:
            portable = portable | {"model_max_length": context}
        if portable != config:
            files[TOKENIZER_CONFIG] = json.dumps(portable, indent=2, ensure_ascii=False)
        if settings != self.json(GENERATION_CONFIG):
            files[GENERATION_CONFIG] = json.dumps(settings, indent=2)
        for name, text in files.items():
            if name != CONFIG:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
        return self.special_ids(end_id)


def _for_release_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``tokenizer_config.json`` that release 4 of ``transformers`` reads like release 5.

    There, a folder's general class has another name and returns token types, which models refuse,
    and a list of further special tokens has another name.
    """
    changed = dict(config)
    name = config.get("tokenizer_class")
    if name in (None, FAST, GENERAL):
        changed["tokenizer_class"] = FAST
        changed = _INPUTS | changed
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list) and "additional_special_tokens" not in config:
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    return changed


def _templates_by_name(stored: object) -> dict[str, str]:
    """Return the templates of ``tokenizer_config.json``: one, a list of name and text, or names."""
    if isinstance(stored, str):
        return {"default": stored}
    if isinstance(stored, list):
        stored = {t.get("name"): t.get("template") for t in stored if isinstance(t, dict)}
    if not isinstance(stored, dict):
        return {}
    return {str(name): text for name, text in stored.items() if isinstance(text, str)}


def _with_end_id(ids: Any, end_id: int) -> Any:
    """Return end token ids (one or a list), with ``end_id`` added if it is missing."""
    several = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if end_id in several:
        return ids
    return [*several, end_id] if several else end_id
