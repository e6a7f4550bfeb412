"""A file of one JSON object per step that stays right when a run goes back and continues."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from operator import index
from pathlib import Path
from typing import Any

from moefold.files import named


class StepLines:
    """Appends one JSON object per step; each step stands in the file once, steps rise.

    A line is written with one call, so a killed process leaves at most one unfinished line, and
    that one belongs to no checkpoint. ``rewind`` cuts what lies beyond a step.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(name)
        self.last = -1
        """The newest step in the file; -1 when there is none."""
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
        end, self.last = 0, -1
        if self.path.exists():
            for line, start, stop in _spans(self.path):
                if (found := line["step"]) > step:
                    break
                if found <= self.last:
                    raise ValueError(
                        f"{self.path}: step {found} at byte {start} follows step {self.last}; "
                        "move the file away or mend it"
                    )
                end, self.last = stop, found
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        if os.fstat(self._file.fileno()).st_size > end:
            os.ftruncate(self._file.fileno(), end)
            os.fsync(self._file.fileno())

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the line of ``step``; a step that was written before takes all after it away."""
        if step <= self.last:
            self.rewind(step - 1)
        assert self._file is not None, "open() comes first"
        text = json.dumps({"step": step, **_plain(values)}, allow_nan=False)
        self._file.write(text.encode() + b"\n")
        self.last = step

    def close(self) -> None:
        """Make what was written durable and close the file."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


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


def _plain(value: Any) -> Any:
    """Turn numbers of NumPy and torch into Python's, and what JSON has no word for into null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    return number
