"""The command line's frame: finding commands, help without loading anything, wording errors."""

import argparse
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from moefold.cli import main as cli

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(cli.command_files())


class Fails(ModuleType):
    """A command that ends in a given way."""

    def __init__(self, ending: BaseException | int) -> None:
        super().__init__("fails")
        self.ending = ending

    def add(self, parser) -> None:
        parser.add_argument("--size", type=int)

    def run(self, args) -> int:
        if isinstance(self.ending, BaseException):
            raise self.ending
        return self.ending


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that runs a command with a given end, and the status it leads to."""
    file = tmp_path / "fails.py"
    file.write_text('"""``moefold fails``: ends in a given way."""\n')

    def run(ending: BaseException | int, *words: str) -> int:
        monkeypatch.setattr(cli, "command_files", lambda: {"fails": file})
        monkeypatch.setattr(cli, "import_module", lambda name: Fails(ending))
        return cli.main(["fails", *words])

    return run


def in_a_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_keeps_the_contract(name: str) -> None:
    module = import_module(f"moefold.cli.{cli.command_files()[name].stem}")
    parser, command = cli.build_parser(name)
    assert command is module
    (choices,) = (action.choices for action in parser._subparsers._group_actions)  # type: ignore[union-attr]
    assert cli._summary(Path(str(module.__file__))), "docstring is not ``moefold NAME``: what for."
    (_, said) = (module.__doc__ or "").split("\n\n", 1)
    shown = choices[name].format_help()
    assert said.split()[-1] in shown, "the rest of the docstring is the command's own help"
    assert callable(module.run)


def test_each_command_has_one_place_in_the_help() -> None:
    placed = [name for names in cli.GROUPS.values() for name in names]
    assert sorted(placed) == sorted(COMMANDS)
    shown = cli.build_parser(None)[0].format_help()
    places = [shown.index(f"\n  {name} ") for name in placed]
    assert places == sorted(places), "in the order of a first day"


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_fits_the_terminal_and_shows_every_default(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option with a value says what it is where it is left out: itself, or argparse does."""
    monkeypatch.setenv("COLUMNS", "80")
    root, _ = cli.build_parser(name)
    ours = (p for p in parsers(root) if p.add_help and (name is None) == (p is root))
    for parser in ours:
        text = parser.format_help()
        assert max(map(len, text.splitlines())) <= 80
        formatter = parser._get_formatter()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            said = formatter._get_help_string(action)
            assert said, f"{parser.prog} {action.metavar}: nothing is said of it"
            if action.option_strings and action.nargs != 0 and not action.required:
                assert "default: " in said, f"{parser.prog} {action.option_strings}"
                value = action.default
                if value not in (None, []):
                    assert f"default: {value}" in formatter._expand_help(action)


def test_help_names_every_command_and_loads_nothing() -> None:
    code = (
        "import sys; from moefold.cli.main import main; main([]);"
        "heavy = ['torch', 'numpy', 'pydantic', 'rich', 'yaml', 'tokenizers', 'matplotlib'];"
        "print('loaded:', [name for name in heavy if name in sys.modules])"
    )
    text = in_a_process(code)
    assert text.endswith("loaded: []\n")
    for name in COMMANDS:
        assert f"\n  {name} " in text


REFUSED = {
    "train": ["train.steps=0"],
    "explain": ["train.steps=0"],
    "verify": ["train.steps=0"],
    "data prepare": ["train.steps=0"],
    "plan": ["--cluster", "h100x8", "train.steps=0"],
}


def test_what_is_refused_is_refused_before_torch_is_imported() -> None:
    """One after the other in one process, which never imports it."""
    lines = [
        *([*name.split(), "tiny", *rest] for name, rest in REFUSED.items()),
        ["train", "tiny", "--nproc", "0"],
        ["train", "tiny", "--layout", "tp2"],
        ["train", "tiny", "--fork", "new"],
        ["demo", "train.steps=0"],
        ["bench", "nothing"],
        ["bench", "--rounds", "0"],
        ["verify"],
        ["verify", "--matrix", "nothing"],
        ["sample", "somewhere", "--tokens", "-1"],
        ["sample", "somewhere"],
        ["export", "somewhere", "new"],
        ["doctor", "--need", "cude"],
        ["import", "somewhere", "new"],
    ]
    code = (
        "import sys; from moefold.cli.main import main\n"
        f"for words in {lines!r}: print(words, main(words), 'torch' in sys.modules)"
    )
    said = in_a_process(code).splitlines()
    assert said == [f"{words} {cli.WRONG_INPUT} False" for words in lines]


def test_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("moefold 0.")


