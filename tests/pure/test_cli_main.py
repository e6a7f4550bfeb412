"""The command line's frame: finding commands, help without loading anything, wording errors."""

import subprocess
import sys
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

    def add(self, subparsers) -> None:
        subparsers.add_parser("fails").add_argument("--size", type=int)

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
    assert choices[name].add_help, "add() did not describe a command of the file's name"
    assert cli._summary(Path(str(module.__file__))), "docstring is not ``moefold NAME``: what for."
    assert callable(module.run)


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
        "class C: add = staticmethod(lambda s: s.add_parser('doctor'))\n"
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
        "assert set(moefold._HOMES) <= set(dir(moefold))\n"
        "try: moefold.load_rnu\n"
        "except AttributeError as error: print(error)\n"
    )
    assert in_a_process(code) == "module 'moefold' has no attribute 'load_rnu'\n"
