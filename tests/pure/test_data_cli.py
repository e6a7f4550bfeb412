"""``moefold data`` from the outside."""

import json
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.main import main


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "a.jsonl"
    texts = [f"document {i} says {'more ' * (i % 7)}" for i in range(80)]
    rows = [json.dumps({"body": text}) for text in texts] + ['{"body": ""}']
    file.write_text("\n".join(rows))
    return file


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["data", *words])
    return status, capsys.readouterr().out


def prepared(lines: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    out = str(lines.parent / "out")
    options = ("--field", "body", "--holdout", "0.2", "--vocab", "300", "--folder", out)
    return ask(capsys, "prepare", "--jsonl", str(lines), *options, *words)


def test_prepare_answers_for_people_and_for_programs(
    lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = prepared(lines, capsys)
    assert status == 0 and "jsonl" in text and "1 document left out, empty" in text
    status, answer = prepared(lines, capsys, "--json")
    facts = json.loads(answer)
    assert status == 0 and [p["side"] for p in facts["parts"]] == ["train", "valid"]
    assert sum(p["documents"] for p in facts["parts"]) == 80
    assert facts["tokenizer"]["size"] == 300
    for part in facts["parts"]:
        assert Path(part["prefix"] + ".idx").is_file()
        assert f"{part['tokens']:,}" in text


def test_inspect_shows_documents_and_notices_damage(
    lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = json.loads(prepared(lines, capsys, "--json")[1])["parts"][0]
    status, text = ask(capsys, "inspect", train["prefix"], "--document", "0")
    assert status == 0 and "document 0 says" in text and "bytes: as written" in text
    status, answer = ask(capsys, "inspect", train["prefix"], "--json")
    facts = json.loads(answer)
    assert status == 0 and facts["tokens"] == train["tokens"] and facts["as_written"] is True
    file = Path(train["prefix"] + ".bin")
    content = bytearray(file.read_bytes())
    content[6] ^= 1
    file.write_bytes(content)
    status, text = ask(capsys, "inspect", str(file))
    assert status == 1 and "DAMAGED" in text


def test_inspect_takes_the_folder_that_prepare_names(
    lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = json.loads(prepared(lines, capsys, "--json")[1])
    out = str(lines.parent / "out")
    for folder in (out, made["folder"]):
        status, answer = ask(capsys, "inspect", folder, "--json")
        found = {Path(each["bin"]).stem: each["documents"] for each in json.loads(answer)["files"]}
        parts = {f"jsonl.{part['side']}": part["documents"] for part in made["parts"]}
        assert status == 0 and found == parts
    status, text = ask(capsys, "inspect", out)
    assert status == 0 and text.count("bytes: as written") == 2
    file = Path(made["parts"][1]["prefix"] + ".bin")
    file.write_bytes(file.read_bytes()[:-2] + b"\1\0")
    status, text = ask(capsys, "inspect", out)
    assert status == 1 and text.count("DAMAGED") == 1


def test_inspect_passes_over_indices_of_other_formats(
    lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as git's of its packs; a token index whose .bin file is lost is not one of these."""
    train = json.loads(prepared(lines, capsys, "--json")[1])["parts"][0]
    pack = lines.parent / "out" / ".git" / "pack-1.idx"
    pack.parent.mkdir()
    pack.write_bytes(b"\xfftOc" + bytes(60))
    status, text = ask(capsys, "inspect", str(lines.parent / "out"))
    assert status == 0 and text.count("bytes: as written") == 2 and "pack" not in text
    assert main(["data", "inspect", str(pack.parent)]) == 2
    assert "no token files" in capsys.readouterr().err
    Path(train["prefix"] + ".bin").unlink()
    assert main(["data", "inspect", str(lines.parent / "out")]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prepare"], "nothing to read"),
        (["prepare", "--stdlib", "--vocab", "300", "--tokenizer", "x"], "give only one"),
        (["prepare", "demo", "--stdlib"], "give a run, or sources"),
        (["prepare", "demo", "--holdout", "0.1"], "give a run, or sources"),
        (["prepare", "demo", "--vocab", "0"], "give a run, or sources"),
        (["prepare", "demo", "--bad", "skip"], "give a run, or sources"),
        (["prepare", "demo", "--field", "body"], "give a run, or sources"),
        (["prepare", "--stdlib", "--vocab", "3"], "train the tokenizer|at least 257"),
        (["prepare", "--stdlib", "--vocab", "0"], "at least 257"),
        (["prepare", "--text", "no/such.txt"], "no file matches"),
        (["inspect", "no/such"], "no such file"),
        (["inspect", "."], "no token files"),
        (["inspect", "no/such", "--tokenizer", "no/such"], "tokenizer.json"),
    ],
)
def test_wrong_input_is_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == 2
    told = capsys.readouterr().err
    assert any(part in told for part in said.split("|")), told
