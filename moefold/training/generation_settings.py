"""Generation settings: from ``generation_config.json`` and flags to options of ``generate``.

Names, defaults and order are those of ``transformers``. A folder that says how to sample is obeyed,
with the defaults of ``transformers`` for the rest; one that says nothing is sampled with
``TEMPERATURE`` and ``TOP_P``. Settings that are not obeyed are named.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from moefold.data.config import DataError
from moefold.data.folder.files import GENERATION_CONFIG
from moefold.model.logits import LogitRules
from moefold.model.truncation import Truncation

TEMPERATURE = 0.8
TOP_P = 0.95
TRUNCATIONS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Fields of ``Truncation``, which have the same names in ``generation_config.json``."""
HOW_TO_SAMPLE = ("temperature", "top_k", "top_p", "min_p")
_THEIRS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
_OURS = {"temperature": TEMPERATURE, "top_k": None, "top_p": TOP_P, "min_p": 0.0}
RULES = {
    "sequence_bias": "biases",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words_ids": "bad_words",
    "min_length": "min_length",
    "min_new_tokens": "min_new_tokens",
    "forced_bos_token_id": "forced_first",
    "forced_eos_token_id": "forced_last",
    "exponential_decay_length_penalty": "growing_end",
    "suppress_tokens": "suppressed",
    "begin_suppress_tokens": "suppressed_first",
}
"""Fields of ``LogitRules`` by their names in ``generation_config.json``."""
OTHERS = ("do_sample", "max_new_tokens")
UNIMPORTANT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "transformers_version",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "return_dict_in_generate",
    "renormalize_logits",
    "remove_invalid_values",
    "disable_compile",
    "compile_config",
)
"""Names of settings that change no text, or are read elsewhere, as end tokens are."""
NEUTRAL = {
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "length_penalty": 1,
    "diversity_penalty": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
}
"""Values with which a setting changes nothing."""


class Settings(NamedTuple):
    """How text is generated."""

    options: dict[str, Any]
    """Options of ``generate``."""
    tokens: int | None
    """Maximum number of new tokens that the folder names."""
    obeyed: dict[str, Any]
    """The folder's settings that are obeyed."""
    left_out: dict[str, Any]
    """The folder's settings that are not."""

    def notes(self) -> list[str]:
        """Describe which settings come from the folder, and which of them are left out."""
        lines = []
        for text, settings in (("", self.obeyed), (" (not obeyed)", self.left_out)):
            if settings:
                listed = [f"{name} {_short(value)}" for name, value in settings.items()]
                lines.append(f"{GENERATION_CONFIG}{text}: {', '.join(listed)}")
        return lines


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def generation_settings(
    config: Mapping[str, Any], overrides: Mapping[str, Any], stop_ids: Collection[int] = ()
) -> Settings:
    """Return the settings of a folder's ``generation_config.json`` with overrides from flags.

    Raises:
        DataError: if a value has another type or range than ``transformers`` allows.
    """
    stored = {name: value for name, value in config.items() if value is not None}
    given = {name: value for name, value in overrides.items() if value is not None}
    _check(stored)
    says_how = stored.get("do_sample") is True or any(n in stored for n in HOW_TO_SAMPLE)
    options = dict(_THEIRS if says_how else _OURS)
    options |= {name: stored[name] for name in HOW_TO_SAMPLE if name in stored}
    if stored.get("do_sample") is False:
        options["temperature"] = 0
    given_rules = {name: given.pop(name) for name in RULES if name in given}
    rules = _rules(stored | given_rules, stop_ids)
    options |= given
    options["top_k"] = options["top_k"] or None
    if rules != LogitRules():
        options["rules"] = rules
    thresholds = {name: float(stored[name]) for name in TRUNCATIONS if name in stored}
    truncation = Truncation(**thresholds)
    if truncation != Truncation():
        options["truncation"] = truncation
    flags = overrides.keys() & {n for n, value in overrides.items() if value is not None}
    names = [*HOW_TO_SAMPLE, *TRUNCATIONS, *RULES, *OTHERS]
    if options["temperature"] == 0:
        names = [n for n in names if n not in (*HOW_TO_SAMPLE, *TRUNCATIONS)]  # greedy
    names = [n for n in names if n in stored and n not in flags]
    obeyed = {n: stored[n] for n in names if NEUTRAL.get(n) != stored[n]}
    left_out = {n: v for n, v in stored.items() if _is_left_out(n, v)}
    return Settings(options, stored.get("max_new_tokens"), obeyed, left_out)


