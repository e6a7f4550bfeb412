"""The command line's entry point: finds the command, parses its arguments, prints its errors.

A command is one file in this folder. The file's docstring is its help: the first line in the list
of commands, the rest in ``moefold COMMAND --help``. ``add(parser)`` adds its arguments,
``run(args)`` runs it and returns the exit status. Only the requested command's file is imported,
and without torch, which functions import once the arguments are checked. Files whose name starts
with ``_`` are shared by commands.

Exit status: the command's; 2 for wrong input and used-up memory, 76 for lost ranks, 130 after
Ctrl-C, 141 for a broken pipe, 1 for bugs.
"""

import argparse
import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import moefold
from moefold.failures import (
    COMMAND_BYTES,
    Failure,
    OutOfMemory,
    describe_shortage,
    is_out_of_memory,
    require_address_space,
)

WRONG_INPUT = 2
BROKEN_PIPE = 141
INTERRUPTED = 130
TRACEBACK = "--traceback"
# System errors are printed as text, except lost connections and these, which indicate bugs.
BUGS = {errno.EBADF, errno.EFAULT, errno.ECHILD, errno.ESRCH, errno.ENOTSOCK, errno.EDEADLK, None}
REMEDIES = {
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "symbolic links form a loop: remove one of them",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "choose another path, or make this one accessible",
    ),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
        "a file is where a folder is needed, or the reverse: choose another path",
    ),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, then repeat the command"),
}

# Commands in the order of a first day. A command's file is its name; here is its place in the help.
GROUPS = {
    "start": ("demo", "doctor"),
    "train": ("data", "train", "sample", "chat"),
    "look": ("explain", "report", "routing", "checkpoint"),
    "exchange": ("import", "export", "grow"),
    "many ranks": ("plan", "verify", "bench"),
}
EXAMPLES = """
examples:
  moefold demo
  moefold train tiny --nproc 2 --layout ep2
  moefold plan qwen3_30b_a3b --cluster h100x64
"""

LESS_MEMORY = (
    "free memory or raise the limit (ulimit -v, the job's or the container's), or make the model, "
    "data.seq or train.micro_batch smaller"
)


