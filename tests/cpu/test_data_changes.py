"""Data that change under a run: no byte is trained on that was not compared with its digest."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefold import files
from moefold.config.load import load
from moefold.data import blocks
from moefold.data.blocks import BlockDigests, CheckedFile
from moefold.data.config import Data, DataError
from moefold.data.derived import StoredFacts
from moefold.data.index import IndexedDataset, IndexWriter
from moefold.data.order import stable_hash
from moefold.data.prepare import prepare
from moefold.files import read_json, write_json
from tests.cpu.runs import job_of, run_of
from tests.pure.test_data_index import write

SMALL = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few blocks."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", SMALL)
    monkeypatch.setattr("moefold.data.derived.BLOCK_BYTES", SMALL)


def checked(path: Path, size: int = 300) -> CheckedFile:
    """Write a file, and open it with its digests."""
    path.write_bytes(bytes(range(256)) * 2)
    os.truncate(path, size)
    digests = BlockDigests()
    for at in range(0, size, 7):
        digests.update(path.read_bytes()[at : at + 7])
    file = CheckedFile(path)
    assert digests.hexdigests() == list(file.iter_digests())
    file.expect(digests.hexdigests())
    return file


def poke(path: Path, at: int, data: bytes = b"!!") -> None:
    """Overwrite bytes of a file in place, at another time than before."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def test_reads_return_the_bytes_of_the_file(tmp_path: Path) -> None:
    file = checked(tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    for start, size in ((0, 300), (63, 2), (64, 64), (299, 1), (10, 0), (63, 2)):
        assert file.read(start, size) == whole[start : start + size]
    assert file.change() == ""


def test_altered_bytes_are_refused_when_their_block_is_first_read(tmp_path: Path) -> None:
    file = checked(tmp_path / "x")
    poke(tmp_path / "x", 130)
    assert file.read(0, 64) == bytes(range(64))
    with pytest.raises(DataError, match=r"x: bytes 128 to 192 .*was written to"):
        file.read(120, 20)
    assert file.change() == "was written to"


def test_a_block_that_was_checked_is_checked_again_after_a_write(tmp_path: Path) -> None:
    file = checked(tmp_path / "x")
    file.read(0, 300)
    poke(tmp_path / "x", 0, bytes([0]))  # the same content, at another time
    assert file.read(0, 300)[:3] == b"\0\1\2"
    poke(tmp_path / "x", 130)
    assert file.read(0, 64) == bytes(range(64))
    with pytest.raises(DataError, match="bytes 128 to 192"):
        file.read(128, 1)


@pytest.mark.parametrize(
    "harm, said, change",
    [
        (truncate, "has 100 bytes instead of 300", "has 100 bytes instead of 300"),
        (lambda path: os.truncate(path, 0), "has 0 bytes", "has 0 bytes"),
        (lambda path: path.write_bytes(b"!" * 300), "are not those", "was written to"),
        (lambda path: path.write_bytes(b"!" * 900), "has 900 bytes instead", "has 900 bytes"),
        (lambda path: path.unlink(), "", "cannot be found any more"),
        (lambda path: (path.rename(f"{path}.old"), path.write_bytes(b"a" * 300)), "", "replaced"),
    ],
)
def test_whatever_happens_to_a_file_is_an_error_of_a_read_or_harmless(
    tmp_path: Path, harm: Callable[[Path], Any], said: str, change: str
) -> None:
    path = tmp_path / "x"
    file = checked(path)
    file.read(0, 300)
    before = path.read_bytes()
    harm(path)
    if path.exists():
        os.utime(path, ns=(1, 1))
    assert change in file.change()
    if not said:  # the opened file is whole
        assert file.read(200, 100) == before[200:]
        return
    with pytest.raises(DataError, match=said):
        file.read(200, 100)


def test_a_disk_that_fails_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = checked(tmp_path / "x")

    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(DataError, match=r"x: byte 0 cannot be read: .*restore the file"):
        file.read(0, 10)


def test_an_index_cut_short_under_a_run_does_no_harm(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[1, 2, 3], [4, 5]])
    indexed = IndexedDataset(prefix)
    os.truncate(tmp_path / "x.idx", 3)
    assert [indexed.document(i).tolist() for i in range(2)] == [[1, 2, 3], [4, 5]]


def data_of(folder: Path, **source: Any) -> Data:
    """Data of a text source, or of token files if a ``prefix`` is given."""
    raw: dict[str, Any] = run_of(folder).data.model_dump(mode="json", by_alias=True)
    if source:
        raw["train"] = [{"source": "indexed", "holdout": 0.3, **source}]
        raw["tokenizer"] = {"kind": "file", "path": str(folder / "tokenizer.json")}
    return load(Data, raw).record


def documents(data: Data, folder: Path) -> list[list[int]]:
    """Read all training documents."""
    corpus = prepare(data, folder).train[0].corpus
    return [corpus.document(i).tolist() for i in range(corpus.n_documents)]


def test_prepared_tokens_altered_between_two_starts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moefold.data.index._SAMPLE_COUNT", 2)
    monkeypatch.setattr("moefold.data.index._SAMPLE_BYTES", 8)
    data = data_of(tmp_path)
    whole = documents(data, tmp_path / "p")
    (path,) = (tmp_path / "p").rglob("*.train.bin")
    poke(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"train\.bin: bytes \d+ to \d+ .*remove the prepared data"):
        documents(data, tmp_path / "p")
    (path.parent).rename(tmp_path / "gone")
    assert documents(data, tmp_path / "p") == whole


