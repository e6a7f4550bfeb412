"""The records of the data: what a run file may say of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from moefold.checkpoint.config import NodeLocal
from moefold.config.base import to_dict
from moefold.config.errors import RunError
from moefold.config.fields import FieldSpec, iter_file_paths
from moefold.config.load import load
from moefold.data.config import Data, DataError, FileTokenizer, IndexedTokens, Jsonl, Text
from moefold.data.corpora.sources import expand_patterns
from moefold.run import Run
from tests.mutations import Judge, mutations, repair

FULL: dict[str, Any] = {
    "seq": 256,
    "tokenizer": {"kind": "bpe", "vocab": 2048},
    "train": [
        {"source": "python_stdlib", "holdout": 0.05},
        {"source": "text", "files": ["/a/*.txt"], "split": "\n\n", "weight": 0.5, "bad": "skip"},
        {"source": "jsonl", "files": ["/a.jsonl"], "field": "body", "name": "chat"},
        {"source": "parquet", "files": ["/a.parquet"], "column": "content"},
    ],
    "valid": [{"source": "text", "files": ["/v.txt"], "name": "val"}],
}


def data_of(raw: dict[str, Any]) -> Data:
    return load(Data, raw).record


def test_the_shape_of_the_run_file() -> None:
    data = data_of(FULL)
    assert [s.label for s in data.train] == ["python_stdlib", "text", "chat", "parquet"]
    assert data.vocab == 2048
    assert data.evaluation_sets == ("python_stdlib", "val")
    assert data.train[1].weight == 0.5 and data.train[0].weight == 1.0
    short = data_of({"seq": 8, "train": ["python_stdlib"]})
    assert short.tokenizer.vocab_size() == 2048 and short.evaluation_sets == ()


def test_every_field_broken_is_refused_and_mended() -> None:
    judge, found = Judge(Data, lambda raw: load(Data, raw), FULL), list(mutations(Data, FULL))
    assert len(found) > 100
    for mutation in found:
        judge(mutation)


@pytest.mark.parametrize(
    ("change", "path", "nearest"),
    [
        ({"valid": [{"source": "python_stdlib"}]}, ("valid", 0, "name"), "python_stdlib_2"),
        (
            {"valid": [{"source": "text", "files": ["x"], "holdout": 0.1, "name": "v"}]},
            ("valid", 0, "holdout"),
            0.0,
        ),
        ({"train": [{"source": "indexed", "prefix": "x"}]}, ("train", 0), None),
    ],
)
def test_relations_between_fields(change: dict, path: tuple, nearest: Any) -> None:
    raw = {**FULL, **change}
    with pytest.raises(RunError) as caught:
        data_of(raw)
    assert [v.path for v in caught.value.violations] == [path]
    if nearest is not None:
        assert caught.value.violations[0].nearest == nearest
    data_of(repair(Data, raw, caught.value.violations))


def test_names_given_thrice_are_told_apart() -> None:
    raw = {**FULL, "train": ["python_stdlib"] * 3, "valid": []}
    with pytest.raises(RunError) as caught:
        data_of(raw)
    mended = data_of(repair(Data, raw, caught.value.violations))
    assert len({s.label for s in mended.train}) == 3


def test_vocabulary_of_a_tokenizer_file(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    content = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9, "content": "</s>"}]}
    file.write_text(json.dumps(content))
    assert FileTokenizer(path=str(file)).vocab_size() == 10
    assert FileTokenizer(path=str(tmp_path)).vocab_size() == 10


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), ("{", "is not JSON"), ("[]", "JSON object"), ("{}", "model.vocab")],
)
def test_a_tokenizer_file_that_is_none(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        FileTokenizer(path=str(file)).vocab_size()
    assert str(file) in str(caught.value)


def test_paths_begin_at_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overrides and raw data name theirs from the working folder; the record has all whole."""
    runs, home = tmp_path / "runs [1]", tmp_path / "home"
    runs.mkdir()
    (runs / "v[1].txt").touch()
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "base.yaml").write_text(
        "seq: 8\n"
        "tokenizer: {kind: file, path: ready}\n"
        "train: [{source: text, files: [a.txt, /far/b.txt, ~/c.txt]}]\n"
    )
    (runs / "run.yaml").write_text(
        "base: ../base.yaml\n"
        "valid:\n"
        "- {source: indexed, prefix: tokens/d}\n"
        "- {source: text, name: v, files: ['v[1].txt', '*.txt']}\n"
    )
    added = "train+={source: jsonl, files: [e.jsonl]}"
    for here in (tmp_path, runs):
        monkeypatch.chdir(here)
        data = load(Data, runs / "run.yaml", [added]).record
        text, jsonl = data.train
        indexed, matched = data.valid
        assert isinstance(text, Text) and isinstance(jsonl, Jsonl) and isinstance(matched, Text)
        assert data.tokenizer == FileTokenizer(path=str(tmp_path / "ready"))
        assert text.files == (str(tmp_path / "a.txt"), "/far/b.txt", str(home / "c.txt"))
        assert isinstance(indexed, IndexedTokens)
        assert indexed.prefix == str(runs / "tokens" / "d")
        found = [list(expand_patterns((name,)).columns) for name in matched.files]
        assert found == [[runs / "v[1].txt"]] * 2
        assert jsonl.files == (str(here / "e.jsonl"),)
        assert load(Data, to_dict(data)).record == data
        raw = load(Data, {"seq": 8, "train": [{"source": "text", "files": ["a.txt"]}]}).record
        assert raw.train[0] == Text(files=(str(here / "a.txt"),))
    (runs / "saved.yaml").write_text("seq: 8\ntrain: [{source: text, files: [a.txt]}]\n")
    older = load(Data, runs / "saved.yaml", folder=tmp_path).record
    assert older.train[0] == Text(files=(str(tmp_path / "a.txt"),))


def test_every_path_of_a_run_is_known_as_one(tmp_path: Path) -> None:
    """Beside the data's: those of parts, of a model's folder and of copies on machines' disks."""
    source = {"source": "jsonl", "files": ["a.jsonl", "b.jsonl"], "field": "body"}
    raw = {
        "uses": ["part.py"],
        "model": {"family": "folder", "from": "hub"},
        "data": {"tokenizer": {"kind": "file", "path": "hub", "end": "</s>"}, "valid": [source]},
        "watch": {"checkpoint": {"local": {"folder": "scratch"}}},
    }
    assert [text for _, text, _ in iter_file_paths(FieldSpec(Run), raw)] == [
        "part.py", "hub", "hub", "a.jsonl", "b.jsonl", "scratch",
    ]  # fmt: skip
    found = {"scratch": str(tmp_path / "scratch"), "$JOB/x": "$JOB/x", r'"~\0"': "~\0"}
    for said, whole in found.items():
        (tmp_path / "local.yaml").write_text(f"folder: {said}\n")
        assert load(NodeLocal, tmp_path / "local.yaml").record.folder == whole
