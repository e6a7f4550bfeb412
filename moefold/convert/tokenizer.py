"""The tokenizer's files of a Hugging Face folder: read as text, written for others to load."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from moefold.convert.errors import ConvertError
from moefold.model.families.folder import read_json

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
LIMIT = 128 * 2**20
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>")
# Fields that name code of the folder's own, or a class that needs other files than tokenizer.json.
_NOT_KEPT = (
    "auto_map",
    "tokenizer_class",
    "tokenizer_file",
    "name_or_path",
    "special_tokens_map_file",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """A ``tokenizer.json`` as text, and the names of its special tokens."""

    text: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """The content of ``tokenizer_config.json``; may be empty."""


def read_tokenizer(folder: Path) -> tuple[TokenizerFiles | None, list[str]]:
    """Return a folder's tokenizer, None where it has no ``tokenizer.json``, and notes."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None, [f"{folder} has no {TOKENIZER}; the checkpoint will have no tokenizer"]
    read_json(path, LIMIT)
    config = read_json(folder / CONFIG, LIMIT) if (folder / CONFIG).is_file() else {}
    notes = []
    if "auto_map" in config:
        notes.append(f"auto_map in {CONFIG} names code of the folder's own; it is never run")
    kept = {k: v for k, v in config.items() if k not in _NOT_KEPT}
    return TokenizerFiles(path.read_text(encoding="utf-8"), kept), notes


def write_tokenizer(folder: Path, files: TokenizerFiles, context: int | None) -> dict[str, int]:
    """Write the two files that ``transformers.AutoTokenizer`` reads; return special tokens' ids.

    Args:
        folder: where to.
        files: the tokenizer.
        context: longest sequence, which the tokenizer warns about.

    Raises:
        ConvertError: where the text is no tokenizer.
    """
    try:
        inner = tokenizers.Tokenizer.from_str(files.text)
    except Exception as error:  # the library raises bare Exception for any malformed content
        raise ConvertError(folder, [f"the tokenizer is no {TOKENIZER}: {error}"]) from None
    config = {k: v for k, v in files.config.items() if k not in (*_NOT_KEPT, "vocab")}
    if not config.get("eos_token"):
        end = next((t for t in _USUAL_ENDS if inner.token_to_id(t) is not None), None)
        config["eos_token"] = end
    config = {k: v for k, v in config.items() if v is not None}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.setdefault("clean_up_tokenization_spaces", False)
    if context is not None:
        config.setdefault("model_max_length", context)
    (folder / TOKENIZER).write_text(files.text, encoding="utf-8")
    said = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / CONFIG).write_text(said + "\n", encoding="utf-8")
    return _ids(config, inner)


def _ids(config: Mapping[str, Any], inner: tokenizers.Tokenizer) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in ("bos", "eos", "pad"):
        token = config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = inner.token_to_id(token) if isinstance(token, str) else None
        if number is not None:
            found[f"{name}_token_id"] = number
    return found