def test_older_prepared_files_are_digested_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_of(tmp_path)
    whole = documents(data, tmp_path / "p")
    fingerprint = prepare(data, tmp_path / "p").fingerprint()
    for path in (tmp_path / "p").rglob("*.train.json"):
        content = read_json(path)
        del content["blocks"]
        write_json(path, content)
    assert documents(data, tmp_path / "p") == whole
    assert caplog.text.count("reads all bytes once") == 1
    assert documents(data, tmp_path / "p") == whole
    assert caplog.text.count("reads all bytes once") == 1
    assert prepare(data, tmp_path / "p").fingerprint() == fingerprint


def indexed_data(folder: Path) -> Data:
    """Token files of another program, with the tokenizer of a prepared run."""
    prepared = prepare(data_of(folder), folder / "own")
    prepared.tokenizer.save(folder / "tokenizer.json")
    draw = np.random.default_rng(0)
    with IndexWriter(folder / "theirs", prepared.tokenizer.size) as writer:
        for _ in range(60):
            writer.add(draw.integers(0, 256, draw.integers(5, 40)))
    return data_of(folder, prefix=str(folder / "theirs"))


def test_files_of_other_programs_are_digested_at_first_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = indexed_data(tmp_path)
    whole = documents(data, tmp_path / "p")
    first = prepare(data, tmp_path / "p")
    assert caplog.text.count("reads all bytes once") == 1
    poke(tmp_path / "theirs.bin", 200)
    with pytest.raises(DataError, match="bytes 192 to 256"):
        [first.train[0].corpus.document(i) for i in range(first.train[0].corpus.n_documents)]
    again = prepare(data, tmp_path / "p")  # another file: its digests are new, and so is its mark
    assert caplog.text.count("reads all bytes once") == 2
    assert again.contents() != first.contents()
    assert documents(data, tmp_path / "p") != whole
    assert first.changes() == [f"{tmp_path / 'theirs.bin'} was written to"]


def test_a_trial_run_digests_and_stores_nothing(tmp_path: Path) -> None:
    data = indexed_data(tmp_path)
    prepare(data, tmp_path / "p")
    for path in (tmp_path / "p").rglob("*.blocks.json"):
        path.unlink()
    held = list((tmp_path / "p").rglob("*.heldout"))
    assert held
    before = sorted((tmp_path / "p").rglob("*"))
    assert prepare(data, tmp_path / "p", scratch=tmp_path / "scratch").contents() == ""
    assert sorted((tmp_path / "p").rglob("*")) == before


def test_held_out_documents_stay_those_that_their_numbers_hash_to(tmp_path: Path) -> None:
    stages: list[str] = []
    derived = StoredFacts(tmp_path, lambda stage, done, total: stages.append(stage))
    held = derived.held_out("code", 1001, 0.2)
    assert held.tolist() == [stable_hash("holdout", n) < int(0.2 * 2**64) for n in range(1001)]
    assert stages == ["choosing held-out documents of code"]
    assert np.array_equal(derived.held_out("code", 1001, 0.2), held)
    assert len(stages) == 1, "a second start reads what was stored"
    (stored,) = tmp_path.iterdir()
    stored.write_bytes(stored.read_bytes()[:5])
    assert np.array_equal(derived.held_out("code", 1001, 0.2), held)
    assert len(stages) == 2


def test_a_run_whose_file_changes_saves_and_stops(tmp_path: Path) -> None:
    """At the next save if its bytes were not needed yet; at the read if they were."""
    with job_of(tmp_path, "out", *job_hooks(2)) as job:
        (path,) = (tmp_path / "prepared").rglob("*.train.bin")
        job.step()
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        with pytest.raises(DataError, match=r"train\.bin was written to.*saved .*step-0*2"):
            job.train()
    job = job_of(tmp_path, "out")
    path = job.loader.prepared.train[0].corpus.dataset.bin
    poke(path, 0, b"!" * path.stat().st_size)
    with pytest.raises(DataError, match=r"train\.bin: bytes"):
        job.train()
    assert job.step_number == 2
    job.close()


def job_hooks(every: int) -> tuple[Any, ...]:
    """Return the hook of a run that saves at every so many steps."""
    from moefold.training.hooks.data import DataFilesHook

    return (DataFilesHook(every),)


def test_other_bytes_of_indexed_tokens_are_another_run(tmp_path: Path) -> None:
    data = indexed_data(tmp_path)
    raw = {"data": data.model_dump(mode="json", by_alias=True), "model": {"family": "qwen3_moe"}}
    raw["model"] = run_of(tmp_path).model.model_dump(mode="json", by_alias=True)
    with job_of(tmp_path, "out", **raw) as job:
        job.last_step = 2
        job.train()
    with job_of(tmp_path, "out", **raw) as job:
        assert job.step_number == 2
    middle = (tmp_path / "theirs.bin").stat().st_size // 2
    poke(tmp_path / "theirs.bin", middle, b"\1\0\1\0")
    with pytest.raises(ValueError, match="tokens or the tokenizer differ"):
        job_of(tmp_path, "out", **raw)


def test_the_number_of_open_files_is_known_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [300, 1000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(2), new))
    files.reserve_handles(20, "data.train")
    assert limits == [300, 1000]
    files.reserve_handles(400, "data.train")
    assert limits == [656, 1000]
    with pytest.raises(ValueError, match=r"data\.train need 2256 open files .* allows 1000"):
        files.reserve_handles(2000, "data.train")
