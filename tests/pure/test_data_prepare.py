"""Preparing data: every byte accounted for, made once, refused where it cannot be right."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefold.cli.data import inspect
from moefold.config.load import load
from moefold.config.plugins import import_plugins
from moefold.data.baselines import compute_baselines
from moefold.data.config import SOURCE, Data, DataError
from moefold.data.corpora.ahead import map_ahead
from moefold.data.index import IndexedDataset, IndexWriter
from moefold.data.prepare import PreparedData, PreparedPart, prepare

WORDS = ("queue", "class", "return", "none", "when", "empty", "and", "raises", "else", "a", "of")


def corpus(folder: Path, documents: int = 60, seed: int = 1) -> list[str]:
    """Write documents of random words as JSON lines and return them."""
    chance = np.random.default_rng(seed)
    texts = [" ".join(chance.choice(WORDS, size=chance.integers(5, 60))) for _ in range(documents)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return texts


def described(folder: Path, **changes: Any) -> Data:
    raw = {
        "seq": 16,
        "tokenizer": {"kind": "bpe", "vocab": 300},
        "train": [{"source": "jsonl", "files": [f"{folder}/a.jsonl"], "holdout": 0.2}],
    }
    return load(Data, raw | changes).record


def texts_of(part: PreparedPart, prepared: PreparedData) -> list[str]:
    documents = [part.corpus.document(i) for i in range(part.corpus.n_documents)]
    return [prepared.tokenizer.decode(ids.tolist()) for ids in documents]


def test_every_document_is_on_one_side_and_every_byte_is_counted(tmp_path: Path) -> None:
    texts = corpus(tmp_path)
    prepared = prepare(described(tmp_path), tmp_path / "out")
    (train,), (valid,) = prepared.train, prepared.valid
    seen, held = texts_of(train, prepared), texts_of(valid, prepared)
    assert sorted(seen + held) == sorted(texts) and 3 < len(held) < 25
    assert held == [t for t in texts if t in set(held)]
    for part, found in ((train, seen), (valid, held)):
        assert part.n_bytes == sum(len(t.encode()) for t in found) and part.byte_ratio == 1.0


def test_the_side_depends_on_the_text_alone(tmp_path: Path) -> None:
    texts = corpus(tmp_path)
    before = prepare(described(tmp_path), tmp_path / "out")
    lines = [json.dumps({"text": text, "n": 1}) for text in reversed(texts * 2)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    after = prepare(described(tmp_path), tmp_path / "out")
    held = [set(texts_of(p.valid[0], p)) for p in (before, after)]
    assert held[0] == held[1]
    assert not held[1] & set(texts_of(after.train[0], after))


READER = """
from typing import Literal
from moefold.data.config import SOURCE, Jsonl
from moefold.data.corpora.sources import Document, JsonlReader

class Reader(JsonlReader):
    def documents(self, skipped):
        for name, text in super().documents(skipped):
            yield Document(name, text.MADE())

@SOURCE.register
class Cased(Jsonl):
    source: Literal["cased"] = "cased"
    owner = Reader
