"""Trains mixture-of-experts transformers: one device or thousands, same code, same run file.

``import moefold`` is quick and needs no torch: each name is fetched from its home when first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "load_run": "moefold.run",
    "plan": "moefold.planner.answer",
    "load_model": "moefold.api",
    "train": "moefold.api",
    "open": "moefold.api",
    "export": "moefold.api",
    "export_stream": "moefold.api",
    "verify": "moefold.api",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'moefold' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
