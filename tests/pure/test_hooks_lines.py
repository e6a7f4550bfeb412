"""One JSON object per step, each step exactly once, whatever happened before."""

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefold.training.run_folder import StepLines, read_lines


def written(path: Path, steps: range, mark: str) -> StepLines:
    """Write a line per step and return the open file."""
    lines = StepLines(path.name)
    lines.open(path.parent, steps.start - 1)
    for step in steps:
        lines.append(step, {"mark": mark})
    return lines


def test_a_run_that_goes_back_writes_its_steps_once(tmp_path: Path) -> None:
    """Ended after step 7, resumed from the checkpoint of step 4."""
    path = tmp_path / "metrics.jsonl"
    written(path, range(1, 8), "first").close()
    written(path, range(5, 10), "second").close()
    found = read_lines(path)
    assert [line["step"] for line in found] == list(range(1, 10))
    assert [line["mark"] for line in found] == ["first"] * 4 + ["second"] * 5


def test_a_step_written_again_replaces_all_after_it(tmp_path: Path) -> None:
    """A rewind inside one process needs no call of its own."""
    path = tmp_path / "metrics.jsonl"
    lines = written(path, range(1, 7), "first")
    lines.append(3, {"mark": "again"})
    lines.append(4, {"mark": "again"})
    lines.close()
    assert [(line["step"], line["mark"][0]) for line in read_lines(path)] == [
        (1, "f"), (2, "f"), (3, "a"), (4, "a"),
    ]  # fmt: skip


def test_an_unfinished_line_goes(tmp_path: Path) -> None:
    """A killed writer leaves a piece of a line; the next one starts clean."""
    path = tmp_path / "metrics.jsonl"
    written(path, range(1, 4), "first").close()
    with open(path, "a") as file:
        file.write('{"step": 4, "mar')
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    written(path, range(4, 6), "second").close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4, 5]


class Nearly:
    """A file on a disk that is nearly full: it says by a number alone how much it took."""

    def __init__(self, file: Any, left: int) -> None:
        self.file, self.left = file, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        if self.left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 9
        return self.file.write(data[:9])


@pytest.mark.parametrize(("left", "marks"), [(99, "abc"), (18, "ac")])
def test_a_disk_that_takes_a_part_of_a_line_gets_the_rest_or_keeps_none(
    tmp_path: Path, left: int, marks: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = written(path, range(1, 2), "a")
    plain = lines._file
    lines._file = Nearly(plain, left)
    with nullcontext() if "b" in marks else pytest.raises(OSError, match="No space"):
        lines.append(2, {"mark": "b"})
    lines._file = plain
    lines.append(3, {"mark": "c"})
    lines.close()
    assert "".join(line["mark"] for line in read_lines(path)) == marks


def test_a_run_from_the_start_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    """Step 0 is before every line."""
    path = tmp_path / "metrics.jsonl"
    written(path, range(1, 4), "first").close()
    lines = StepLines(path.name)
    lines.open(tmp_path, 0)
    lines.close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("bad", ["not json\n", "[1, 2]\n", '{"tokens": 3}\n'])
def test_a_spoilt_file_is_not_cut(tmp_path: Path, bad: str) -> None:
    """Foreign lines are named, and stay."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + bad + '{"step": 3}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        StepLines(path.name).open(tmp_path, 5)
    assert path.read_bytes() == before


def test_steps_that_do_not_rise_are_refused(tmp_path: Path) -> None:
    """Two processes that wrote one file leave such lines; cutting would lose one of them."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2}\n')
    for read in (lambda: StepLines(path.name).open(tmp_path, 5), lambda: read_lines(path)):
        with pytest.raises(ValueError, match="step 2 at byte 24 follows step 2"):
            read()


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    """NaN would make the line unreadable for most programs."""
    path = tmp_path / "metrics.jsonl"
    lines = StepLines(path.name)
    lines.open(tmp_path, 0)
    values = {"loss": float("nan"), "norm": float("inf"), "n": np.int64(3), "x": np.float32(0.5)}
    lines.append(1, {**values, "load": {0: [np.float64(0.25)]}})
    lines.close()
    line = json.loads(path.read_text())
    assert line == {
        "step": 1, "loss": None, "norm": None, "n": 3, "x": 0.5, "load": {"0": [0.25]},
    }  # fmt: skip