"""


def test_a_source_whose_code_has_changed_is_prepared_anew(tmp_path: Path) -> None:
    """Not where its file was moved: what counts is its content."""
    texts, part = corpus(tmp_path), tmp_path / "part.py"
    source = {"source": "cased", "files": [f"{tmp_path}/a.jsonl"]}
    found = list[PreparedData]()
    for place, made in ((part, "upper"), (part, "lower"), (tmp_path / "moved.py", "lower")):
        place.write_text(READER.replace("MADE", made))
        SOURCE.kinds.pop("cased", None)  # as if in another process
        import_plugins([place])
        found.append(prepare(described(tmp_path, train=[source]), tmp_path / "out"))
    del SOURCE.kinds["cased"]
    assert texts_of(found[0].train[0], found[0]) == [text.upper() for text in texts]
    assert texts_of(found[1].train[0], found[1]) == [text.lower() for text in texts]
    assert found[1].folder == found[2].folder != found[0].folder


def test_made_once_and_found_again(tmp_path: Path) -> None:
    corpus(tmp_path)
    told: list[str] = []
    first = prepare(described(tmp_path), tmp_path / "out", lambda what, *_: told.append(what))
    assert set(told) == {"training the tokenizer", "encoding jsonl"}
    told.clear()
    again = prepare(described(tmp_path), tmp_path / "out", lambda what, *_: told.append(what))
    assert told == [] and again.fingerprint() == first.fingerprint()
    assert again.folder == first.folder
    # What does not change the tokens does not make them again.
    same = described(tmp_path).model_dump()
    same["train"][0]["weight"], same["seq"] = 3.0, 32
    assert prepare(load(Data, same).record, tmp_path / "out").folder == first.folder
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_changed_data_is_made_again_and_has_another_fingerprint(tmp_path: Path) -> None:
    corpus(tmp_path, seed=1)
    before = prepare(described(tmp_path), tmp_path / "out")
    corpus(tmp_path, seed=2)
    after = prepare(described(tmp_path), tmp_path / "out")
    assert after.folder != before.folder and after.fingerprint() != before.fingerprint()


def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    """What was made of them could never be made again, and no run on it could go on."""
    corpus(tmp_path)
    file = tmp_path / "a.jsonl"

    def grow(what: str, done: int, total: int) -> None:
        if what.startswith("encoding"):
            file.write_text(file.read_text(encoding="utf-8") + '\n{"text": "one more"}')

    with pytest.raises(DataError, match="changed while they were read"):
        prepare(described(tmp_path), tmp_path / "out", grow)
    assert not (tmp_path / "out").exists()
    prepare(described(tmp_path), tmp_path / "out")


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "other"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    corpus(tmp_path)
    first = prepare(described(tmp_path), tmp_path / "out")
    file = first.train[0].corpus.dataset.bin
    before = file.read_bytes()
    if damage == "cut":
        file.write_bytes(before[:-1])
    elif damage == "flipped":
        file.write_bytes(bytes([before[0] ^ 1]) + before[1:])
    elif damage == "gone":
        (first.folder / "manifest.json").unlink()
    else:
        with IndexWriter(file, 300) as writer:
            writer.add([1, 2, 3])
    again = prepare(described(tmp_path), tmp_path / "out")
    assert again.fingerprint() == first.fingerprint()
    assert file.read_bytes() == before


def test_what_is_prepared_in_scratch_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    corpus(tmp_path)
    made = prepare(described(tmp_path), tmp_path / "out", scratch=tmp_path / "scratch")
    assert made.folder.parent == tmp_path / "scratch" and not (tmp_path / "out").exists()
    kept = prepare(described(tmp_path), tmp_path / "out")
    found = prepare(described(tmp_path), tmp_path / "out", scratch=tmp_path / "none")
    assert found.folder == kept.folder and not (tmp_path / "none").exists()
    (kept.folder / "manifest.json").write_text("{}")
    again = prepare(described(tmp_path), tmp_path / "out", scratch=tmp_path / "scratch")
    assert again.folder == made.folder and kept.folder.is_dir()


def test_a_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        prepare(described(tmp_path), tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.jsonl"]


KILLED = """
import os, sys
from pathlib import Path
from tests.pure.test_data_prepare import described, prepare
folder = Path(sys.argv[1])
print("ready", flush=True)
prepare(described(folder), folder / "out", lambda *_: eval(sys.argv[2]))
"""


def test_what_a_killed_preparation_leaves_goes_with_the_next(tmp_path: Path) -> None:
    corpus(tmp_path)
    out = tmp_path / "out"

    def started(then: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", KILLED, str(tmp_path), then]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with started("os.kill(os.getpid(), 9)") as dead:
        assert dead.wait() == -9
    assert len(left := list(out.iterdir())) == 1 and left[0].name.startswith(".preparing-")
    # One at work keeps its draft, and what may be the dead one's, until it is done.
    with started("print('at work', flush=True) or sys.stdin.readline()") as alive:
        assert alive.stdout is not None and alive.stdin is not None
        assert [alive.stdout.readline() for _ in range(2)] == ["ready\n", "at work\n"]
        assert not left[0].exists() and len(drafts := list(out.iterdir())) == 1
        made = prepare(described(tmp_path), out).folder
        assert set(out.iterdir()) == {made, *drafts}
        alive.stdin.close()
        assert alive.wait() == 0
    assert list(out.iterdir()) == [made]


def test_what_is_left_out_is_reported(tmp_path: Path) -> None:
    corpus(tmp_path)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('\n{"text": ""}\n{"text": null}\n')
    raw = described(tmp_path).model_dump()
    raw["train"][0]["bad"] = "skip"
    for _ in range(2):  # told again when the files are only opened
        prepared = prepare(load(Data, raw).record, tmp_path / "out")
        counts = {reason: r["count"] for reason, r in prepared.skipped["jsonl"].items()}
        assert counts == {"empty": 1, "field 'text' is not text": 1}


NOTHING: dict[str, tuple[str, float, str]] = {
    "no documents": ("", 0.0, "has no document with text"),
    "only empty ones": ('{"text": ""}', 0.0, "has no document with text"),
    "holdout of one": ('{"text": "a b c"}', 1e-9, "takes none of its 1 documents"),
}


def test_a_holdout_that_takes_nothing_is_told_which_takes_one(tmp_path: Path) -> None:
    lines = (json.dumps({"text": f"document {n}"}) for n in range(20))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    raw = described(tmp_path).model_dump()
    raw["train"][0]["holdout"] = 1e-9
    with pytest.raises(DataError, match=r"none of its 20 documents; 0\.\d\d? takes one") as refused:
        prepare(load(Data, raw).record, tmp_path / "out")
    named = re.search(r"; (\S+) takes one", str(refused.value))
    assert named is not None
    raw["train"][0]["holdout"] = float(named[1])
    prepared = prepare(load(Data, raw).record, tmp_path / "out")
    (held_out,) = prepared.valid
    assert 1 <= held_out.corpus.n_documents <= 3


@pytest.mark.parametrize("name", NOTHING)
def test_a_source_that_gives_nothing_is_refused(tmp_path: Path, name: str) -> None:
    content, holdout, said = NOTHING[name]
    (tmp_path / "a.jsonl").write_text(content)
    raw = described(tmp_path).model_dump()
    raw["train"][0]["holdout"] = holdout
    with pytest.raises(DataError, match=f"source jsonl: .*{said}"):
        prepare(load(Data, raw).record, tmp_path / "out")


def ready(tmp_path: Path) -> tuple[PreparedData, dict[str, Any]]:
    """Prepare a corpus, and describe its training tokens as a ready token file."""
    corpus(tmp_path)
    made = prepare(described(tmp_path), tmp_path / "out")
    prefix = made.train[0].corpus.dataset.bin.with_suffix("")
    return made, {
        "seq": 16,
        "tokenizer": {"kind": "file", "path": str(made.folder)},
        "train": [{"source": "indexed", "prefix": str(prefix), "holdout": 0.3}],
    }


def test_token_files_are_used_where_they_lie(tmp_path: Path) -> None:
    made, raw = ready(tmp_path)
    prepared = prepare(load(Data, raw).record, tmp_path / "other")
    (train,), (valid,) = prepared.train, prepared.valid
    assert train.corpus.n_documents + valid.corpus.n_documents == made.train[0].corpus.n_documents
    assert sorted(texts_of(train, prepared) + texts_of(valid, prepared)) == sorted(
        texts_of(made.train[0], made)
    )
    assert train.corpus.dataset.bin == made.train[0].corpus.dataset.bin
    raw["train"][0]["holdout"] = 0.0
    whole = prepare(load(Data, raw).record, tmp_path / "other")
    assert whole.train[0].n_bytes == made.train[0].n_bytes and whole.valid == ()


def test_another_tokenizer_than_the_files_is_refused_unless_allowed(tmp_path: Path) -> None:
    made, raw = ready(tmp_path)
    other = made.tokenizer.text.replace('"unk_token":null', '"unk_token":"!"')
    assert other != made.tokenizer.text
    (tmp_path / "tokenizer.json").write_text(other, encoding="utf-8")
    raw["tokenizer"]["path"] = str(tmp_path)
    with pytest.raises(DataError, match=r"were made by the tokenizer .* other_tokenizer: allow"):
        prepare(load(Data, raw).record, tmp_path / "other")
    (kept,) = (tmp_path / "other").iterdir()
    (kept / "mark").touch()
    with pytest.raises(DataError, match="were made by the tokenizer"):
        prepare(load(Data, raw).record, tmp_path / "other")
    assert (kept / "mark").exists(), "what was made beside them is whole, and stays"
    raw["train"][0]["other_tokenizer"] = "allow"
    prepare(load(Data, raw).record, tmp_path / "other")


def test_a_missing_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    data = described(tmp_path, train=[{"source": "parquet", "files": ["x"]}])
    with pytest.raises(DataError, match=r"source parquet: needs pyarrow.*pip install pyarrow"):
        prepare(data, tmp_path / "out")


def test_inspect_finds_a_flipped_bit(tmp_path: Path) -> None:
    corpus(tmp_path)
    prepared = prepare(described(tmp_path), tmp_path / "out")
    file = prepared.train[0].corpus.dataset.bin
    found = inspect(file, prepared.tokenizer)
    assert found["as_written"] is True and found["empty"] == 0
    assert found["tokens"] == prepared.train[0].corpus.n_tokens == found["said"]["tokens"]
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    assert inspect(file)["as_written"] is False


def test_inspect_names_an_id_that_is_no_token(tmp_path: Path) -> None:
    corpus(tmp_path)
    tokenizer = prepare(described(tmp_path), tmp_path / "out").tokenizer
    with IndexWriter(tmp_path / "x", 60_000) as writer:
        for ids in ([1, 2], [3, tokenizer.size, 4]):
            writer.add(ids)
    assert inspect(tmp_path / "x")["highest"] == tokenizer.size
    with pytest.raises(DataError, match=rf"document 1, position 1: token id {tokenizer.size} "):
        inspect(tmp_path / "x", tokenizer)


def test_inspect_an_empty_file(tmp_path: Path) -> None:
    with IndexWriter(tmp_path / "x", 300):
        pass
    found = inspect(tmp_path / "x")
    facts = [found[name] for name in ("documents", "tokens", "lowest", "shortest", "as_written")]
    assert facts == [0, 0, -1, 0, None]
    assert IndexedDataset(tmp_path / "x").read(0, 0).tolist() == []


def rewritten(folder: Path) -> PreparedData:
    """Prepare text of which the tokenizer's normalizer makes other text."""
    made, _ = ready(folder)
    content = json.loads(made.tokenizer.text)
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "queue"}, "content": "q"}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    data = described(folder, tokenizer={"kind": "file", "path": str(folder)})
    return prepare(data, folder / "out")


