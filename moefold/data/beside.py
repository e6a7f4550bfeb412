"""The files next to a ``tokenizer.json``: chat template, special tokens, generation settings.

They are kept as text from import to export, so that an exported folder has them again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.data.config import (
    BESIDE,
    GENERATION_CONFIG,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    DataError,
)
from moefold.files import named, read_json
from moefold.model.families.hub import SPECIAL

CONFIG = "config.json"
"""From this file only the ids of special tokens are kept."""
LIMIT = 4 * 2**20
_FAST = "PreTrainedTokenizerFast"


class Beside(dict[str, str]):
    """Content of each file by its name."""

    @classmethod
    def read(cls, folder: Path, end: str, start: str | None) -> "Beside":
        """Read a folder's files; ``end`` and ``start`` replace the tokens that these name.

        Raises:
            DataError: if a file is too large, or not a JSON object though its name says so.
        """
        found, config = cls(), folder / CONFIG
        for name in BESIDE:
            if (file := folder / name).is_file():
                if name.endswith(".json"):
                    read_json(file, DataError, LIMIT)
                with named(file, DataError):
                    found[name] = file.read_text(encoding="utf-8-sig")
        held = read_json(config, DataError, LIMIT) if config.is_file() else {}
        found[CONFIG] = json.dumps({k: held[k] for k in SPECIAL if held.get(k) is not None})
        wanted = {"eos_token": end} | ({"bos_token": start} if start else {})
        said = found.json(TOKENIZER_CONFIG)
        changed = {k: v for k, v in wanted.items() if content(said.get(k)) != v}
        if TOKENIZER_CONFIG not in found or "auto_map" in said:
            # Code in the folder is never run, and not kept.
            changed["tokenizer_class"] = _FAST
        if changed:
            kept = {k: v for k, v in said.items() if k != "auto_map"}
            found[TOKENIZER_CONFIG] = json.dumps(kept | changed, indent=2)
        return found

    @classmethod
    def of(cls, end: str, end_id: int, start: str | None, start_id: int | None) -> "Beside":
        """Return the files of a tokenizer that was trained here."""
        tokens = {"eos_token": end, "bos_token": start}
        ids = {"eos_token_id": end_id, "bos_token_id": start_id}
        fixed = {"tokenizer_class": _FAST, "clean_up_tokenization_spaces": False}
        said = fixed | {k: v for k, v in tokens.items() if v is not None}
        known = {k: v for k, v in ids.items() if v is not None}
        return cls({TOKENIZER_CONFIG: json.dumps(said, indent=2), CONFIG: json.dumps(known)})

    def json(self, name: str) -> dict[str, Any]:
        """Return a file's JSON object; empty for a missing file."""
        return json.loads(self.get(name, "{}"))

    def ids(self, end_id: int) -> dict[str, Any]:
        """Return special token ids for ``config.json``; ``eos_token_id`` includes ``end_id``."""
        said = self.json(CONFIG)
        return said | {"eos_token_id": _with(said.get("eos_token_id"), end_id)}

    def generation(self, end_id: int) -> dict[str, Any]:
        """Return the generation settings, with every token that ends a text."""
        said = self.json(GENERATION_CONFIG) if GENERATION_CONFIG in self else self.json(CONFIG)
        return said | {"eos_token_id": _with(said.get("eos_token_id"), end_id)}

    def ends(self, end_id: int) -> tuple[int, ...]:
        """Return the ids of all tokens that end a text."""
        found = [end_id]
        for said in (self.ids(end_id), self.generation(end_id)):
            ids = said["eos_token_id"]
            found += ids if isinstance(ids, list) else [ids]
        return tuple(dict.fromkeys(i for i in found if isinstance(i, int) and i >= 0))

    def special(self) -> dict[str, str]:
        """Return the texts of special tokens by name, such as ``bos_token``."""
        said = self.json("special_tokens_map.json") | self.json(TOKENIZER_CONFIG)
        extra = said.get("extra_special_tokens")
        said |= extra if isinstance(extra, dict) else {}
        texts = {k: content(v) for k, v in said.items() if k.endswith("_token")}
        return {name: text for name, text in texts.items() if text is not None}

    def template(self, tools: bool = False) -> str | None:
        """Return the chat template; of several, the one for conversations with or without tools."""
        if TEMPLATE_FILE in self:
            return self[TEMPLATE_FILE]
        said = self.json(TOKENIZER_CONFIG).get("chat_template")
        if isinstance(said, list):  # a list of {name, template}
            by_name = {t.get("name"): t.get("template") for t in said if isinstance(t, dict)}
            said = (tools and by_name.get("tool_use")) or by_name.get("default")
        return said if isinstance(said, str) else None

    def write(self, folder: Path, end_id: int, context: int | None) -> dict[str, Any]:
        """Write the files; return the ids of special tokens for ``config.json``.

        ``context``, the model's maximum length in tokens, becomes ``model_max_length``.
        """
        files, said, settings = dict(self), self.json(TOKENIZER_CONFIG), self.generation(end_id)
        if context is not None and "model_max_length" not in said:
            files[TOKENIZER_CONFIG] = json.dumps(said | {"model_max_length": context}, indent=2)
        if settings != self.json(GENERATION_CONFIG):
            files[GENERATION_CONFIG] = json.dumps(settings, indent=2)
        for name, text in files.items():
            if name != CONFIG:
                (folder / name).write_text(text, encoding="utf-8")
        return self.ids(end_id)


def content(token: object) -> str | None:
    """Return a special token's text, from either notation: a string, or an object with it."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def _with(ids: Any, end_id: int) -> Any:
    """Return end token ids, one or several, with ``end_id`` added if it is not among them."""
    several = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if end_id in several:
        return ids
    return [*several, end_id] if several else end_id
