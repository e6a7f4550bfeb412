"""WebDataset tars: the samples that their own library gives, and what is refused."""

import bz2
import gzip
import io
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from moefold.config.slot import build
from moefold.data.config import Chat, DataError, WebDataset
from moefold.data.corpora.sources import Skipped

wds = pytest.importorskip("webdataset")

MEMBERS: dict[str, list[tuple[str, bytes]]] = {
    "text beside images": [
        (f"{i:04d}.{kind}", f"{kind} {i} é".encode()) for i in range(30) for kind in ("jpg", "txt")
    ],
    "folders and dots": [("a/b.c/001.txt", b"one"), ("a/b.c/002.txt", b"two"), ("a/3.txt", b"3")],
    "upper case": [("1.TXT", b"one"), ("2.Txt", b"two")],
    "parts of names": [("1.left.txt", b"l"), ("1.txt", b"one"), ("2.txt", b"two")],
    "descriptions": [("__meta__.txt", b"no"), ("__info__/1.txt", b"no"), ("1.txt", b"one")],
    "names without dots": [("README", b"no"), ("1.txt", b"one")],
    "long names": [("x" * 300 + ".txt", b"one"), ("é" * 90 + ".txt", b"two")],
    "empty text": [("1.txt", b""), ("2.txt", b"two")],
}


def tar_of(members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def read(file: Path, **fields: str) -> list[tuple[str, str]]:
    skipped = Skipped()
    documents = build(WebDataset(files=(str(file),), **fields)).documents(skipped)
    found = [(d.name.removeprefix(f"{file}:"), d.text) for d in documents]
    skipped.raise_errors()
    return found


@pytest.mark.parametrize("case", MEMBERS)
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_documents_are_the_samples_of_webdataset(tmp_path: Path, case: str, form: int) -> None:
    if case == "long names" and form == tarfile.USTAR_FORMAT:
        pytest.skip("that form has no long names")
    file = tmp_path / "a.tar"
    file.write_bytes(tar_of(MEMBERS[case], form))
    with file.open("rb") as stream:
        members = wds.tariterators.tar_file_iterator(stream)
        samples = wds.tariterators.group_by_keys({"__url__": "", **each} for each in members)
        expected = [(sample["__key__"], sample["txt"].decode()) for sample in samples]
    assert read(file) == expected and len(expected) >= 1


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.bz2", "a.tar.zst"])
def test_compressed_tars_and_fields_of_json(tmp_path: Path, name: str) -> None:
    pack: dict[str, Callable[[bytes], bytes]] = {
        "bz2": bz2.compress,
        "zst": zstandard.ZstdCompressor().compress,
    }
    rows = [(f"{i}.json", json.dumps({"caption": f"text {i}"}).encode()) for i in range(5)]
    content = pack.get(name.rpartition(".")[2], gzip.compress)(tar_of(rows))
    (tmp_path / name).write_bytes(content)
    found = read(tmp_path / name, member="json", field="caption")
    assert found == [(str(i), f"text {i}") for i in range(5)]
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"is damaged: .*; get a new copy"):
        read(tmp_path / name, member="json", field="caption")


def strange(**fields: object) -> bytes:
    """A tar of one good member, and one with other fields."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        good = tarfile.TarInfo("1.txt")
        good.size = 3
        tar.addfile(good, io.BytesIO(b"one"))
        info = tarfile.TarInfo("2.txt")
        for name, value in fields.items():
            setattr(info, name, value)
        file.seek(0, io.SEEK_END)
        tar.addfile(info, io.BytesIO(b"")) if not info.size else file.write(
            info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
        )
    return file.getvalue()


STRANGE: dict[str, tuple[dict[str, object], str]] = {
    "absolute": ({"name": "/etc/2.txt"}, r"member '/etc/2\.txt' leaves the folder"),
    "parent": ({"name": "a/../../2.txt"}, r"member 'a/\.\./\.\./2\.txt' leaves the folder"),
    "symbolic link": (
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        r"member '2\.txt' is a link to '/etc/passwd'; write the tar again without it",
    ),
    "hard link": (
        {"type": tarfile.LNKTYPE, "linkname": "1.txt"},
        r"member .* is a link to '1\.txt'",
    ),
    "device": ({"type": tarfile.CHRTYPE}, "member .* is a device or a pipe"),
    "pipe": ({"type": tarfile.FIFOTYPE}, "member .* is a device or a pipe"),
    "huge": ({"size": 1 << 62}, r"member .* has 4,6\d\d,.* bytes, more than the 128 MiB"),
    "cut off": ({"size": 100_000}, "is damaged: unexpected end of data|is cut off"),
    "twice": ({"name": "1.txt"}, r"1\.txt: duplicate file name.*; write the tar again"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_members_are_refused_by_name(tmp_path: Path, case: str) -> None:
    fields, said = STRANGE[case]
    (tmp_path / "a.tar").write_bytes(strange(**fields))
    began = time.process_time()
    with pytest.raises(DataError, match=rf"a\.tar: {said}"):
        read(tmp_path / "a.tar")
    assert time.process_time() - began < 2
    assert [f.name for f in tmp_path.iterdir()] == ["a.tar"]


def test_samples_without_text_are_refused_by_key(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(tar_of([("1.txt", b"one"), ("2.cls", b"3"), ("3.txt", b"\xff")]))
    said = r"a\.tar:2: no member 'txt': the sample has \['cls'\].*a\.tar:3: not UTF-8: byte 0"
    with pytest.raises(DataError, match=f"(?s){said}"):
        read(file)
    assert read(file, bad="skip") == [("1", "one")]
    file.write_bytes(b"no tar, but text " * 99)
    with pytest.raises(DataError, match=r"a\.tar: is text, not a tar"):
        read(file)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_conversations_are_the_json_members(tmp_path: Path, name: str) -> None:
    rows = [{"messages": [{"role": "user", "content": f"é {i}"}]} for i in range(3)]
    members = [(f"{i}.json", json.dumps(row).encode()) for i, row in enumerate(rows)]
    content = tar_of([*members, ("2.jpg", b"\xff\xd8")])
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = list(build(Chat(files=(str(file),))).examples(Skipped()))
    assert found == [(f"{file.as_posix()}:{i}", row) for i, row in enumerate(rows)]


def test_samples_without_a_conversation_are_refused_by_key(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(tar_of([("1.json", b"{}"), ("2.txt", b"two")]))
    said = r"a\.tar:2: has no member 'json', but \['txt'\]; write each conversation as KEY\.json"
    with pytest.raises(DataError, match=said):
        list(build(Chat(files=(str(file),))).examples(Skipped()))