def _is_left_out(name: str, value: Any) -> bool:
    known = (*HOW_TO_SAMPLE, *TRUNCATIONS, *RULES, *OTHERS, *UNIMPORTANT)
    if name in known or name.startswith(("_", "output_")):
        return False
    changes_nothing = value is False or value in ([], {}) or NEUTRAL.get(name) == value
    return not changes_nothing


def _rules(stored: Mapping[str, Any], stop_ids: Collection[int]) -> LogitRules:
    values = {field: stored[name] for name, field in RULES.items() if name in stored}
    for name in ("suppressed", "suppressed_first"):
        if name in values:
            values[name] = tuple(values[name])
    if "forced_last" in values:
        ids = values["forced_last"]
        values["forced_last"] = tuple(ids) if isinstance(ids, list) else (ids,)
    if "bad_words" in values:
        # As in transformers: that a text ends is not forbidden here.
        ends = {(stop_id,) for stop_id in stop_ids}
        words = (tuple(word) for word in values["bad_words"])
        values["bad_words"] = tuple(word for word in words if word not in ends)
    if "growing_end" in values:
        values["growing_end"] = tuple(values["growing_end"])
    if "biases" in values:
        biases = values["biases"]
        values["biases"] = tuple((tuple(ids), float(bias)) for ids, bias in biases)
    return LogitRules(**values)


# ---------------------------------------------------------------------------------- the values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(_are_ids(word) and word for word in value)


def _is_decay(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2
    return pair and _is_id(value[0]) and _is_number(value[1]) and value[1] > 0


def _are_biases(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    pairs = (isinstance(each, list) and len(each) == 2 for each in value)
    return all(pairs) and all(_are_ids(i) and i and _is_number(b) for i, b in value)


_FORMS = {
    "do_sample": ("true or false", lambda v: isinstance(v, bool)),
    "temperature": ("a number of at least 0", lambda v: _is_number(v) and v >= 0),
    "top_k": ("a whole number of at least 0", _is_id),
    "top_p": ("above 0 and at most 1", lambda v: _is_number(v) and 0 < v <= 1),
    "min_p": ("at least 0 and at most 1", lambda v: _is_number(v) and 0 <= v <= 1),
    "top_h": ("above 0 and at most 1", lambda v: _is_number(v) and 0 < v <= 1),
    "typical_p": ("above 0 and at most 1", lambda v: _is_number(v) and 0 < v <= 1),
    "epsilon_cutoff": ("at least 0 and below 1", lambda v: _is_number(v) and 0 <= v < 1),
    "eta_cutoff": ("at least 0 and below 1", lambda v: _is_number(v) and 0 <= v < 1),
    "exponential_decay_length_penalty": ("[a whole number, a number above 0]", _is_decay),
    "max_new_tokens": ("a whole number of at least 1", lambda v: _is_id(v) and v > 0),
    "repetition_penalty": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "no_repeat_ngram_size": ("a whole number of at least 0", _is_id),
    "min_length": ("a whole number of at least 0", _is_id),
    "min_new_tokens": ("a whole number of at least 0", _is_id),
    "forced_bos_token_id": ("a token id", _is_id),
    "forced_eos_token_id": ("a token id, or a list of them", lambda v: _is_id(v) or _are_ids(v)),
    "suppress_tokens": ("a list of token ids", _are_ids),
    "begin_suppress_tokens": ("a list of token ids", _are_ids),
    "bad_words_ids": ("a list of lists of token ids", _are_words),
    "sequence_bias": ("a list of [token ids, number]", _are_biases),
}
"""What each setting must be, in words and as a test."""


def _check(stored: Mapping[str, Any]) -> None:
    for name, (words, holds) in _FORMS.items():
        if name in stored and not holds(stored[name]):
            raise DataError(
                f"{GENERATION_CONFIG}: {name} is {_short(stored[name])}, but must be {words}; "
                "correct the file"
            )