def test_a_tokenizer_that_rewrites_text_is_weighed_by_the_text(tmp_path: Path) -> None:
    """Bits per byte are per byte of the text, whatever a normalizer makes of it."""
    prepared = rewritten(tmp_path)
    part = prepared.train[0]
    spelt = prepared.tokenizer.n_bytes_V[part.corpus.dataset.read(0, part.corpus.n_tokens)].sum()
    assert part.byte_ratio > 1 and spelt * part.byte_ratio == pytest.approx(part.n_bytes)


def test_baselines_without_held_out_text_say_what_to_do(tmp_path: Path) -> None:
    corpus(tmp_path)
    prepared = replace(prepare(described(tmp_path), tmp_path / "out"), valid=())
    with pytest.raises(DataError, match="set holdout on a source"):
        compute_baselines(prepared)


@pytest.mark.parametrize("plain", [True, False])
def test_baselines_equal_a_plain_count(tmp_path: Path, plain: bool) -> None:
    corpus(tmp_path)
    prepared = prepare(described(tmp_path), tmp_path / "out") if plain else rewritten(tmp_path)
    found = compute_baselines(prepared)
    size = prepared.tokenizer.size
    for value, order, unit in (
        (found["bigram"], 1, "token"),
        (found["byte_bigram"], 1, "byte"),
        (found["byte_trigram"], 2, "byte"),
    ):
        sides = []
        for part in (prepared.train[0], prepared.valid[0]):
            documents = [part.corpus.document(i).tolist() for i in range(part.corpus.n_documents)]
            if unit == "byte":
                documents = [list(prepared.tokenizer.decode(ids).encode()) for ids in documents]
            sides.append(documents)
        bits = _charge(*sides, order, size if unit == "token" else 256, unit == "byte")
        assert value == pytest.approx(bits / prepared.valid[0].n_bytes)
    assert 0.5 < found["xz"] < found["byte_bigram"]