class HelpFormatter(argparse.HelpFormatter):
    """Help formatter: paragraphs are wrapped, lists keep their lines, defaults are shown.

    A default value is appended to its option's help, unless the text already states a default.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in p else fill(p, width, indent) for p in parts)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.option_strings and action.nargs != 0 and "default" not in text
        if shown and action.default not in (None, [], argparse.SUPPRESS):
            text += " (default: %(default)s)"
        return text


class CommandParser(argparse.ArgumentParser):
    """Parser of the program or of a command, with help formatted by :class:`HelpFormatter`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments); return its exit status.

    A ``ValueError``, a ``Failure`` or a system error is for users: it is printed without traceback,
    unless ``--traceback`` is among the arguments. Other errors are bugs and propagate.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # File names may not be valid text.
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    with_traceback = TRACEBACK in words
    words = [word for word in words if word != TRACEBACK]
    try:
        with _interruptible():
            status = _run_command(words)
            sys.stdout.flush()  # raises here if the reader has closed the pipe
        return status
    except KeyboardInterrupt as stopped:
        if with_traceback:
            raise
        print(str(stopped) or "stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich turns it into SystemExit
            return _broken_pipe()
        raise
    except (ValueError, OSError, MemoryError, RuntimeError, ImportError) as error:
        if with_traceback or not _is_for_users(error):
            raise
        return _print_failure(error)


def _is_for_users(error: Exception) -> bool:
    """Return whether an error is not a bug, and its text says all that a user needs."""
    if isinstance(error, Failure) or is_out_of_memory(error):
        return True
    if isinstance(error, ConnectionError) or getattr(error, "errno", 0) in BUGS:
        return False
    return isinstance(error, ValueError | OSError)


def _print_failure(error: Exception) -> int:
    """Print an error for users; return the exit status."""
    if is_out_of_memory(error):
        failed = OutOfMemory(f"no memory left: {describe_shortage(error)}; {LESS_MEMORY}")
        # What the failed call holds is freed, so that there is memory to print with.
        traceback.clear_frames(error.__traceback__)
        error = failed
    try:
        _print_error(error)
    except MemoryError:
        os.write(2, f"error: {error}\n".encode())
    return error.status if isinstance(error, Failure) else WRONG_INPUT


def _run_command(words: list[str]) -> int:
    parser, command = build_parser(next((word for word in words if word[:1] != "-"), None))
    args, rest = parser.parse_known_args(words)
    # Overrides k=v may also follow options, where argparse does not expect them.
    takes_overrides = "overrides" in args
    if rest and (not takes_overrides or any(w.startswith("-") or "=" not in w for w in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if takes_overrides:
        _sort_words(args, rest)
    if command is None:
        parser.print_help()
        return 0
    return command.run(args)


def _sort_words(args: argparse.Namespace, rest: list[str]) -> None:
    """Tell names of runs from overrides, alike for all commands; both keep their order."""
    given = vars(args)
    several = "sources" in args
    first = given["sources"] if several else [given.get("source")]
    words = [word for word in (*first, *given["overrides"], *rest) if word is not None]
    names = [word for word in words if "=" not in word or Path(word).exists()]
    if several:
        args.sources = names
        args.overrides = [word for word in words if word not in names]
    elif "source" not in args or not names:
        args.overrides = words[words[:1] == [given.get("source")] :]
    else:
        args.source = names[0]
        words.remove(names[0])
        args.overrides = words


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the command at any point.

    During imports the process exits at once, as imports swallow exceptions: one of fifteen
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


def build_parser(requested: str | None) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """Return the parser, and the module of the ``requested`` command if it exists."""
    files = command_files()
    parser = CommandParser(
        prog="moefold",
        description=(moefold.__doc__ or "").partition("\n")[0],
        epilog=f"{_command_list(files)}\n{EXAMPLES}\n`moefold COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"moefold {moefold.__version__}")
    parser.add_argument(
        TRACEBACK, action="store_true", help="show the Python traceback of an error; valid anywhere"
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", help="a command from the list below")
    command = None
    for name, file in files.items():
        if name == requested:
            if "numpy" not in sys.modules:
                require_address_space(COMMAND_BYTES, f"moefold {name}")
            command = import_module(f"{__package__}.{file.stem}")
            about = (command.__doc__ or "").partition("\n")[2]
            command.add(subparsers.add_parser(name, description=about))
        else:
            subparsers.add_parser(name, add_help=False)
    return parser, command


def command_files() -> dict[str, Path]:
    """Return the files of commands by name; ``import_.py`` is ``import``."""
    files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    return {file.stem.rstrip("_"): file for file in files if file != Path(__file__)}


def _command_list(files: dict[str, Path]) -> str:
    """Return the commands and their help lines, by group; those of no group come last."""
    grouped = {name for names in GROUPS.values() for name in names}
    groups = GROUPS | {"more": tuple(name for name in files if name not in grouped)}
    lines: list[str] = []
    for title, names in groups.items():
        found = [f"  {name:<12}{_summary(files[name])}" for name in names if name in files]
        if found:
            lines += ["", f"{title}:", *found]
    return "\n".join(lines[1:])


def _summary(file: Path) -> str:
    """Return a command's help line: the first line of its file's docstring, without the name."""
    with file.open(encoding="utf-8") as opened:
        return opened.readline().partition("``: ")[2].rstrip('".\n')


def _broken_pipe() -> int:
    """Return the exit status after the reader of stdout closed the pipe (`| head`)."""
    # Otherwise Python would report the broken pipe again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _print_error(error: Exception) -> None:
    """Print an error for users: a red word, then the plain text, with a remedy if known."""
    from rich.console import Console
    from rich.text import Text

    text = str(error)
    if isinstance(error, UnicodeEncodeError):
        text = f"{error.object!a}: contains bytes that are not UTF-8; write it in UTF-8"
    elif isinstance(error, OSError):
        where = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        remedy = REMEDIES.get(error.errno or 0)
        text = f"{error.strerror or text}{where}" + (f"; {remedy}" if remedy else "")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text("error", style="bold red"), Text(text or type(error).__name__), sep=": ")
    console.print(f"({type(error).__name__}; {TRACEBACK} shows the Python traceback)", style="dim")
