"""Corpora in the form they come: compressed files, tables of ``datasets``, arrays, other kinds."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from moefold.config.slot import build
from moefold.data.config import DataError, Jsonl, Parquet, SourceRecord, Text
from moefold.data.corpora import records, streams
from moefold.data.corpora.sources import Skipped

TEXTS = [f"document {i} é {'=' * (i % 7)}" for i in range(300)]
LINES = b"".join(json.dumps({"text": t}).encode() + b"\n" for t in TEXTS)


def read(record: SourceRecord) -> tuple[list[str], Skipped]:
    skipped = Skipped()
    documents = [d.text for d in build(record).documents(skipped)]
    skipped.raise_errors()
    return documents, skipped


def zstd(data: bytes, window: int = 20) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return stream.compress(data) + stream.flush()


SKIPPED_FRAME = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"meta"
HALF = len(LINES) // 2
INDENTED = b"\xef\xbb\xbf\n" + json.dumps([{"text": t} for t in TEXTS], indent=2).encode()
PACKED: dict[str, tuple[str, bytes]] = {
    "gzip": ("a.jsonl.gz", gzip.compress(LINES)),
    "gzip members": ("a.jsonl.gz", gzip.compress(LINES[:HALF]) + gzip.compress(LINES[HALF:])),
    "zstd": ("a.jsonl.zst", zstd(LINES)),
    "zstd frames": ("a.jsonl.zst", zstd(LINES[:HALF]) + zstd(LINES[HALF:])),
    "zstd of pzstd": ("a.jsonl.zst", SKIPPED_FRAME + zstd(LINES[:9]) + zstd(LINES[9:])),
    "zstd with an empty frame": ("a.jsonl.zst", zstd(b"") + zstd(LINES)),
    "xz": ("a.jsonl.xz", lzma.compress(LINES)),
    "xz streams with padding": (
        "a.jsonl.xz",
        lzma.compress(LINES[:HALF]) + bytes(8) + lzma.compress(LINES[HALF:]),
    ),
    "bzip2": ("a.jsonl.bz2", bz2.compress(LINES[:HALF]) + bz2.compress(LINES[HALF:])),
    "a name that does not say": ("a.jsonl", zstd(LINES)),
    "an array": ("a.json", json.dumps([{"text": t} for t in TEXTS]).encode()),
    "an indented array, packed": (
        "a.json.gz",
        gzip.compress(
            b"\xef\xbb\xbf\n" + json.dumps([{"text": t} for t in TEXTS], indent=2).encode()
        ),
    ),
}


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_compressed_lines_are_those_of_the_plain_file(
    tmp_path: Path, case: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (streams, records):
        monkeypatch.setattr(module, "READ_BYTES", chunk)
    name, content = PACKED[case]
    (tmp_path / name).write_bytes(content)
    documents, skipped = read(Jsonl(files=(str(tmp_path / name),)))
    assert documents == TEXTS and not skipped


@pytest.mark.parametrize("case", [c for c in PACKED if "array" not in c and "members" not in c])
def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path, case: str) -> None:
    name, content = PACKED[case]
    (tmp_path / name).write_bytes(content[:-5])
    with pytest.raises(DataError, match=r"a\.jsonl\S*: is damaged: .*; get a new copy"):
        read(Jsonl(files=(str(tmp_path / name),)))


def tar_of(**members: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def v7_tar() -> bytes:
    """A tar of before 1988, without a magic number."""
    header = bytearray(tar_of(a_txt=b"text"))
    header[257:265] = bytes(8)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"]}), sink)
    return sink.getvalue()


FOREIGN: dict[str, tuple[bytes, str]] = {
    "tar": (
        tar_of(a_txt=b"text"),
        "is a tar, not text; read it with source: webdataset",
    ),
    "old tar": (v7_tar(), "is a tar, not text"),
    "packed tar": (gzip.compress(tar_of(a_txt=b"text")), "is a tar in gzip, not text"),
    "zstd of a tar": (zstd(tar_of(a_txt=b"text")), "is a tar in zstd, not text"),
    "tar of nothing": (bytes(10240), "is a file of zeros"),
    "Parquet": (parquet_bytes(), "is a Parquet file, not text; read it with source: parquet"),
    "packed twice": (gzip.compress(zstd(b"text")), "is compressed twice; .* with gzip"),
    "zip": (b"PK\x03\x04" + bytes(600), "is a zip archive, not text; unpack it"),
    "UTF-16": ("text".encode("utf-16"), "is UTF-16 text, not text; convert it with: iconv"),
    "git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "is a git LFS pointer, not text; fetch its content with: git lfs pull",
    ),
    "a dictionary": (
        zstandard.ZstdCompressor(
            dict_data=zstandard.train_dictionary(512, [b'{"text": "%d"}' % i for i in range(999)])
        ).compress(b'{"text": "7"}\n'),
        "is compressed with a dictionary, which it does not contain; decompress it with: zstd",
    ),
    "a large window": (
        zstd(b"text", 28),
        "its window is too large: compress it again without",
    ),
    "token index": (b"MMIDIDX\0\0" + bytes(99), "is a token index, not text"),
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("record", [Text, Jsonl])
def test_other_kinds_of_files_are_never_text(
    tmp_path: Path, case: str, record: Callable[..., SourceRecord]
) -> None:
    content, said = FOREIGN[case]
    (tmp_path / "a.data").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.data: {said}"):
        read(record(files=(str(tmp_path / "a.data"),)))


@pytest.mark.parametrize("text", ["PAR1S begins", "ORCHARD", "BZh9 is", "%PD", "[", "{}\0"])
def test_text_that_begins_like_another_kind_is_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text * 300)
    assert read(Text(files=(str(tmp_path / "a.txt"),))) == ([text * 300], {})


BAD_ARRAYS: dict[str, tuple[str, str]] = {
    "cut off": ('[{"text": "a"}, {"text": "b', r"a\.json\[1\]: not JSON: Unterminated string"),
    "not closed": ('[{"text": "a"}', r"a\.json\[1\]: not JSON: the file ends where '\]' is exp"),
    "a comma more": ('[{"text": "a"},]', r"a\.json\[1\]: not JSON: Expecting value"),
    "text behind": ('[{"text": "a"}]\n{"text": "b"}', r"a\.json\[1\]: not JSON: text follows"),
    "no comma": ('[{"text": "a"} {"text": "b"}]', r"a\.json\[1\]: not JSON: it has '{' where '\]'"),
    "a number": ('[{"text": "a"}, 3]', r"a\.json\[1\]: not an object: the line holds a int"),
    "deep": ('[{"text": "a"}, ' + "[" * 100_000, r"a\.json\[1\]: not JSON: maximum recursion"),
    "an object": ('{\n "text": "a"\n}', r"a\.json:1: not JSON: .*one line with: jq -c \. FILE"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_a_bad_array_is_refused_by_item(tmp_path: Path, case: str) -> None:
    content, said = BAD_ARRAYS[case]
    (tmp_path / "a.json").write_text(content)
    began = time.process_time()
    with pytest.raises(DataError, match=said):
        read(Jsonl(files=(str(tmp_path / "a.json"),)))
    assert time.process_time() - began < 2


@pytest.mark.parametrize(("name", "sep"), [("a.csv", ""), ("a.tsv", r", sep='\\t'")])
def test_a_table_of_text_is_refused_with_what_converts_it(
    tmp_path: Path, name: str, sep: str
) -> None:
    (tmp_path / name).write_text("id,text\n1,one\n")
    with pytest.raises(DataError, match=rf"not JSON; .*Dataset\.from_csv\('{name}'{sep}\)\.to_par"):
        read(Jsonl(files=(str(tmp_path / name),)))
    (tmp_path / name).write_text('{"text": "one"}\n')
    assert read(Jsonl(files=(str(tmp_path / name),)))[0] == ["one"]


def test_a_malformed_item_is_found_without_reading_on(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text" 3}' + ' {"text": "x"},' * 3_000_000)
    began = time.process_time()
    with pytest.raises(DataError, match=r"a\.json\[0\]: not JSON.*jq -c '\.\[\]' a\.json > NEW"):
        read(Jsonl(files=(str(tmp_path / "a.json"),)))
    assert time.process_time() - began < 1


def test_no_document_is_longer_than_the_stated_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (streams, records):
        monkeypatch.setattr(module, "READ_BYTES", 100)
    limit = 1 << 20
    for name in ("streams", "records", "sources"):
        monkeypatch.setattr(f"moefold.data.corpora.{name}.MAX_DOCUMENT", limit)
    line = json.dumps({"text": "x" * (limit - 20)}).encode()
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    assert len(read(Jsonl(files=(f"{tmp_path}/a.jsonl",)))[0][0]) == limit - 20
    long = "x" * (limit + 1)
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "a.jsonl").write_text(f'\n{{"text": "{long}"}}\n')
    (tmp_path / "a.json").write_text(f'[{{"text": ""}}, {{"text": "{long}"}}]')
    pq.write_table(pa.table({"text": ["", long]}), tmp_path / "a.parquet")
    for record, where in (
        (Text(files=(f"{tmp_path}/a.txt",)), "txt"),
        (Text(files=(f"{tmp_path}/a.txt",), split="\n"), "txt#0"),
        (Jsonl(files=(f"{tmp_path}/a.jsonl",)), "jsonl:2"),
        (Jsonl(files=(f"{tmp_path}/a.json",)), r"json\[1\]"),
        (Parquet(files=(f"{tmp_path}/a.parquet",)), "parquet:1"),
    ):
        with pytest.raises(DataError, match=rf"a\.{where}: has more than 1 MiB, the most that one"):
            read(record)


def test_a_bomb_is_refused_within_the_limit(tmp_path: Path) -> None:
    """Two gigabytes of one line, packed into a few kilobytes."""
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(b'{"text": "') + zstd(bytes(1 << 27)) * 16)
    began = time.process_time()
    with pytest.raises(DataError, match=r"zst:1: has more than 128 MiB"):
        read(Jsonl(files=(f"{tmp_path}/a.jsonl.zst",)))
    assert time.process_time() - began < 2


# ------------------------------------------------------------------------------------- tables


def write_arrow(file: Path, table: pa.Table, stream: bool = True, **options: str) -> None:
    start = pa.ipc.new_stream if stream else pa.ipc.new_file
    with start(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=7)


def saved(folder: Path, *tables: pa.Table, **state: object) -> Path:
    """Write what ``datasets`` saves."""
    folder.mkdir(parents=True)
    names = []
    for number, table in enumerate(tables):
        names.append(f"data-{number:05d}-of-{len(tables):05d}.arrow")
        write_arrow(folder / names[-1], table)
    content = {"_data_files": [{"filename": name} for name in names], "_format_columns": None}
    (folder / "state.json").write_text(json.dumps(content | state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def table_of(texts: list[str]) -> pa.Table:
    return pa.table({"id": list(range(len(texts))), "text": texts})


def test_a_saved_folder_is_the_files_of_its_state(tmp_path: Path) -> None:
    """A cache beside them is left out by name, and order is the state's."""
    tables = [table_of(TEXTS[:20]), table_of(TEXTS[20:30])]
    folder = saved(tmp_path / "set", *tables)
    write_arrow(folder / "cache-0123456789abcdef.arrow", table_of(["DRAFT"]))
    documents, skipped = read(Parquet(files=(str(folder),)))
    assert documents == TEXTS[:30]
    (entry,) = skipped.values()
    assert entry["unit"] == "file" and entry["first"] == [f"{folder}/cache-0123456789abcdef.arrow"]
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    assert read(Parquet(files=(str(folder),)))[0] == TEXTS[20:30] + TEXTS[:20]
    assert read(Parquet(files=(f"{tmp_path}/s*",)))[0] == TEXTS[20:30] + TEXTS[:20]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_arrow_files_of_every_form(
    tmp_path: Path, stream: bool, compression: str | None, kind: pa.DataType
) -> None:
    table = pa.table({"text": pa.array(TEXTS[:20]).cast(kind)}).combine_chunks()
    write_arrow(tmp_path / "a.arrow", table, stream, compression=compression)
    documents, _ = read(Parquet(files=(f"{tmp_path}/a.arrow",)))
    assert documents == TEXTS[:20]


