"""The command line: finds the commands, hands over, and words what goes wrong.

A command is one file in this folder. The first line of its docstring is its line in the help;
``add(subparsers)`` describes its arguments, ``run(args)`` carries it out and returns the exit
status. Only the file of the command that is asked for is imported. Files whose name starts with
``_`` are shared by commands.

Exit status: what the command returns; 2 for wrong input, 130 after Ctrl-C, 1 for a fault of ours.
"""

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import moefold

WRONG_INPUT, BROKEN_PIPE, INTERRUPTED = 2, 141, 130
TRACEBACK = "--traceback"
# Errors of the system that a person mends: a path mistyped, a right missing.
MENDABLE = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the process's arguments) asks for.

    Returns its exit status. A ``ValueError`` is for people: it is shown as text alone, unless
    ``--traceback`` is given anywhere. Other errors are faults of ours and pass through.
    """
    # Waiting threads sleep. Spinning is a fifth faster on idle cores, and makes a step take
    # seconds where another process wants a core. Set before torch is imported, or without effect.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    words = list(sys.argv[1:] if argv is None else argv)
    traceback = TRACEBACK in words
    words = [word for word in words if word != TRACEBACK]
    parser, command = build_parser(next((word for word in words if word[:1] != "-"), None))
    args = _parse(parser, words)
    if command is None:
        parser.print_help()
        return 0
    try:
        status = command.run(args)
        sys.stdout.flush()  # where the reader left, this is the place to hear of it
        return status
    except KeyboardInterrupt:
        if traceback:
            raise
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _unread()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich turns the one into the other
            return _unread()
        raise
    except (ValueError, *MENDABLE) as error:
        if traceback:
            raise
        _explain(error)
        return WRONG_INPUT


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse; overrides ``k=v`` may stand behind options too, where argparse looks for none."""
    args, rest = parser.parse_known_args(words)
    overrides = vars(args).get("overrides")
    if rest and (overrides is None or any(w.startswith("-") or "=" not in w for w in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = [*(overrides or []), *rest]
    return args


def build_parser(asked: str | None) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """Return the parser, and the module of the command ``asked`` for if there is such a one."""
    files = command_files()
    listed = "".join(f"\n  {name:<12}{_summary(file)}" for name, file in files.items())
    parser = argparse.ArgumentParser(
        prog="moefold",
        description=(moefold.__doc__ or "").partition("\n")[0],
        epilog=f"commands:{listed}\n\n`moefold COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"moefold {moefold.__version__}")
    parser.add_argument(
        TRACEBACK, action="store_true", help="show where an error came from; goes anywhere"
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", help="one of those below")
    command = None
    for name, file in files.items():
        if name == asked:
            command = import_module(f"{__package__}.{file.stem}")
            command.add(subparsers)
        else:
            subparsers.add_parser(name, add_help=False)
    return parser, command


def command_files() -> dict[str, Path]:
    """Return each command's file by the command's name: ``import_.py`` is ``import``."""
    files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    return {file.stem.rstrip("_"): file for file in files if file != Path(__file__)}


def _summary(file: Path) -> str:
    """Read a command's line in the help: what follows its name in the file's docstring."""
    text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    return text.partition("\n")[0].partition("``: ")[2].rstrip(".")


def _unread() -> int:
    """Return the status for a reader of our output that left (`| head`)."""
    # Python would complain again while it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _explain(error: Exception) -> None:
    """Show an error to a person: a red word, its text untouched, and where to see more."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    console.print(Text("error", style="bold red"), Text(text or type(error).__name__), sep=": ")
    console.print(f"({type(error).__name__}; {TRACEBACK} shows where it came from)", style="dim")
