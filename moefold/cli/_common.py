"""Arguments, tables, progress bars and answers that several commands share."""

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

WRONG_INPUT = 2
"""Exit status for wrong input, of every command."""


def add_run(
    parser: argparse.ArgumentParser,
    example: str,
    kinds: str = "run file, recipe, or Hugging Face folder",
    optional: bool = False,
) -> None:
    """Add the arguments ``RUN``, one of ``kinds``, and ``k=v``, such as ``example``."""
    parser.add_argument("source", metavar="RUN", nargs="?" if optional else None, help=kinds)
    parser.add_argument("overrides", metavar="k=v", nargs="*", help=f"override, such as {example}")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add ``--layout``, the axis sizes of a run's layout."""
    said = 'axis sizes, such as "tp2 pp2 ep4" (default: the run\'s)'
    parser.add_argument("--layout", metavar="SIZES", help=said)


def overrides_of(args: argparse.Namespace) -> list[str]:
    """Return a run's overrides, with ``--layout`` as the last where it is given."""
    sizes = [] if args.layout is None else [f"layout.sizes={json.dumps(args.layout)}"]
    return [*args.overrides, *sizes]


def add_world(parser: argparse.ArgumentParser) -> None:
    """Add ``--world``, the number of ranks that a layout is laid over."""
    said = "number of ranks (default: the fewest that fit)"
    parser.add_argument("--world", metavar="N", type=int, help=said)


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """Add ``--uses``, the plug-in files whose classes a stored model is made of."""
    said = "Python file that registers parts of the model; repeatable (default: none)"
    parser.add_argument("--uses", metavar="FILE", action="append", default=[], help=said)


def add_json(parser: argparse.ArgumentParser, said: str = "print one JSON object instead") -> None:
    """Add ``--json``, the answer for programs."""
    parser.add_argument("--json", action="store_true", help=said)


def print_json(facts: Any) -> None:
    """Print the answer for programs; a figure that is not finite is null."""
    print(json.dumps(plain(facts), indent=2, allow_nan=False))


def print_conversion(facts: dict[str, Any], as_json: bool) -> None:
    """Print what a conversion wrote, on one line for people; ``facts["notes"]`` go to stderr."""
    if as_json:
        print_json(facts)
        return
    for note in facts["notes"]:
        on_stderr().print(Text(f"note: {note}", style="yellow"))
    print(" · ".join(f"{name} {value}" for name, value in facts.items() if name != "notes"))


def plain_table(
    *titles: str,
    right: Sequence[str] = (),
    header: bool = True,
    rows: Iterable[Iterable[str | Text]] = (),
) -> Table:
    """Return a table without lines; the columns named in ``right`` hold figures."""
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

    The bars are gone at the end. Elsewhere nothing is shown, or with ``log_stages`` a line for
    each stage and its megabytes.
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
    """Return a console for notes and bars, which leaves standard output to the answer."""
    return Console(stderr=True, soft_wrap=True)
