"""The records of the data: what a run file may say of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from moefold.config.load import load
from moefold.config.problems import RunError, repair
from moefold.data.config import Data, DataError, FileTokenizer
from tests.mutations import Judge, mutations

FULL: dict[str, Any] = {
    "seq": 256,
    "tokenizer": {"kind": "bpe", "vocab": 2048},
    "train": [
        {"source": "python_stdlib", "holdout": 0.05},
        {"source": "text", "files": ["a/*.txt"], "split": "\n\n", "weight": 0.5, "bad": "skip"},
        {"source": "jsonl", "files": ["a.jsonl"], "field": "body", "name": "chat"},
        {"source": "parquet", "files": ["a.parquet"], "column": "content"},
    ],
    "valid": [{"source": "text", "files": ["v.txt"], "name": "val"}],
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
    judge, found = Judge(lambda raw: load(Data, raw), FULL), list(mutations(Data, FULL))
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
    data_of(repair(raw, caught.value.violations))


def test_names_given_thrice_are_told_apart() -> None:
    raw = {**FULL, "train": ["python_stdlib"] * 3, "valid": []}
    with pytest.raises(RunError) as caught:
        data_of(raw)
    mended = data_of(repair(raw, caught.value.violations))
    assert len({s.label for s in mended.train}) == 3


def test_vocabulary_of_a_tokenizer_file(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    content = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9, "content": "</s>"}]}
    file.write_text(json.dumps(content))
    assert FileTokenizer(path=str(file)).vocab_size() == 10
    assert FileTokenizer(path=str(tmp_path)).vocab_size() == 10


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), ("{", "is not JSON"), ("[]", "not an object"), ("{}", "model.vocab")],
)
def test_a_tokenizer_file_that_is_none(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        FileTokenizer(path=str(file)).vocab_size()
    assert str(file) in str(caught.value)
