"""Trains mixture-of-experts transformers: one device or thousands, same code, same run file.

``import moefold`` is quick and needs no torch: each name is fetched from its home when first used.
"""

from importlib import import_module
from os import environ
from sys import modules
from typing import Any

# Experts receive other numbers of rows in every layer and step: segments that can grow leave few
# holes between them. It is read once, when CUDA starts.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
    environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

# Waiting threads spin for some microseconds, then sleep. A step of the demo in fp32 on two idle
# cores takes 0.41 s where they sleep at once, as operations follow each other faster than a thread
# wakes, and 0.32 s so; beside a process that wants a core 0.60 and 0.65 s. OpenMP's own default
# spins a thousand times as long, and then takes seconds. It is read once, when torch is loaded:
# after that it would say what is not so.
if "torch" not in modules and "OMP_WAIT_POLICY" not in environ:
    environ["OMP_WAIT_POLICY"] = "passive"
    environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"

_HOMES = {
    "load_run": "moefold.run",
    "plan": "moefold.planner.answer",
    "quantise": "moefold.kernels.quantise.blocks",
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
