"""Numbers as people read them."""

import pytest

from moefold.training.formatting import clock, count, escape_control, plural, si, size, step_time


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (999.6, "1.00k"), (1234, "1.23k"), (12345, "12.3k"), (99950, "100k"),
     (999500, "1.00M"), (4.56e6, "4.56M"), (1.2e9, "1.20B"), (3e12, "3.00T"), (-1500, "-1.50k")],
)  # fmt: skip
def test_counts_have_three_digits(number: float, text: str) -> None:
    """Rounding never shows 1000k."""
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (245, "4:05"), (3600, "1:00:00"),
     (11220, "3:07:00"), (2 * 86400 + 4 * 3600 + 600, "2 d 04:10")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    """Each unit carries over."""
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00056, "0.56 ms"), (0.0026, "2.6 ms"), (0.00999, "10 ms"), (0.24, "240 ms"),
     (12.3456, "12,346 ms"), (79962.3, "22:12:42")],
)  # fmt: skip
def test_times_of_a_step(seconds: float, text: str) -> None:
    """Never in powers of ten, and no thousands of seconds."""
    assert step_time(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.50 KiB"),
        (12.3 * 2**20, "12.3 MiB"),
        (2**32, "4.00 GiB"),
    ],
)
def test_bytes(number: float, text: str) -> None:
    """Powers of 1024."""
    assert size(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(12, "12 "), (1.06e7, "10.6 M"), (4.34e11, "434 G"), (2e3, "2.00 k")]
)
def test_prefixes_of_units(number: float, text: str) -> None:
    """10^9 is G before a unit, where a count says B."""
    assert si(number) == text


def test_one_thing_is_no_plural() -> None:
    """Thousands are told apart."""
    assert [plural(1, "step"), plural(0, "step"), plural(1200, "batch", "es")] == [
        "1 step", "0 steps", "1,200 batches",
    ]  # fmt: skip


def test_no_terminal_obeys_a_model() -> None:
    """Escape, bell, return and the C1 codes are shown; line ends, tabs and letters stay."""
    assert escape_control("a\x1b[2J\x07\r\x9b\x7f\tä\n") == "a␛[2J␇␍\ufffd␡\tä\n"
