"""Files of a run's folder: figures by step, expert loads, events, baselines; writing and reading.

Imports no torch, so that ``moefold report`` starts at once.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from moefold.files import named, plain

RUN_FILE = "run.yaml"
TOKENIZER_FILE = "tokenizer.json"
METRICS_FILE = "metrics.jsonl"
LOAD_FILE = "expert_load.jsonl"
BASELINES_FILE = "baselines.json"
EVENTS_FILE = "events.jsonl"
CROSS_ENTROPY = "cross_entropy"
"""Kind of the loss that bits per byte are of."""


class StepLines:
    """Appends one JSON object per step; each step stands in the file once, steps rise.

    A line is written at once, so a killed process leaves at most one unfinished line, and
    that one belongs to no checkpoint. ``rewind`` cuts what lies beyond a step.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(name)
        self.newest: dict[str, Any] = {"step": -1}
        """The newest line, written or refused; of step -1 when there is none."""
        self._file: Any = None

    def open(self, folder: Path, step: int) -> None:
        """Open the file in a run's folder, and drop what lies after the step it goes on from."""
        self.close()
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / self.path.name
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Drop every line after ``step``, in one system call."""
        self.close()
        end, self.newest = 0, {"step": -1}
        if self.path.exists():
            for line, start, stop in _spans(self.path):
                if (found := line["step"]) > step:
                    break
                if found <= (last := self.newest["step"]):
                    raise ValueError(
                        f"{self.path}: step {found} at byte {start} follows step {last}; "
                        "move the file away or mend it"
                    )
                end, self.newest = stop, line
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        if os.fstat(self._file.fileno()).st_size > end:
            os.ftruncate(self._file.fileno(), end)
            os.fsync(self._file.fileno())

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the line of ``step``; a step that was written before takes all after it away."""
        if step <= self.newest["step"]:
            self.rewind(step - 1)
        assert self._file is not None, "open() comes first"
        self.newest = {"step": step, **plain(values)}
        append(self._file, json.dumps(self.newest, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Make what was written durable and close the file."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def append(file: Any, data: bytes) -> None:
    """Write at the end of a file without a buffer; a disk that refuses keeps no part of it."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:  # a disk that is nearly full takes a part, without an error
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read every complete line of such a file; an absent file has none."""
    if not path.exists():
        return []
    return [line for line, _, _ in _spans(path)]


def _spans(path: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield (object, first byte, byte after the last) of each complete line."""
    start = 0
    with named(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                found = json.loads(line)
                index(found["step"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: not the JSON object of a step; "
                    "move the file away or mend it"
                ) from error
            yield found, start, start + len(line)
            start += len(line)


@dataclass(frozen=True)
class Curve:
    """Values of one figure at the steps where it was written."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

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
        path, events = folder / EVENTS_FILE, []
        for text in path.read_bytes().splitlines() if path.exists() else []:
            # A line that a kill left unfinished is passed over.
            with suppress(ValueError, RecursionError):
                if isinstance(event := json.loads(text), dict):
                    events.append(event)
        return cls(
            [
                # Without a utilisation above one, which a slow moment's rate gave older runs.
                {k: v for k, v in line.items() if k != "mfu" or v is None or float(v) <= 1}
                for line in read_lines(folder / METRICS_FILE)
            ],
            read_lines(folder / LOAD_FILE),
            read_baselines(folder / BASELINES_FILE),
            events,
        )

    def curve(self, key: str) -> Curve:
        """Return one figure over the steps; values that were not finite are NaN."""
        pairs = [(line["step"], line[key]) for line in self.lines if key in line]
        steps = np.array([step for step, _ in pairs], dtype=np.int64)
        values = [np.nan if value is None else float(value) for _, value in pairs]
        return Curve(steps, np.array(values, dtype=np.float64))

    @property
    def loss(self) -> str:
        """Kind of the loss that is trained; older runs do not say it."""
        starts = [event for event in self.events if event.get("event") == "start"]
        return starts[-1].get("loss", CROSS_ENTROPY) if starts else CROSS_ENTROPY

    def keys(self) -> list[str]:
        """Return every key of the lines, in order of first appearance."""
        return list(dict.fromkeys(key for line in self.lines for key in line))

    def bits_per_byte_per_nat(self) -> float | None:
        """Factor from a loss per token (nats) to bits per byte, taken from the newest evaluation.

        It is the mean of the held-out sets' own factors, so that no set's loss or size is in it.
        None where no held-out set was measured in bytes, or the loss is no cross-entropy.
        """
        if self.loss != CROSS_ENTROPY:
            return None
        keys = [(key, f"val/{name}/loss") for name, key in sets(self.keys())]
        for line in reversed(self.lines):
            found = [
                line[bits] / line[nats] for bits, nats in keys if line.get(bits) and line.get(nats)
            ]
            if found:
                return sum(found) / len(found)
        return None

    def load(self) -> tuple[np.ndarray, list[str], np.ndarray] | None:
        """Return (steps [N], layers, load [N, layers, experts]); None where nothing was written.

        A load of 1 is an expert's fair share. Layers with fewer experts than the widest one are
        padded with NaN.
        """
        if not self.loads:
            return None
        names = {name for line in self.loads for name in line["load"]}
        layers = sorted(names, key=lambda name: (int(name) if name.isdigit() else 1 << 30, name))
        width = max(len(shares) for line in self.loads for shares in line["load"].values())
        out = np.full((len(self.loads), len(layers), width), np.nan)
        for i, line in enumerate(self.loads):
            for j, name in enumerate(layers):
                shares = line["load"].get(name, [])
                out[i, j, : len(shares)] = np.asarray(shares, dtype=np.float64) * len(shares)
        return np.array([line["step"] for line in self.loads]), layers, out


def sets(keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, key) of the bits per byte of each held-out set."""
    for key in keys:
        if key.startswith("val/") and key.endswith("/bits_per_byte"):
            yield key.removeprefix("val/").removesuffix("/bits_per_byte"), key


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


def note(folder: Path, event: str, **values: Any) -> None:
    """Add an event to a run's, with the time and the process."""
    path = folder / EVENTS_FILE
    now = time.time()
    stamp = {"time": now, "at": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")}
    said = plain({"event": event, **values, **stamp, "process": os.getpid()})
    line = json.dumps(said, allow_nan=False) + "\n"
    with open(path, "a+b", buffering=0) as file:
        # A kill can leave the line before unfinished.
        torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        append(file, b"\n" * torn + line.encode())
