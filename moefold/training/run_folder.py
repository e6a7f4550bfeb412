"""Files of a run folder, written and read: metrics by step, expert loads, events, baselines.

Imports no torch, so that ``moefold report`` starts at once.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import index, itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from moefold.files import path_in_errors, plain

RUN_FILE = "run.yaml"
TOKENIZER_FILE = "tokenizer.json"
METRICS_FILE = "metrics.jsonl"
LOAD_FILE = "expert_load.jsonl"
BASELINES_FILE = "baselines.json"
EVENTS_FILE = "events.jsonl"
MAX_COLUMNS = 2000
"""Columns of a picture of checks that are not evenly spaced, unless there are more checks."""
CROSS_ENTROPY = "cross_entropy"
"""Kind of the only loss that converts to bits per byte."""

TRACES = "profile"
"""Subfolder of a run's folder for traces of steps, and what bounds them."""
WALLS_SUFFIX = ".walls.json"


class StepLines:
    """Appends one JSON object per step to a file, in which steps are strictly increasing.

    Lines are not buffered, so that a killed process leaves at most one incomplete line, which
    belongs to no checkpoint. ``rewind`` drops the lines after a step.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(name)
        self.newest: dict[str, Any] = {"step": -1}
        """The newest line, also if writing it failed; step -1 if there is none."""
        self._file: Any = None

    def open(self, folder: Path, step: int) -> None:
        """Open the file in a run folder, and drop the lines after ``step``."""
        self.close()
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / self.path.name
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Drop all lines after ``step``, in one system call."""
        self.close()
        end = 0
        self.newest = {"step": -1}
        if self.path.exists():
            for line, _, stop in _line_spans(self.path):
                if line["step"] > step:
                    break
                end = stop
                self.newest = line
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        if os.fstat(self._file.fileno()).st_size > end:
            os.ftruncate(self._file.fileno(), end)
            os.fsync(self._file.fileno())

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the line of ``step``; drop older lines of this step and of later ones first."""
        if step <= self.newest["step"]:
            self.rewind(step - 1)
        assert self._file is not None, "open() comes first"
        self.newest = {"step": step, **plain(values)}
        append_bytes(self._file, json.dumps(self.newest, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Sync the file to disk and close it."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def append_bytes(file: Any, data: bytes) -> None:
    """Append to an unbuffered file; if the write fails, remove the part that was written."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:  # on a nearly full disk a write can be partial without an error
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read every complete line of a file of ``StepLines``; a missing file has none."""
    if not path.exists():
        return []
    return [line for line, _, _ in _line_spans(path)]


def _line_spans(path: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield (object, first byte, byte after the last) of each complete line.

    Raises:
        ValueError: for a line without a step, or one that does not follow the step before it.
    """
    start = 0
    last: int | None = None
    with path_in_errors(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                line_object = json.loads(line)
                index(line_object["step"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a JSON object with a step; "
                    "move the file away or repair it"
                ) from error
            step = line_object["step"]
            if last is not None and step <= last:
                raise ValueError(
                    f"{path}: step {step} at byte {start} follows step {last}; "
                    "move the file away or repair it"
                )
            last = step
            yield line_object, start, start + len(line)
            start += len(line)


@dataclass(frozen=True)
class Curve:
    """Values of one metric at the steps for which it was written."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def smooth(self, span: float) -> np.ndarray:
        """Return the exponential mean over about ``span`` values, over fewer at the start."""
        out = np.empty_like(self.values)
        mean = np.nan
        for i, value in enumerate(self.values):
            if np.isfinite(value):
                fresh = 1.0 / max(min(span, 1.0 + i / 8), 1.0)
                mean = value if np.isnan(mean) else mean + fresh * (value - mean)
            out[i] = mean
        return out


@dataclass(frozen=True)
class History:
    """Contents of a run folder's log files."""

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
        """Read a run folder; the part of a missing file is empty."""
        path = folder / EVENTS_FILE
        events = []
        for text in path.read_bytes().splitlines() if path.exists() else []:
            # An incomplete line of a killed process is skipped.
            with suppress(ValueError, RecursionError):
                if isinstance(event := json.loads(text), dict):
                    events.append(event)
        lines = [
            {key: value for key, value in line.items() if _is_figure(key, value)}
            for line in read_lines(folder / METRICS_FILE)
        ]
        loads = _read_loads(folder / LOAD_FILE)
        baselines = read_baselines(folder / BASELINES_FILE)
        return cls(lines, loads, baselines, events)

    def curve(self, key: str) -> Curve:
        """Return one metric over the steps; values that were not finite are NaN."""
        pairs = [(line["step"], line[key]) for line in self.lines if key in line]
        steps = np.array([step for step, _ in pairs], dtype=np.int64)
        values = [np.nan if value is None else float(value) for _, value in pairs]
        return Curve(steps, np.array(values, dtype=np.float64))

    @property
    def loss(self) -> str:
        """Kind of the training loss; cross-entropy for older runs, which do not record it."""
        starts = [event for event in self.events if event.get("event") == "start"]
        return starts[-1].get("loss", CROSS_ENTROPY) if starts else CROSS_ENTROPY

    def keys(self) -> list[str]:
        """Return every key of the lines, in order of first appearance."""
        return list(dict.fromkeys(key for line in self.lines for key in line))

    def bits_per_byte_per_nat(self) -> float | None:
        """Return the factor from nats per token to bits per byte, from the newest evaluation.

        It is the mean of the held-out sets' factors, independent of their losses and sizes.
        None if no held-out set was measured in bytes, or the loss is not cross-entropy.
        """
        if self.loss != CROSS_ENTROPY:
            return None
        keys = [(key, f"val/{name}/loss") for name, key in held_out_sets(self.keys())]
        for line in reversed(self.lines):
            pairs = [(line.get(bits), line.get(nats)) for bits, nats in keys]
            factors = [bits / nats for bits, nats in pairs if bits and nats]
            if factors:
                return sum(factors) / len(factors)
        return None

    def load(self) -> tuple[np.ndarray, list[str], np.ndarray] | None:
        """Return (steps [N], layers, load [N, layers, experts]); None if nothing was written.

        A load of 1 is an expert's fair share. Layers with fewer experts than others are padded
        with NaN.
        """
        names = {name for line in self.loads for name in line["load"]}
        if not names:
            return None
        layers = sorted(names, key=lambda name: (int(name) if name.isdigit() else 1 << 30, name))
        width = max(len(shares) for line in self.loads for shares in line["load"].values())
        out = np.full((len(self.loads), len(layers), width), np.nan)
        for i, line in enumerate(self.loads):
            for j, name in enumerate(layers):
                shares = line["load"].get(name, [])
                out[i, j, : len(shares)] = np.asarray(shares, dtype=np.float64) * len(shares)
        return np.array([line["step"] for line in self.loads]), layers, out


def _read_loads(path: Path) -> list[dict[str, Any]]:
    """Read the lines of ``expert_load.jsonl``; ``ValueError`` unless they map layers to shares."""
    lines = read_lines(path)
    for line in lines:
        try:
            line["load"] = {
                layer: [float(share) for share in shares] for layer, shares in line["load"].items()
            }
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, step {line['step']}: load must map each layer to the shares of its "
                "experts; move the file away or repair it"
            ) from error
    return lines


def _is_figure(key: str, value: Any) -> bool:
    if not isinstance(value, int | float):
        return value is None
    # Older runs could write a utilisation above 1, against a rate measured too low.
    return key != "mfu" or value <= 1


def evenly_spaced(steps: np.ndarray) -> np.ndarray:
    """Return the numbers of the checks nearest to evenly spaced steps, for pictures with columns.

    Checks are not evenly spaced at a run's end, and where a resumed run makes them at other steps.
    """
    if len(steps) < 2:
        return np.arange(len(steps))
    columns = (steps[-1] - steps[0]) // np.diff(steps).min() + 1
    positions = np.linspace(steps[0], steps[-1], min(int(columns), max(len(steps), MAX_COLUMNS)))
    return np.searchsorted((steps[1:] + steps[:-1]) / 2, positions)


def held_out_sets(keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each held-out set, and the key of its bits per byte."""
    for key in keys:
        if key.startswith("val/") and key.endswith("/bits_per_byte"):
            yield key.removeprefix("val/").removesuffix("/bits_per_byte"), key


def read_baselines(path: Path) -> dict[str, float]:
    """Read ``baselines.json`` if it exists; ``ValueError`` unless it maps names to numbers."""
    try:
        with path_in_errors(path):
            baselines = json.loads(path.read_bytes()) if path.exists() else {}
        return {name: float(value) for name, value in baselines.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON object of numbers: {error}; remove it") from error


def log_event(folder: Path, event: str, **values: Any) -> None:
    """Append an event with time and process id to ``events.jsonl``."""
    path = folder / EVENTS_FILE
    now = time.time()
    stamp = {"time": now, "at": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")}
    record = plain({"event": event, **values, **stamp, "process": os.getpid()})
    line = json.dumps(record, allow_nan=False) + "\n"
    with open(path, "a+b", buffering=0) as file:
        # The previous line can be incomplete after a kill.
        is_torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        append_bytes(file, b"\n" * is_torn + line.encode())


def traced_walls(folder: Path) -> list[dict[str, Any]]:
    """Return the walls of the traced steps of a run, as the profile hook wrote them, in order.

    Raises:
        ValueError: a file is not what the hook writes.
    """
    walls = []
    for file in folder.glob(f"{TRACES}/*{WALLS_SUFFIX}"):
        try:
            data = json.loads(file.read_text("utf-8"))
            walls.append({**data, "step": int(data["step"]), "wall": str(data["wall"])})
        except (ValueError, KeyError, TypeError):
            text = "is not what `watch.profile` writes: remove it, or trace the step again"
            raise ValueError(f"{file}: {text}") from None
    return sorted(walls, key=itemgetter("step"))
