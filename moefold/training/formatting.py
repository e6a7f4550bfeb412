"""Formatting of numbers and text for people."""

from collections.abc import Mapping

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def clock(seconds: float) -> str:
    """Format a duration: ``42 s``, ``4:05`` (minutes), ``3:07:00`` (hours), ``2 d 04:10``."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    minutes, second = divmod(rounded, 60)
    hours, minute = divmod(minutes, 60)
    if hours == 0:
        return f"{minute}:{second:02d}"
    if hours < 24:
        return f"{hours}:{minute:02d}:{second:02d}"
    days, hour = divmod(hours, 24)
    return f"{days} d {hour:02d}:{minute:02d}"


def step_time(seconds: float) -> str:
    """Format a step's time: ``0.56 ms``, ``2.6 ms``, ``240 ms``; as ``clock`` from a minute on."""
    if seconds >= 60:
        return clock(seconds)
    number = 1000 * seconds
    digits = 2 if number < 0.995 else 1 if number < 9.95 else 0
    return f"{number:,.{digits}f} ms"


def _scaled(number: float, scales: Mapping[str, float]) -> tuple[str, str]:
    """Return a number in three digits, and the suffix of the largest scale that it reaches."""
    for suffix, scale in scales.items():
        if abs(number) >= 0.9995 * scale:
            scaled = number / scale
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}", suffix
    return f"{number:.0f}", ""


def count(number: float) -> str:
    """Format a count in three digits and a suffix: ``950``, ``12.3k``, ``4.56M``, ``1.23B``."""
    return "".join(_scaled(number, {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}))


def si(number: float) -> str:
    """Format a number before its unit: ``10.6 M``, ``434 G``, ``1.20 T``."""
    text = count(number).replace("B", "G")
    return f"{text[:-1]} {text[-1]}" if text[-1].isalpha() else f"{text} "


def escape_control(text: str) -> str:
    """Replace control characters by symbols, so that generated text cannot control a terminal."""
    return text.translate(_PICTURES)


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Format a number with its noun: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def size(number: float) -> str:
    """Format a number of bytes: ``512 B``, ``1.50 KiB``, ``12.3 MiB``, ``4.00 GiB``."""
    scales = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    text, suffix = _scaled(number, scales)
    return f"{text} {suffix or 'B'}"
