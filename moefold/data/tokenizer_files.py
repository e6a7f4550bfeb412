"""The files next to a ``tokenizer.json``: chat template, special tokens, generation settings.

They are kept as text from import to export, so that an exported folder contains them again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.data.config import (
    GENERATION_CONFIG,
    SIDECAR_FILES,
    TEMPLATE_FILE,
    TEMPLATE_VALUES,
    TOKENIZER_CONFIG,
    DataError,
)
from moefold.files import path_in_errors, read_json
from moefold.model.families.hub import SPECIAL

CONFIG = "config.json"
"""Only the ids of special tokens are kept from this file."""
MAX_BYTES = 4 * 2**20
_FAST = "PreTrainedTokenizerFast"


class TokenizerFiles(dict[str, str]):
    """Contents of the files by name."""

    @classmethod
    def read(cls, folder: Path, end: str, start: str | None) -> "TokenizerFiles":
        """Read a folder's files; ``end`` and ``start`` override the tokens named there.

        Raises:
            DataError: if a file is too large, or a ``.json`` file does not hold an object.
        """
        files, config = cls(), folder / CONFIG
        for name in SIDECAR_FILES:
            if (file := folder / name).is_file():
                if name.endswith(".json"):
                    read_json(file, DataError, MAX_BYTES)
                with path_in_errors(file, DataError):
                    files[name] = file.read_text(encoding="utf-8-sig")
        stored = read_json(config, DataError, MAX_BYTES) if config.is_file() else {}
        files[CONFIG] = json.dumps({k: stored[k] for k in SPECIAL if stored.get(k) is not None})
        tokens = {"eos_token": end} | ({"bos_token": start} if start else {})
        tokenizer_config = files.json(TOKENIZER_CONFIG)
        changed = {k: v for k, v in tokens.items() if token_text(tokenizer_config.get(k)) != v}
        if TOKENIZER_CONFIG not in files or "auto_map" in tokenizer_config:
            # Code in the folder is neither run nor kept.
            changed["tokenizer_class"] = _FAST
        if changed:
            kept = {k: v for k, v in tokenizer_config.items() if k != "auto_map"}
            files[TOKENIZER_CONFIG] = json.dumps(kept | changed, indent=2)
        return files

    @classmethod
    def of(cls, end: str, end_id: int, start: str | None, start_id: int | None) -> "TokenizerFiles":
        """Return the files of a tokenizer that moefold trained."""
        tokens = {"eos_token": end, "bos_token": start}
        ids = {"eos_token_id": end_id, "bos_token_id": start_id}
        fixed = {"tokenizer_class": _FAST, "clean_up_tokenization_spaces": False}
        config = fixed | {k: v for k, v in tokens.items() if v is not None}
        known = {k: v for k, v in ids.items() if v is not None}
        return cls({TOKENIZER_CONFIG: json.dumps(config, indent=2), CONFIG: json.dumps(known)})

    def json(self, name: str) -> dict[str, Any]:
        """Return a file's JSON object, empty if the file is missing."""
        return json.loads(self.get(name, "{}"))

    def special_ids(self, end_id: int) -> dict[str, Any]:
        """Return special token ids for ``config.json``; ``eos_token_id`` includes ``end_id``."""
        ids = self.json(CONFIG)
        return ids | {"eos_token_id": _with_end_id(ids.get("eos_token_id"), end_id)}

    def generation_config(self, end_id: int) -> dict[str, Any]:
        """Return the generation settings; ``eos_token_id`` includes ``end_id``."""
        config = self.json(GENERATION_CONFIG) if GENERATION_CONFIG in self else self.json(CONFIG)
        return config | {"eos_token_id": _with_end_id(config.get("eos_token_id"), end_id)}

    def end_ids(self, end_id: int) -> tuple[int, ...]:
        """Return the ids of all tokens that end a text."""
        end_ids = [end_id]
        for config in (self.special_ids(end_id), self.generation_config(end_id)):
            ids = config["eos_token_id"]
            end_ids += ids if isinstance(ids, list) else [ids]
        return tuple(dict.fromkeys(i for i in end_ids if isinstance(i, int) and i >= 0))

    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens' text by name, such as ``bos_token``."""
        config = self.json("special_tokens_map.json") | self.json(TOKENIZER_CONFIG)
        extra = config.get("extra_special_tokens")
        config |= extra if isinstance(extra, dict) else {}
        texts = {k: token_text(v) for k, v in config.items() if k.endswith("_token")}
        return {name: text for name, text in texts.items() if text is not None}

    def chat_template(self, tools: bool = False) -> str | None:
        """Return the chat template; of several, the one with or without ``tools``."""
        if TEMPLATE_FILE in self:
            return self[TEMPLATE_FILE]
        template = self.json(TOKENIZER_CONFIG).get("chat_template")
        if isinstance(template, list):  # a list of {name, template}
            by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = (tools and by_name.get("tool_use")) or by_name.get("default")
        return template if isinstance(template, str) else None

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
        files, config = dict(self), self.json(TOKENIZER_CONFIG)
        settings = self.generation_config(end_id)
        if context is not None and "model_max_length" not in config:
            files[TOKENIZER_CONFIG] = json.dumps(config | {"model_max_length": context}, indent=2)
        if settings != self.json(GENERATION_CONFIG):
            files[GENERATION_CONFIG] = json.dumps(settings, indent=2)
        for name, text in files.items():
            if name != CONFIG:
                (folder / name).write_text(text, encoding="utf-8")
        return self.special_ids(end_id)


def token_text(token: object) -> str | None:
    """Return a special token's text, given as a string or as an object with ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _with_end_id(ids: Any, end_id: int) -> Any:
    """Return end token ids (one or a list), with ``end_id`` added if it is missing."""
    several = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if end_id in several:
        return ids
    return [*several, end_id] if several else end_id
