"""What the documents point at exists, and the reading list stays a short one."""

import re
from pathlib import Path

import pytest
import rounds

from moefold.cli.main import command_files

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [ROOT / "Makefile", ROOT / ".ci" / "run", *sorted((ROOT / "tools").iterdir())]
READING = 8
WORD = re.compile(r"[A-Za-z_]\w+").findall
READING_LINES = 1600


def links(page: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    return [target for target in targets if "://" not in target]


def reading_list(page: Path) -> list[Path]:
    """The numbered links of a page, in their order."""
    found = re.findall(r"^(?:## )?\d+\. \[[^]]*\]\(([^)]+)\)", page.read_text(), re.MULTILINE)
    return [(page.parent / target).resolve() for target in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    missing = [target for target in links(page) if not (page.parent / target).exists()]
    paths = re.findall(r"`((?:moefold|tests|tools|docs|bench)/[\w./]*)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"{page.name} names what is not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_a_page_shows_exist(page: Path) -> None:
    shown = set(re.findall(r"\bmoefold ([a-z]+)\b", " ".join(code(page.read_text()))))
    assert shown <= set(command_files()), f"no such command: {shown - set(command_files())}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_modules_a_script_names_exist(script: Path) -> None:
    named = set(re.findall(r"\b((?:moefold|tests)(?:\.\w+)+)", script.read_text()))
    stems = [ROOT.joinpath(*name.split(".")) for name in named]
    missing = [stem for stem in stems if not (stem.is_dir() or stem.with_suffix(".py").exists())]
    assert not missing, f"{script.name} names what is not there: {missing}"


def test_the_names_of_the_glossary_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    named = {word for row in rows for code in re.findall(r"`([^`]+)`", row) for word in WORD(code)}
    files = [
        file for folder in ("moefold", "tests", "bench") for file in (ROOT / folder).rglob("*")
    ]
    sources = [file for file in files if file.suffix in (".py", ".yaml", ".html")]
    known = {word for file in files for word in WORD(file.name)}
    known |= {word for file in sources for word in WORD(file.read_text("utf-8"))}
    assert named - known == set()


def code(text: str) -> list[str]:
    """The words of a page that are set as code: indented blocks by their lines, and in a line."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [*blocks, *re.findall(r"`(moefold [^`]+)`", text)]


def test_both_reading_lists_agree_and_are_short() -> None:
    files = reading_list(ROOT / "README.md")
    assert files == reading_list(ROOT / "docs" / "tour.md")
    assert len(files) == READING
    assert sum(len(file.read_text().splitlines()) for file in files) <= READING_LINES


def test_every_sort_of_violation_is_explained() -> None:
    """The ids in the code are those in the table, no more and no fewer."""
    text = (ROOT / "docs" / "errors.md").read_text()
    explained = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE))
    folder = ROOT / "moefold" / "config"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    of_pydantic = (folder / "check.py").read_text()
    quoted = set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', source))
    assert explained <= quoted, f"no such id: {explained - quoted}"
    named = re.findall(r'\bid(?:: str)? ?= ?"([a-z-]+)"', source)
    named += re.findall(r'_refus(?:al|ed)\([^"]*(?:f?"[^"]*"[^"]*)?"([a-z-]+)"\)', source)
    named += re.findall(r'^    "[a-z_]+": "([a-z-]+)",$', of_pydantic, re.MULTILINE)
    named += re.findall(r'(?:REMOVE|Rename\(like\)|like|None), "([a-z-]+)"', source)
    assert set(named) <= explained, f"not explained: {set(named) - explained}"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "docs" / "tour.md"], ids=["readme", "tour"]
)
def test_the_reading_list_is_as_long_as_it_says(page: Path) -> None:
    said = re.search(r"[Aa]bout ([\d,]+)\s+lines", page.read_text())
    assert said is not None
    lines = sum(len(file.read_text().splitlines()) for file in reading_list(page))
    assert abs(lines - int(said[1].replace(",", ""))) <= 100


def test_the_table_of_torchruns_agents_is_that_of_the_stored_trials() -> None:
    assert rounds.table() in (ROOT / "docs" / "launch.md").read_text()
