"""The command line's entry point: finds the command, parses its arguments, words its errors.

A command is one file in this folder. The docstring of the file is its help: the first line in the
list of commands, the rest in ``moefold COMMAND --help``. ``add(parser)`` adds its arguments,
``run(args)`` carries it out and returns the exit status. Only the file of the command that is asked
for is imported. It loads without torch, which functions import once the arguments are checked.
Files whose name starts with ``_`` are shared by commands.

Exit status: what the command returns; 2 for wrong input, 130 after Ctrl-C, 1 for a fault of ours.
"""

import argparse
import ast
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import moefold

WRONG_INPUT, BROKEN_PIPE, INTERRUPTED = 2, 141, 130
TRACEBACK = "--traceback"
# What the system refuses is for people, but for lost connections and what a wrong program asks.
OURS = {errno.EBADF, errno.EFAULT, errno.ECHILD, errno.ESRCH, errno.ENOTSOCK, errno.EDEADLK, None}
REMEDIES = {
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "symbolic links lead in a circle: remove one of them",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "choose another place, or change who may use this one",
    ),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
        "something else stands where a file or folder should be: name another path",
    ),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, then give the command again"),
}


class Help(argparse.HelpFormatter):
    """Help that fits the terminal: paragraphs are wrapped, lists keep their lines, defaults stand.

    A default that is a value is added to what is said of its option; one that is worked out when
    the command runs is in that text itself.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in p else fill(p, width, indent) for p in parts)

    def _get_help_string(self, action: argparse.Action) -> str:
        said = action.help or ""
        shown = action.option_strings and action.nargs != 0 and "default" not in said
        if shown and action.default not in (None, [], argparse.SUPPRESS):
            said += " (default: %(default)s)"
        return said


class Parser(argparse.ArgumentParser):
    """A parser, of the program or of a command, whose help is laid out by :class:`Help`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Help, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the process's arguments) asks for.

    Returns its exit status. A ``ValueError`` is for people, and so is what the system refuses: it
    is shown as text alone, unless ``--traceback`` is given anywhere. Other errors are faults of
    ours and pass through.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # Names of files may be no text of any encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    traceback = TRACEBACK in words
    words = [word for word in words if word != TRACEBACK]
    try:
        with _interruptible():
            status = _carry_out(words)
            sys.stdout.flush()  # where the reader left, this is the place to hear of it
        return status
    except KeyboardInterrupt as stopped:
        if traceback:
            raise
        print(str(stopped) or "stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich turns the one into the other
            return _broken_pipe()
        raise
    except (ValueError, OSError) as error:
        if traceback or isinstance(error, ConnectionError) or getattr(error, "errno", 0) in OURS:
            raise
        _print_error(error)
        return WRONG_INPUT


def _carry_out(words: list[str]) -> int:
    parser, command = build_parser(next((word for word in words if word[:1] != "-"), None))
    args, rest = parser.parse_known_args(words)
    # Overrides k=v may stand behind options too, where argparse looks for none.
    overrides = vars(args).get("overrides")
    if rest and (overrides is None or any(w.startswith("-") or "=" not in w for w in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = [*(overrides or []), *rest]
    if command is None:
        parser.print_help()
        return 0
    return command.run(args)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the command wherever it is.

    While a module is imported that is done at once: imports swallow exceptions, one of fifteen
    interrupts during torch's.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_globals.get("__name__") == "importlib._bootstrap":
                os.write(2, b"stopped\n")
                os._exit(INTERRUPTED)
            frame = frame.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def build_parser(asked: str | None) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """Return the parser, and the module of the command ``asked`` for if there is such a one."""
    files = command_files()
    listed = "".join(f"\n  {name:<12}{_summary(file)}" for name, file in files.items())
    parser = Parser(
        prog="moefold",
        description=(moefold.__doc__ or "").partition("\n")[0],
        epilog=f"commands:{listed}\n\n`moefold COMMAND --help` says more.",
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
            about = (command.__doc__ or "").partition("\n")[2]
            command.add(subparsers.add_parser(name, description=about))
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


def _broken_pipe() -> int:
    """Return the status for a reader of our output that left (`| head`)."""
    # Python would complain again while it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _print_error(error: Exception) -> None:
    """Show a person what is wrong, where, and what mends it: a red word, then text untouched."""
    from rich.console import Console
    from rich.text import Text

    text = str(error)
    if isinstance(error, UnicodeEncodeError):
        text = f"{error.object!a}: holds bytes that are no UTF-8 text; write it in UTF-8"
    elif isinstance(error, OSError):
        where = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        remedy = REMEDIES.get(error.errno or 0)
        text = f"{error.strerror or text}{where}" + (f"; {remedy}" if remedy else "")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text("error", style="bold red"), Text(text or type(error).__name__), sep=": ")
    console.print(f"({type(error).__name__}; {TRACEBACK} shows where it came from)", style="dim")
