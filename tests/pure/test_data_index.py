"""Indexed token files: byte for byte Megatron's, and nothing in them believed unchecked."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.data.config import DataError
from moefold.data.index import IndexedDataset, IndexWriter, dtype_for, token_files

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "megatron_indexed.json").read_text())


def write(prefix: Path, documents: list[list[int]], vocab: int = 65_499) -> Path:
    with IndexWriter(prefix, vocab) as writer:
        for ids in documents:
            writer.add(ids)
    return prefix


def test_bytes_are_those_of_the_other_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moefold.data.index.dtype_for", lambda vocab: np.uint16)
    with IndexWriter(tmp_path / "x", 65_536) as writer:
        for ids in REFERENCE["docs"]:
            writer.add(ids)
    assert (tmp_path / "x.bin").read_bytes().hex() == REFERENCE["bin_hex"]
    assert (tmp_path / "x.idx").read_bytes().hex() == REFERENCE["idx_hex"]


def test_reads_what_the_other_writers_wrote(tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"x.{suffix}").write_bytes(bytes.fromhex(REFERENCE[f"{suffix}_hex"]))
    indexed = IndexedDataset(tmp_path / "x")
    assert [indexed.document(i).tolist() for i in range(len(indexed))] == REFERENCE["docs"]


def test_the_type_grows_with_the_vocabulary() -> None:
    assert dtype_for(65_499) is np.uint16 and dtype_for(65_500) is np.int32


@settings(max_examples=30, deadline=None, database=None)
@given(
    st.lists(st.lists(st.integers(0, 99_999), min_size=1, max_size=9), min_size=1, max_size=9),
    st.data(),
)
def test_round_trip_and_reads_across_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list, data: st.DataObject
) -> None:
    prefix = write(tmp_path_factory.mktemp("x") / "x", documents, 100_000)
    indexed = IndexedDataset(prefix)
    assert [indexed.document(i).tolist() for i in range(len(indexed))] == documents
    flat = [i for ids in documents for i in ids]
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    assert indexed.read(start, stop).tolist() == flat[start:stop]
    assert indexed.n_tokens == len(flat)


def raw_index(
    lengths: list[int], offsets: list[int], marks: list[int], code: int = 8, tail: bytes = b""
) -> bytes:
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(marks))
    arrays = (np.array(lengths, "<i4"), np.array(offsets, "<i8"), np.array(marks, "<i8"))
    return head + b"".join(a.tobytes() for a in arrays) + tail


def put(folder: Path, index: bytes, tokens: list[int]) -> Path:
    (folder / "x.idx").write_bytes(index)
    (folder / "x.bin").write_bytes(np.array(tokens, "<u2").tobytes())
    return folder / "x"


def test_documents_of_several_sequences_gaps_modes_and_empty_ones(tmp_path: Path) -> None:
    """All legal in the format: a document of two sequences, a gap in .bin, modes, empty ones."""
    index = raw_index([2, 1, 0, 2], [0, 4, 6, 8], [0, 2, 3, 3, 4], tail=b"\1\1\1\1")
    indexed = IndexedDataset(put(tmp_path, index, [1, 2, 3, 99, 4, 5]))
    assert [indexed.document(i).tolist() for i in range(4)] == [[1, 2, 3], [], [], [4, 5]]
    assert indexed.n_tokens == 5 and indexed.read(1, 5).tolist() == [2, 3, 4, 5]


GOOD = raw_index([2, 1], [0, 4], [0, 1, 2])


def patched(at: int, code: str, value: int | bytes) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(code, data, at, value)
    return bytes(data)


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header at byte 0"),
    "cut in the header": (GOOD[:20], "header at byte 0"),
    "magic": (patched(0, "<9s", b"PK\3\4 zip!"), "magic at byte 0"),
    "version": (patched(9, "<Q", 2), "version at byte 9: is 2"),
    "dtype unknown": (patched(17, "<B", 9), "dtype at byte 17: is 9"),
    "dtype float": (patched(17, "<B", 7), "dtype at byte 17: is 7"),
    "sequences beyond the size": (patched(18, "<Q", 2**60), "sequence count at byte 18"),
    "sequences too many": (patched(18, "<Q", 9), "sequence count at byte 18"),
    "marks beyond the size": (patched(26, "<Q", 2**63), "document count at byte 26"),
    "no marks": (raw_index([], [], []), "document count at byte 26"),
    "cut at the end": (GOOD[:-1], "document count at byte 26"),
    "bytes left over": (GOOD + b"x", "end at byte 82: 1 bytes follow"),
    "negative length": (patched(38, "<i", -1), "length of sequence 1 at byte 38"),
    "negative offset": (patched(42, "<q", -2), "offset of sequence 0 at byte 42"),
    "uneven offset": (patched(50, "<q", 3), "offset of sequence 1 at byte 50: 3 is not a multiple"),
    "offset outside": (patched(50, "<q", 2**40), "offset of sequence 1 at byte 50"),
    "offsets unsorted": (patched(50, "<q", 2), "offset of sequence 1 at byte 50: 2 is before"),
    "first mark": (patched(58, "<q", 1), "document mark 0 at byte 58"),
    "marks unsorted": (patched(66, "<q", 3), "document mark 2 at byte 74"),
    "mark negative": (patched(66, "<q", -1), "document mark 1 at byte 66"),
    "last mark": (patched(74, "<q", 1), "document mark 2 at byte 74"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_index_is_refused_by_field_and_byte(tmp_path: Path, name: str) -> None:
    index, said = BAD[name]
    with pytest.raises(DataError) as caught:
        IndexedDataset(put(tmp_path, index, [1, 2, 3]))
    assert f"x.idx: {said}" in str(caught.value)


def test_the_good_index_of_the_table_is_good(tmp_path: Path) -> None:
    assert IndexedDataset(put(tmp_path, GOOD, [1, 2, 3])).document(0).tolist() == [1, 2]


def test_bytes_behind_the_last_whole_token_are_refused(tmp_path: Path) -> None:
    prefix = put(tmp_path, GOOD, [1, 2, 3])
    with prefix.with_suffix(".bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"x\.bin: end of file at byte 7: is not a multiple of 2"):
        IndexedDataset(prefix)


def test_a_bin_shorter_than_its_index_is_refused(tmp_path: Path) -> None:
    prefix = put(tmp_path, GOOD, [1, 2])
    with pytest.raises(DataError, match=r"x.bin: end of file at byte 4: sequence 1 ends at byte 6"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write(tmp_path / "x", [[1]])
    (tmp_path / f"x.{missing}").unlink()
    with pytest.raises(DataError, match=rf"x\.{missing}: no such file"):
        IndexedDataset(tmp_path / "x")


@settings(max_examples=150, deadline=None, database=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255), st.integers(0, len(GOOD)))
def test_no_damage_reads_outside_the_file(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int, keep: int
) -> None:
    """Whatever one byte becomes, and wherever the file ends: refused, or read within bounds."""
    folder, data = tmp_path_factory.mktemp("x"), bytearray(GOOD)
    data[at] ^= flip
    for content in (bytes(data), bytes(data[:keep])):
        try:
            indexed = IndexedDataset(put(folder, content, [1, 2, 3]))
        except DataError:
            continue
        assert indexed.n_tokens == sum(len(indexed.document(i)) for i in range(len(indexed)))
        assert indexed.n_tokens <= 6


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 100, 3], r"document 1 \(a\.txt\), position 1: token id 100 is not in \[0, 100\)"),
        ([1, 2, -1], r"document 1 \(a\.txt\), position 2: token id -1 is not in"),
        ([], r"document 1 \(a\.txt\) has no tokens"),
    ],
)
def test_the_writer_refuses_ids_and_publishes_nothing(tmp_path: Path, ids: list, said: str) -> None:
    with (
        pytest.raises(DataError, match=said),
        IndexWriter(tmp_path / "x", 100) as writer,
    ):
        writer.add([1, 2])
        writer.add(ids, "a.txt")
    assert list(tmp_path.iterdir()) == []


def test_the_old_files_stay_until_the_new_ones_are_whole(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2, 3]])
    with pytest.raises(RuntimeError), IndexWriter(tmp_path / "x", 100) as writer:
        writer.add([7])
        raise RuntimeError
    assert IndexedDataset(tmp_path / "x").document(0).tolist() == [1, 2, 3]
    write(tmp_path / "x", [[7]])
    assert IndexedDataset(tmp_path / "x").document(0).tolist() == [7]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_digest_sees_every_small_change(tmp_path: Path) -> None:
    before = IndexedDataset(write(tmp_path / "x", [[1, 2], [3]])).digest()
    assert IndexedDataset(write(tmp_path / "y", [[1, 2], [3]])).digest() == before
    assert IndexedDataset(write(tmp_path / "y", [[1, 2], [4]])).digest() != before
    assert IndexedDataset(write(tmp_path / "y", [[1], [2, 3]])).digest() != before


def test_either_file_names_the_pair() -> None:
    for name in ("a/x", "a/x.bin", "a/x.idx", "a/x.y"):
        stem = name.removesuffix(".bin").removesuffix(".idx")
        assert token_files(name) == (Path(stem + ".bin"), Path(stem + ".idx"))
