"""Mistral's expression for words, which many of its folders have wrong (``fix_mistral_regex``).

``AutoTokenizer`` warns of such folders and reads them as they are, unless ``fix_mistral_regex`` in
``tokenizer_config.json`` is true (release 5.24, ``_patch_mistral_regex`` in
``tokenization_utils_tokenizers.py``). Which folders it means follows from their size and
``config.json``, not from the expression.
"""

import re
from collections.abc import Mapping
from typing import Any

from moefold.data.folder.classes import Content
from moefold.data.folder.files import CONFIG, TOKENIZER_CONFIG

FIX = "fix_mistral_regex"
WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression of tekken files, Mistral's."""
_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_FROM_SIZE = 100_000
_FIRST_RIGHT = 5
"""First release of ``transformers`` that wrote such folders with the right expression."""


def _is_meant(content: Content, model: Mapping[str, Any]) -> bool:
    """Return whether ``AutoTokenizer`` takes a folder for one with the wrong expression.

    ``model`` is ``config.json``, empty if there is none.
    """
    vocab = content["model"]["vocab"]
    names = {*vocab} if isinstance(vocab, dict) else {piece[0] for piece in vocab}
    names |= {token["content"] for token in content.get("added_tokens") or []}
    if len(names) <= _FROM_SIZE or not content.get("pre_tokenizer") or not model:
        return False
    release = re.match(r"\d+", str(model.get("transformers_version") or ""))
    if release and int(release[0]) >= _FIRST_RIGHT:
        return False
    return model.get("model_type") in (None, *_TYPES)


def correct_words(
    content: Content, config: Mapping[str, Any], model: Mapping[str, Any]
) -> tuple[Content, list[str]]:
    """Return a ``tokenizer.json`` as ``AutoTokenizer`` reads it, and notes.

    ``config`` is ``tokenizer_config.json``.
    """
    fix = config.get(FIX)
    if fix is False or not _is_meant(content, model):
        return content, []
    if not fix:
        note = (
            f"{TOKENIZER_CONFIG}: transformers takes the expression that divides text for a wrong "
            f"one, by the model's type and release in {CONFIG}, and reads it as it is, as here; "
            f'"{FIX}": true in the file takes Mistral\'s corrected one'
        )
        return content, [note]
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    present = content["pre_tokenizer"]
    if present["type"] == "Sequence":
        rest = present["pretokenizers"][1:]
    elif present["type"] == "Metaspace":
        plain = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        rest = [{"type": "ByteLevel"} | plain]
    else:
        rest = [present]
    words = {"type": "Sequence", "pretokenizers": [split, *rest]}
    return content | {"pre_tokenizer": words}, []