def _charge(seen: list, held: list, order: int, vocab: int, first: bool) -> float:
    """Bits of the held-out documents under add-one counts, kept in dictionaries."""
    pairs: dict[tuple, int] = {}
    contexts: dict[tuple, int] = {}
    for ids in seen:
        for i in range(order, len(ids)):
            context = tuple(ids[i - order : i])
            contexts[context] = contexts.get(context, 0) + 1
            pairs[(*context, ids[i])] = pairs.get((*context, ids[i]), 0) + 1
    bits = 0.0
    for ids in held:
        bits += 8.0 * order if first else 0.0
        for i in range(order, len(ids)):
            context = tuple(ids[i - order : i])
            chance = (pairs.get((*context, ids[i]), 0) + 1) / (contexts.get(context, 0) + vocab)
            bits -= np.log2(chance)
    return float(bits)


def test_documents_keep_their_order_whatever_the_threads() -> None:
    """Batches that take longer than the next ones, and one that fails."""
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(20):
            taken.append(i)
            yield i

    def slow_first(i: int) -> int:
        time.sleep(0.01 * (i % 3 == 0))
        return i

    found = []
    for i in map_ahead(slow_first, items()):
        found.append(i)
        assert len(taken) <= i + 3  # no more than two are ahead of their use
    assert found == list(range(20))

    def fails(i: int) -> int:
        if i == 4:
            raise DataError("the fifth")
        return i

    found = []
    with pytest.raises(DataError, match="the fifth"):
        found.extend(map_ahead(fails, range(20)))
    assert found == [0, 1, 2, 3]
