"""Trains mixture-of-experts transformers: one device or thousands, same code, same run file.

``import moefold`` is fast and does not import torch: names are imported on first use.
"""

from importlib import import_module
from os import environ
from sys import modules
from typing import Any

# Experts receive varying numbers of rows in each layer and step: expandable segments limit
# fragmentation. The variable is read once, when CUDA is initialised.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
    environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

# Waiting threads spin for some microseconds, then sleep. An fp32 step of the demo on two idle
# cores takes 0.32 s so and 0.41 s if threads sleep at once, since operations follow each other
# faster than a thread wakes; if a process competes for a core, 0.65 and 0.60 s. OpenMP's default
# spins a thousand times as long, and a step then takes seconds. The variables are read once, when
# torch is loaded: set later, they would have no effect and mislead the banner.
if "torch" not in modules and "OMP_WAIT_POLICY" not in environ:
    environ["OMP_WAIT_POLICY"] = "passive"
    environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.2.0"

_MODULES = {
    "load_run": "moefold.run",
    "plan": "moefold.planner.plan",
    "quantise": "moefold.kernels.quantise.blocks",
    "load_model": "moefold.api",
    "train": "moefold.api",
    "open": "moefold.api",
    "export": "moefold.api",
    "export_stream": "moefold.api",
    "verify": "moefold.api",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'moefold' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