def test_rows_that_are_not_utf8_are_refused_by_row(tmp_path: Path) -> None:
    broken = pa.array([b"fine", b"\xff", b"good"], pa.binary()).view(pa.string())
    write_arrow(tmp_path / "a.arrow", pa.table({"text": broken}))
    with pytest.raises(DataError, match=r"a\.arrow:1: not UTF-8: byte 0"):
        read(Parquet(files=(f"{tmp_path}/a.arrow",)))
    assert read(Parquet(files=(f"{tmp_path}/a.arrow",), bad="skip"))[0] == ["fine", "good"]


def test_offsets_beyond_an_arrow_file_s_buffers_are_refused(tmp_path: Path) -> None:
    """Reading such a row would end the process."""
    texts = pa.array(["aaaa", "bbbb", "cccc"])
    write_arrow(tmp_path / "a.arrow", pa.table({"text": texts}))
    content = (tmp_path / "a.arrow").read_bytes()
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 4, 8, 12))
    assert content.count(offsets) == 1
    wrong = b"".join(n.to_bytes(4, "little") for n in (0, 4, 1 << 30, 12))
    (tmp_path / "a.arrow").write_bytes(content.replace(offsets, wrong))
    with pytest.raises(DataError, match=r"a\.arrow: cannot be read as Arrow: .*ffset"):
        read(Parquet(files=(f"{tmp_path}/a.arrow",)))


