"""The caller's own facts in a manifest: plain JSON that comes back exactly as it was given."""

import math
from typing import Any

from moefold.checkpoint.errors import CheckpointError

MAX_DEPTH = 50


def check_meta(value: Any, at: str = "meta", depth: int = 0) -> None:
    """Raise ``CheckpointError`` naming the place where a value would not come back as it is."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{at} is nested deeper than {MAX_DEPTH}")
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{at} has the key {key!r}; keys are text")
            _check_text(key, f"a key of {at}")
            check_meta(inner, f"{at}.{key}", depth + 1)
    elif type(value) is list:
        for i, inner in enumerate(value):
            check_meta(inner, f"{at}[{i}]", depth + 1)
    elif type(value) is str:
        _check_text(value, at)
    elif type(value) is float and not math.isfinite(value):
        raise CheckpointError(f"{at} is {value}, which JSON does not know; store text or a tensor")
    elif type(value) is int and value.bit_length() > 4096:
        raise CheckpointError(f"{at} is an integer of {value.bit_length()} bits; the limit is 4096")
    elif value is not None and type(value) not in (int, float, bool):
        kinds = "dict, list, str, int, float, bool and None"
        raise CheckpointError(f"{at} is a {type(value).__name__}; meta holds {kinds}")


def _check_text(text: str, at: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{at} is {text!r}, which is no Unicode text: {error.reason}"
        ) from None
