"""Sources of documents: what they give, and what they say of files they cannot read."""

import gzip
import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moefold.config.slot import build
from moefold.data.config import DataError, Jsonl, Parquet, PythonStdlib, SourceRecord, Text
from moefold.data.corpora import sources
from moefold.data.corpora.sources import Skipped


def read(record: SourceRecord) -> tuple[list[tuple[str, str]], dict]:
    skipped = Skipped()
    documents = [tuple(d) for d in build(record).documents(skipped)]
    skipped.raise_errors()
    return documents, skipped


def lines(*texts: str | bytes) -> bytes:
    return b"".join(
        (t if isinstance(t, bytes) else json.dumps({"text": t}).encode()) + b"\n" for t in texts
    )


def test_text_files_in_sorted_order_each_once(tmp_path: Path) -> None:
    for name, content in (("b.txt", "two\r\n"), ("a.txt", "\ufeffone"), ("c.md", "no")):
        (tmp_path / name).write_bytes(content.encode())
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.txt.gz").write_bytes(gzip.compress(b"packed"))
    files = (f"{tmp_path}/*.txt", f"{tmp_path}/a.txt", f"{tmp_path}/**/*.gz")
    documents, skipped = read(Text(files=files))
    names = [Path(name).name for name, _ in documents]
    assert names == ["a.txt", "b.txt", "d.txt.gz"] and skipped == {}
    assert [text for _, text in documents] == ["one", "two\r\n", "packed"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
def test_split_text_loses_nothing_at_chunk_ends(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "READ_BYTES", chunk)
    pieces = ["first", "", "zwei ü", "=", "==", "last"]
    file = tmp_path / "a.txt"
    file.write_text("=-=".join(pieces), encoding="utf-8")
    documents, _ = read(Text(files=(str(file),), split="=-="))
    assert [text for _, text in documents] == pieces
    assert [name.rpartition("#")[2] for name, _ in documents] == list("012345")


def test_jsonl_names_lines_and_skips_blank_ones(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + lines("one", b"", b"  ", "zwei \u2028 \U0001f600", ""))
    documents, skipped = read(Jsonl(files=(str(file),)))
    assert [(n.rpartition(":")[2], t) for n, t in documents] == [
        ("1", "one"),
        ("4", "zwei \u2028 \U0001f600"),
        ("5", ""),
    ]
    assert skipped == {}


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "not json": (b'{"text": "a', "not JSON"),
    "python": (b"{'text': 'a'}", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "number": (b"3", "not an object: the line holds a int"),
    "no field": (
        b'{"body": "a"}',
        r"no field 'text': the line has \['body'\]; choose with field: NAME",
    ),
    "null": (b'{"text": null}', "field 'text' is not text: it holds null"),
    "list": (b'{"text": ["a"]}', "field 'text' is not text: it holds a list"),
    "latin-1": (b'{"text": "\xe9"}', "not UTF-8: byte 10 of the line"),
    "half a pair": (b'{"text": "\\ud800"}', "invalid text: character 0"),
    "huge number": (b'{"n": ' + b"9" * 9999 + b"}", "not JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_refused_by_file_and_line_or_counted(tmp_path: Path, name: str) -> None:
    line, said = BAD_LINES[name]
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines("good", line, "better"))
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {said}.*; correct the data.* bad: skip"):
        read(Jsonl(files=(str(file),)))
    documents, skipped = read(Jsonl(files=(str(file),), bad="skip"))
    assert [text for _, text in documents] == ["good", "better"]
    (reason,) = skipped.values()
    assert reason["count"] == 1 and reason["first"][0].endswith("a.jsonl:2")


def test_text_that_is_not_utf8_names_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"ok|\xff bad|fine")
    with pytest.raises(DataError, match=r"a\.txt#1: not UTF-8: byte 3: .*; correct the data, or"):
        read(Text(files=(str(file),), split="|"))
    documents, skipped = read(Text(files=(str(file),), split="|", bad="skip"))
    assert [text for _, text in documents] == ["ok", "fine"]
    assert skipped["not UTF-8"]["count"] == 1


def test_damaged_and_foreign_packings_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "a.txt.gz"
    cut.write_bytes(gzip.compress(b"x" * 100_000)[:-20])
    wrong = tmp_path / "b.txt.gz"
    wrong.write_bytes(b"no gzip")
    other = tmp_path / "c.txt.zst"
    other.write_bytes(b"x")
    for file, said in ((cut, "is damaged"), (wrong, "is named .gz"), (other, "is named .zst")):
        with pytest.raises(DataError, match=said) as caught:
            read(Text(files=(str(file),)))
        assert str(file) in str(caught.value)


def test_patterns_without_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches; name existing files"):
        read(Text(files=(f"{tmp_path}/*.nothing",)))
    with pytest.raises(DataError, match=r"is a folder; add a pattern"):
        read(Text(files=(str(tmp_path),)))
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    for neither in (tmp_path / "gone.txt", "/dev/null"):
        with pytest.raises(DataError, match="no file matches") as caught:
            read(Text(files=(str(neither),)))
        assert "is a folder" not in str(caught.value)


def test_text_without_its_mark_is_read_in_time_that_grows_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "READ_BYTES", 100)
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 3_000_000 + b"<|end|>" + b"y" * 10)
    began = time.process_time()
    documents, _ = read(Text(files=(str(file),), split="<|end|>"))
    assert [len(text) for _, text in documents] == [3_000_000, 10]
    assert time.process_time() - began < 2.0  # a second look at all that was read takes 15


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet_is_streamed_over_row_groups(tmp_path: Path, kind: pa.DataType) -> None:
    texts = [f"row {i} é" for i in range(2500)]
    table = pa.table({"id": list(range(2500)), "body": pa.array(texts).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    documents, _ = read(Parquet(files=(f"{tmp_path}/*.parquet",), column="body"))
    assert [text for _, text in documents] == texts
    assert documents[-1][0].endswith("a.parquet:2499")


def test_parquet_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), file)
    cases = (
        (
            {"column": "body"},
            r"has no column 'body'; its columns are \['text', 'n'\]; choose with column: NAME",
        ),
        ({"column": "n"}, "column 'n' holds int64, not strings"),
        ({}, r"a\.parquet:1: column 'text' is not text: it holds null"),
    )
    for fields, said in cases:
        with pytest.raises(DataError, match=said):
            read(Parquet(files=(str(file),), **fields))
    documents, skipped = read(Parquet(files=(str(file),), bad="skip"))
    assert [text for _, text in documents] == ["a"]
    assert sum(r["count"] for r in skipped.values()) == 1
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(Parquet(files=(str(file),)))


def test_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table([["a"], [1], [2], ["b"]], ["text", "n", "n", "body"]), file)
    assert [text for _, text in read(Parquet(files=(str(file),)))[0]] == ["a"]
    pq.write_table(pa.table([["a"], ["b"]], ["text", "text"]), file)
    with pytest.raises(DataError, match=r"a\.parquet: has 2 columns named 'text'; rename all but"):
        read(Parquet(files=(str(file),)))


def test_the_standard_library_is_a_corpus() -> None:
    source = build(PythonStdlib())
    names = [str(f) for f in source.files()]
    assert 2_000_000 < source.size() < 40_000_000 and len(names) > 200
    assert any(n.endswith("json/decoder.py") for n in names)
    assert not any("/test/" in n or "/encodings/" in n or "site-packages" in n for n in names)
    documents, _ = read(PythonStdlib())
    names = [name for name, _ in documents]
    assert names == sorted(names) and names[0][0] != "/"
    assert "class JSONDecoder" in dict(documents)["json/decoder.py"]
