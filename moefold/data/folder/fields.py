"""The fields of ``tokenizer_config.json``: which are read, change nothing, or are refused."""

from collections.abc import Mapping
from typing import Any

from moefold.data.errors import DataError
from moefold.data.folder.files import TOKENIZER, TOKENIZER_CONFIG
from moefold.data.folder.mistral import FIX
from moefold.data.folder.post_processor import added_around

_READ: dict[str, tuple[type, ...]] = {
    "add_bos_token": (bool,),
    "add_eos_token": (bool,),
    "add_prefix_space": (bool,),
    "added_tokens_decoder": (dict,),
    "additional_special_tokens": (list,),
    "chat_template": (str, list, dict),
    "clean_up_tokenization_spaces": (bool,),
    "do_lower_case": (bool,),
    "extra_special_tokens": (list, dict),
    FIX: (bool,),
    "legacy": (bool,),
    "model_max_length": (int, float),
    "model_specific_special_tokens": (dict,),
    "split_special_tokens": (bool,),
    "strip_accents": (bool,),
    "tokenize_chinese_chars": (bool,),
    "tokenizer_class": (str,),
}
"""Types of the fields that are read; null is allowed."""
_IDLE = """
_commit_hash auto_map backend chat_control_tokens device_map errors from_slow is_local
local_files_only max_len max_length merges_file model_input_names name_or_path
pad_to_multiple_of pad_token_type_id padding_side processor_class response_schema
response_template slow_tokenizer_class sp_model_kwargs spaces_between_special_tokens
special_tokens_map_file stride tokenizer_file transformers_version trim_offsets truncation_side
truncation_strategy unk_id use_default_system_prompt use_fast verbose vocab_file
"""
_NO_EFFECT = set(_IDLE.split())
_FILES = "fast_tokenizer_files"


def check_fields(config: Mapping[str, Any], file: str) -> None:
    """Check the fields of a ``tokenizer_config.json``.

    Raises:
        DataError: for a field of a wrong type, or one that is not supported.
    """
    for name, kinds in _READ.items():
        value = config.get(name)
        wrong = isinstance(value, bool) and bool not in kinds
        if value is not None and (wrong or not isinstance(value, kinds)):
            named = " or ".join(kind.__name__ for kind in kinds)
            raise DataError(f"{file}: {name} is {value!r}, not of type {named}; correct it")
    for name, value in config.items():
        if name.endswith("_token") and not name.startswith("add_"):
            _check_token(value, f"{file}: {name}", allow_none=True)
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        if not number.isdecimal():
            raise DataError(f"{file}: added_tokens_decoder has the id {number!r}; name a number")
        _check_token(token, f"{file}: added_tokens_decoder {number}")
    for name in (
        "extra_special_tokens",
        "additional_special_tokens",
        "model_specific_special_tokens",
    ):
        listed = config.get(name) or []
        for token in listed.values() if isinstance(listed, dict) else listed:
            _check_token(token, f"{file}: {name}")
    if config.get(_FILES):
        raise DataError(
            f"{file}: {_FILES} names other files for some releases of transformers, which is not "
            f"supported; rename the newest of them to {TOKENIZER} and remove the field"
        )


def _check_token(value: object, where: str, allow_none: bool = False) -> None:
    text = value.get("content") if isinstance(value, Mapping) else value
    if isinstance(text, str) or (allow_none and value is None):
        return
    raise DataError(f"{where} is {value!r}, which is no token; give its text, or null for none")


def field_notes(config: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    """Return notes on fields that are left out, or that ``tokenizer.json`` decides otherwise."""
    # Release 5 writes each of these tokens a second time, as a field of its name.
    written_twice = config.get("model_specific_special_tokens") or {}
    known = {*_READ, *_NO_EFFECT, _FILES, *written_twice}
    unknown = [name for name in config if name not in known and not name.endswith("_token")]
    notes = []
    if unknown:
        notes.append(
            f"{TOKENIZER_CONFIG}: fields that no tokenizer reads are left out: "
            + ", ".join(sorted(unknown))
        )
    around = added_around(content.get("post_processor"))
    for name, kind, ids in zip(
        ("add_bos_token", "add_eos_token"), ("start", "end"), around, strict=True
    ):
        if config.get(name) is not None and config[name] != bool(ids):
            does = "adds one" if ids else "adds none"
            notes.append(
                f"{name} is {str(config[name]).lower()} in {TOKENIZER_CONFIG}, but {TOKENIZER} "
                f"{does} ({kind} token); {TOKENIZER} decides, as in transformers"
            )
    return notes