def bad_folder(kind: str, folder: Path) -> None:
    """Write a folder that cannot be read."""
    if kind == "several sets":
        for name in ("train", "test"):
            saved(folder / name, table_of(TEXTS[:3]))
        (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    elif kind == "a set is missing":
        saved(folder / "train", table_of(TEXTS[:3]))
        (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    elif kind == "no state":
        (saved(folder, table_of(TEXTS[:3])) / "state.json").unlink()
    elif kind == "a missing file":
        next(saved(folder, table_of(TEXTS[:3])).glob("*.arrow")).unlink()
    elif kind == "no text":
        saved(folder, pa.table({"id": [1, 2], "pixels": [b"a", b"b"]}))
    elif kind == "hidden text":
        saved(folder, table_of(TEXTS[:3]), _format_columns=["id"])
    elif kind == "numbers":
        saved(folder, pa.table({"text": [1, 2]}))
    elif kind == "cut off":
        (file,) = saved(folder, table_of(TEXTS)).glob("*.arrow")
        file.write_bytes(file.read_bytes()[:-3000])
    else:
        saved(folder, table_of(TEXTS[:3]), **BAD_STATES[kind][0])


BAD_STATES: dict[str, tuple[dict[str, object], str]] = {
    "a path": (
        {"_data_files": [{"filename": "../other.arrow"}]},
        r"state\.json: _data_files names '\.\./other\.arrow', which is not in the folder",
    ),
    "an absolute path": (
        {"_data_files": [{"filename": "/etc/passwd"}]},
        r"_data_files names '/etc/passwd', which is not in the folder",
    ),
    "no files": ({"_data_files": []}, "state.json: _data_files names no files; save the set again"),
    "a list of names": ({"_data_files": ["a.arrow"]}, "_data_files has an entry without filename"),
    "a choice of rows": ({"_indices_files": [{"filename": "i"}]}, r"flatten_indices\(\)"),
    "a column": ({"_format_columns": "text"}, "_format_columns is not a list"),
}
BAD_FOLDERS: dict[str, str] = {
    "several sets": r"contains several sets \(train, test\); name the folder of one, such as",
    "a set is missing": r"dataset_dict\.json: names the set 'test', which is not complete",
    "no state": r"has no state\.json, .*; copy the whole folder, or name the files: .*/\*\.arrow",
    "a missing file": r"state\.json: names data-00000-of-00001\.arrow, which is missing",
    "no text": r"has no column 'text'; its columns are \['id', 'pixels'\]; choose with",
    "hidden text": r"its columns are \['id'\] \(.*state\.json shows no others\)",
    "numbers": "column 'text' holds int64, not strings",
    "cut off": r"\.arrow: cannot be read as Arrow: .*; get a new copy",
} | {kind: said for kind, (_, said) in BAD_STATES.items()}


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_a_saved_folder_that_cannot_be_read_is_refused(tmp_path: Path, kind: str) -> None:
    bad_folder(kind, tmp_path / "set")
    with pytest.raises(DataError, match=BAD_FOLDERS[kind]):
        read(Parquet(files=(str(tmp_path / "set"),)))


def test_other_kinds_of_files_are_not_tables(tmp_path: Path) -> None:
    saved(tmp_path / "set", table_of(TEXTS[:3]))
    with pytest.raises(DataError, match="is a folder of datasets; read it with source: parquet"):
        read(Text(files=(str(tmp_path / "set"),)))
    for name, content, said in (
        ("a.jsonl", LINES, r"a\.jsonl: is not a Parquet or Arrow file"),
        ("a.parquet", LINES, r"a\.parquet: cannot be read as Parquet"),
        ("b.parquet", b"", r"b\.parquet: cannot be read as Parquet: it is empty"),
        ("c.arrow", LINES, r"c\.arrow: cannot be read as Arrow"),
        ("d.gz", gzip.compress(parquet_bytes()), r"d\.gz: is not a Parquet or Arrow file \(gzip\)"),
        ("e", tar_of(a_txt=b"text"), r"e: is not a Parquet or Arrow file \(a tar\)"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=said):
            read(Parquet(files=(str(tmp_path / name),)))