def test_unknown_commands_and_arguments_are_wrong_input(fails, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        fails(0, "--size", "many")
    assert ended.value.code == cli.WRONG_INPUT
    with pytest.raises(SystemExit) as ended:
        cli.main(["fial"])
    assert ended.value.code == cli.WRONG_INPUT
    assert "'fails'" in capsys.readouterr().err


def test_a_status_is_handed_on(fails) -> None:
    assert fails(0) == 0
    assert fails(7) == 7


def test_an_error_for_people_is_text_alone(fails, capsys) -> None:
    text = "layout.ep: 3 does not divide model.shape.experts: 8; nearest: [2, 4] " + 90 * "x"
    assert fails(ValueError(text)) == cli.WRONG_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == f"error: {text}"
    assert "Traceback" not in err and "--traceback" in err


def test_a_missing_file_is_named(fails, capsys) -> None:
    assert fails(FileNotFoundError(2, "No such file or directory", "run.yml")) == cli.WRONG_INPUT
    assert "error: No such file or directory: run.yml\n" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 1])
def test_traceback_shows_all_wherever_it_stands(fails, place: int) -> None:
    words = ["--size", "3"]
    words.insert(place * 2, "--traceback")
    with pytest.raises(ValueError, match="why"):
        fails(ValueError("why"), *words)


def test_faults_of_ours_pass_through(fails) -> None:
    with pytest.raises(AssertionError, match="ours"):
        fails(AssertionError("ours"))


def test_ctrl_c_ends_with_its_status(fails, capsys) -> None:
    assert fails(KeyboardInterrupt()) == cli.INTERRUPTED == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("say", ["print", "rich.get_console().print"])
def test_a_reader_that_leaves_is_no_error(say: str) -> None:
    """However the command speaks: rich ends the process with a status of its own."""
    code = (
        "import moefold.cli.main as m, rich, sys, types\n"
        f"say = {say}\n"
        "print('x' * 10, flush=True)\n"
        "class C: add = staticmethod(lambda parser: None)\n"
        "C.run = staticmethod(lambda a: [say('y' * 9999) for _ in range(99)] and 0)\n"
        "m.import_module = lambda name: C\n"
        "sys.exit(m.main(['doctor']))\n"
    )
    command = f'{sys.executable} -c "$CODE" | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={"CODE": code, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (cli.BROKEN_PIPE, "x" * 10 + "\n", "")


def test_the_package_loads_by_itself_and_knows_its_names() -> None:
    code = (
        "import sys, moefold\n"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "assert set(moefold._MODULES) <= set(dir(moefold))\n"
        "try: moefold.load_rnu\n"
        "except AttributeError as error: print(error)\n"
    )
    assert in_a_process(code) == "module 'moefold' has no attribute 'load_rnu'\n"


@pytest.mark.parametrize(
    ("number", "mended"),
    [
        (errno.EACCES, "choose another path"),
        (errno.EROFS, "choose another path"),
        (errno.ENOTDIR, "a file is where a folder is needed"),
        (errno.ENAMETOOLONG, "choose a shorter name"),
        (errno.ELOOP, "remove one of them"),
        (errno.ENOSPC, "free some space"),
        (errno.EIO, ""),
    ],
)
def test_what_the_system_refuses_is_said_with_file_and_remedy(
    fails, capsys, number: int, mended: str
) -> None:
    assert fails(OSError(number, os.strerror(number), "a/b")) == cli.WRONG_INPUT
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(f"error: {os.strerror(number)}: a/b")
    assert mended in first


def test_what_only_a_wrong_program_asks_of_the_system_passes_through(fails) -> None:
    for error in (
        OSError(errno.EBADF, "Bad file descriptor"),
        OSError(errno.ECONNRESET, "Connection reset by peer"),
        OSError("of a library's own"),
    ):
        with pytest.raises(OSError) as caught:
            fails(error)
        assert caught.value is error


def test_text_that_is_no_utf8_is_said_and_shown(fails, capsys) -> None:
    try:
        "caf\udce9".encode()
    except UnicodeEncodeError as error:
        assert fails(error) == cli.WRONG_INPUT
    assert r"error: 'caf\udce9': contains bytes that are not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "own", [{}, {"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}]
)
def test_the_allocator_on_gpus_grows_its_segments_unless_told_otherwise(
    own: dict[str, str],
) -> None:
    """Whoever imports moefold; torch reads it when CUDA starts."""
    code = "import moefold, os, json; print(json.dumps(dict(os.environ)))"
    clean = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | own, capture_output=True, text=True, check=True
    )
    found = {k: v for k, v in json.loads(done.stdout).items() if "ALLOC_CONF" in k}
    assert found == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
