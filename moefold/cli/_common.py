"""Arguments, tables, progress bars and output that several commands share."""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from moefold.files import plain
from moefold.mesh.config import MAX_RANKS

WRONG_INPUT = 2
"""Exit status for wrong input, of every command."""


def add_run(
    parser: argparse.ArgumentParser,
    example: str,
    kinds: str = "run file, recipe, or Hugging Face folder",
    optional: bool = False,
) -> None:
    """Add the arguments ``RUN`` (described by ``kinds``) and ``k=v`` (such as ``example``)."""
    parser.add_argument("source", metavar="RUN", nargs="?" if optional else None, help=kinds)
    parser.add_argument("overrides", metavar="k=v", nargs="*", help=f"override, such as {example}")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add ``--layout``, the axis sizes of a run's layout."""
    text = 'ranks per axis of the layout, such as "tp2 pp2 ep4" (default: the run\'s)'
    parser.add_argument("--layout", metavar="SIZES", help=text)


def overrides_of(args: argparse.Namespace) -> list[str]:
    """Return a run's overrides, including ``--layout`` if set."""
    sizes = [] if args.layout is None else [f"layout.sizes={json.dumps(args.layout)}"]
    return [*args.overrides, *sizes]


def add_world(parser: argparse.ArgumentParser) -> None:
    """Add ``--world``, the number of ranks of a layout."""
    text = "number of ranks (default: the fewest that the layout needs)"
    parser.add_argument("--world", metavar="N", type=rank_number, help=text)


def rank_number(text: str) -> int:
    """Parse a number of ranks, at most ``MAX_RANKS``."""
    number = int(text)
    if number > MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text[:40]} ranks: at most {MAX_RANKS:,} are possible")
    return number


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """Add ``--uses``, the plug-in files that a stored model needs."""
    text = "Python file that registers parts of the model; repeatable (default: none)"
    parser.add_argument("--uses", metavar="FILE", action="append", default=[], help=text)


def add_json(parser: argparse.ArgumentParser, text: str = "print one JSON object instead") -> None:
    """Add ``--json``, for output that programs read."""
    parser.add_argument("--json", action="store_true", help=text)


def print_json(facts: Any) -> None:
    """Print facts as JSON; numbers that are not finite become null."""
    print(json.dumps(plain(facts), indent=2, allow_nan=False))


def print_conversion(facts: dict[str, Any], as_json: bool) -> None:
    """Print facts about a conversion as JSON, or on one line with the notes on stderr."""
    if as_json:
        print_json(facts)
        return
    print_notes(facts["notes"])
    shown = [f"{name} {value}" for name, value in facts.items() if name != "notes"]
    print(" · ".join(shown))


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr, a line each."""
    for note in notes:
        on_stderr().print(Text(f"note: {note}", style="yellow"))


def plain_table(
    *titles: str,
    right: Sequence[str] = (),
    header: bool = True,
    rows: Iterable[Iterable[str | Text]] = (),
) -> Table:
    """Return a table without rules; columns named in ``right`` are right-aligned."""
    table = Table(box=None, pad_edge=False, show_header=header, header_style="cyan")
    for title in titles:
        if title in right:
            table.add_column(title, justify="right", no_wrap=True)
        else:
            table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


@contextmanager
def progress_bars(
    console: Console, log_stages: bool = False
) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (stage, done, total) that shows a bar for each stage on a terminal.

    Bars are removed at the end. Without a terminal, ``log_stages`` prints each stage and its MB.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    columns = (*columns, TimeRemainingColumn())
    terminal = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not terminal) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
                if log_stages and not terminal:
                    console.print(Text(f"{stage} ({total / 1e6:.1f} MB)"))
            bars.update(tasks[stage], completed=done)

        yield show


def on_stderr() -> Console:
    """Return a console on stderr, which keeps notes and bars out of the output."""
    return Console(stderr=True, soft_wrap=True)
