"""What a run's folder tells about its past: figures by step, expert loads, baselines."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moefold.files import named
from moefold.training.hooks.lines import read_lines

METRICS_FILE = "metrics.jsonl"
LOAD_FILE = "expert_load.jsonl"
BASELINES_FILE = "baselines.json"
EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True)
class Curve:
    """Values of one figure at the steps where it was written."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """The newest value."""
        return float(self.values[-1])

    def smooth(self, span: float) -> np.ndarray:
        """Exponential mean over about ``span`` values, over fewer where the curve starts."""
        out, mean = np.empty_like(self.values), np.nan
        for i, value in enumerate(self.values):
            if np.isfinite(value):
                fresh = 1.0 / max(min(span, 1.0 + i / 8), 1.0)
                mean = value if np.isnan(mean) else mean + fresh * (value - mean)
            out[i] = mean
        return out


@dataclass(frozen=True)
class History:
    """Everything the sinks wrote in a run's folder."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    """``metrics.jsonl``, one dictionary per step."""
    loads: list[dict[str, Any]] = field(default_factory=list)
    """``expert_load.jsonl``: step, and by layer each expert's share of the load."""
    baselines: dict[str, float] = field(default_factory=dict)
    """Bits per byte on the held-out text, such as ``{"bigram": 2.6, "xz": 1.8}``."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """``events.jsonl``: starts and orderly ends, with their times."""

    @classmethod
    def read(cls, folder: Path) -> "History":
        """Read a run's folder; files that are not there leave their part empty."""
        path = folder / BASELINES_FILE
        return cls(
            [_possible(line) for line in read_lines(folder / METRICS_FILE)],
            read_lines(folder / LOAD_FILE),
            read_baselines(path),
            _read_events(folder / EVENTS_FILE),
        )

    def curve(self, key: str) -> Curve:
        """Return one figure over the steps; values that were not finite are NaN."""
        pairs = [(line["step"], line[key]) for line in self.lines if key in line]
        steps = np.array([step for step, _ in pairs], dtype=np.int64)
        values = [np.nan if value is None else float(value) for _, value in pairs]
        return Curve(steps, np.array(values, dtype=np.float64))

    def keys(self) -> list[str]:
        """Return every key of the lines, in order of first appearance."""
        return list(dict.fromkeys(key for line in self.lines for key in line))

    def sets(self) -> Iterator[tuple[str, str]]:
        """Yield (name, key) of the bits per byte of each held-out set."""
        for key in self.keys():
            if key.startswith("val/") and key.endswith("/bits_per_byte"):
                yield key.removeprefix("val/").removesuffix("/bits_per_byte"), key

    def bits_per_byte_per_nat(self) -> float | None:
        """Factor from a loss per token (nats) to bits per byte, taken from the evaluations.

        None where no held-out set was measured in bytes.
        """
        keys = [key for _, key in self.sets()]
        for line in reversed(self.lines):
            found = [line[key] for key in keys if line.get(key) is not None]
            if found and line.get("val_loss"):
                return sum(found) / len(found) / line["val_loss"]
        return None

    def load(self) -> tuple[np.ndarray, list[str], np.ndarray] | None:
        """Return (steps [N], layers, load [N, layers, experts]); None where nothing was written.

        A load of 1 is an expert's fair share. Layers with fewer experts than the widest one are
        padded with NaN.
        """
        if not self.loads:
            return None
        layers = sorted({name for line in self.loads for name in line["load"]}, key=_layer_order)
        width = max(len(shares) for line in self.loads for shares in line["load"].values())
        out = np.full((len(self.loads), len(layers), width), np.nan)
        for i, line in enumerate(self.loads):
            for j, name in enumerate(layers):
                shares = line["load"].get(name, [])
                out[i, j, : len(shares)] = np.asarray(shares, dtype=np.float64) * len(shares)
        return np.array([line["step"] for line in self.loads]), layers, out


def _possible(line: dict[str, Any]) -> dict[str, Any]:
    """Return a step's figures without a utilisation above one, which a slow moment's rate gives."""
    return {k: v for k, v in line.items() if k != "mfu" or v is None or float(v) <= 1}


def read_baselines(path: Path) -> dict[str, float]:
    """Read ``baselines.json``; an absent file has none.

    Raises:
        ValueError: where it holds anything but figures by name.
    """
    try:
        with named(path):
            found = json.loads(path.read_bytes()) if path.exists() else {}
        return {name: float(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: holds no figures by name: {error}; remove it") from error


def _layer_order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (1 << 30, name)


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events; a line that a kill left unfinished is passed over."""
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError, RecursionError):
            if isinstance(event := json.loads(line), dict):
                events.append(event)
    return events
