"""Tokenizers: exact round trips, exact counts of bytes, nothing cut or lost."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from moefold.data.config import BpeTokenizer, DataError, FileTokenizer, read_vocab_size
from moefold.data.tokenizer import (
    END,
    Tokenizer,
    from_path,
    from_record,
    load,
    parallel_encoding,
    train,
)
from tests import hostile

TEXT = [
    "def add(a, b):\n    return a + b\n" * 40,
    "class Queue:\n    def push(self, item): self.items.append(item)\n" * 30,
    "naïve — 😀\t" * 9,
    "what a reader sees first is what a writer should have written last\n" * 5,
]


def sample(size: int) -> Iterator[str]:
    yield from TEXT


def trained(vocab: int = 320) -> Tokenizer:
    return train(BpeTokenizer(vocab=vocab), sample)


TRAINED = trained()


@settings(max_examples=150, deadline=None, database=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back_exactly_and_every_byte_is_counted(text: str) -> None:
    ids = TRAINED.encode(text)
    assert TRAINED.decode(ids) == text
    assert b"".join(TRAINED.token_bytes[i] for i in ids) == text.encode()
    assert TRAINED.n_bytes_V[ids].sum() == len(text.encode())


def test_a_document_has_a_start_and_an_end_of_no_bytes() -> None:
    (ids,) = TRAINED.encode_documents(["x = 1"])
    assert ids[0] == ids[-1] == TRAINED.end_id == TRAINED.start_id == 0
    assert TRAINED.n_bytes_V[ids].sum() == 5 and TRAINED.n_bytes_V[0] == 0
    assert TRAINED.encode_prompt("x = 1") == ids[:-1].tolist()
    assert TRAINED.decode(ids.tolist()) == "x = 1"


def test_text_that_looks_like_a_special_token_stays_text() -> None:
    text = f"a {END} b"
    ids = TRAINED.encode(text)
    assert 0 not in ids and TRAINED.decode(ids) == text
    assert 0 not in TRAINED.encode_documents([text])[0][1:-1]


def test_the_vocabulary_is_as_asked_and_small_text_gives_less() -> None:
    assert trained(300).size == trained(300).vocab == 300
    few = trained(5000)
    assert few.size < 500 and few.vocab == 5000
    assert len(few.token_bytes) == len(few.n_bytes_V) == 5000


def test_the_same_text_trains_the_same_tokenizer() -> None:
    assert trained().text == TRAINED.text and trained().fingerprint == TRAINED.fingerprint
    assert trained(310).fingerprint != TRAINED.fingerprint


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    few = trained(5000)
    few.save(tmp_path / "tokenizer.json")
    for again in (load(tmp_path / "tokenizer.json"), from_path(str(tmp_path))):
        assert again.fingerprint == few.fingerprint
        assert again.encode(TEXT[0]) == few.encode(TEXT[0])
        assert (again.start_id, again.end_id) == (few.start_id, few.end_id)
    assert load(tmp_path / "tokenizer.json").vocab == 5000


def test_the_fingerprint_does_not_see_the_layout_of_the_file() -> None:
    spaced = json.dumps(json.loads(TRAINED.text), indent=4)
    assert Tokenizer(spaced, END, END).fingerprint == TRAINED.fingerprint
    assert Tokenizer(spaced, END, "").fingerprint != TRAINED.fingerprint


def pieces_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer of SentencePiece's kind: ``▁`` for spaces, bytes for what is unknown."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": b + 3 for b in range(256)}
    for piece in ("▁", "b", "c", "#", "##"):
        vocab[piece] = len(vocab)
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("#", "#")], unk_token="<unk>", byte_fallback=True)
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


def test_bytes_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    pieces_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )
    found = from_path(str(tmp_path))
    assert (found.start, found.end) == (None, "</s>")  # named, but nothing adds it
    text = "bc ## b\nü"
    ids = found.encode(text)
    assert b"".join(found.token_bytes[i] for i in ids) == text.encode()
    assert found.n_bytes_V[[1, 2]].tolist() == [0, 0]


def test_settings_stored_in_a_file_cut_and_pad_nothing(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_str(TRAINED.text)
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END} $A {END}", special_tokens=[(END, 0)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    found = from_record(FileTokenizer(path=str(tmp_path)), sample)
    assert found.decode(found.encode(TEXT[0])) == TEXT[0]
    for text in (TEXT[1], "x = 1"):
        (ids,), (own,) = (t.encode_documents([text]) for t in (found, TRAINED))
        assert ids.tolist() == own.tolist()


def test_a_normalizer_shows_in_the_bytes(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_str(TRAINED.text)
    inner.normalizer = normalizers.NFC()
    found = Tokenizer(inner.to_str(), END, END)
    assert found.n_bytes_V[found.encode("e\u0301")].sum() == 2  # é in one piece; the text has 3


def test_which_token_ends_a_document(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(TRAINED.text, encoding="utf-8")
    assert from_path(str(file)).end == END
    assert from_path(str(file), start="").start_id is None
    with pytest.raises(DataError, match=r"tokenizer\.json: has no token '</doc>'"):
        from_path(str(file), end="</doc>")
    bare = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    bare.save(str(file))
    with pytest.raises(DataError, match="has no known end token"):
        from_path(str(file))


@pytest.mark.parametrize("content", [b"{}", b'{"model": 3}', b"\xff\xfe", b"not json"])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json(: | is not JSON)"):
        from_path(str(file), end="x")


@pytest.mark.parametrize(
    ("before", "inside", "after"), [(None, "true", "false"), ("false", "false", "false")]
)
def test_parallelism_is_on_inside_and_quiet_afterwards(
    monkeypatch: pytest.MonkeyPatch, before: str | None, inside: str, after: str
) -> None:
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    with parallel_encoding():
        assert os.environ[name] == inside
    assert os.environ[name] == after


@settings(max_examples=200, deadline=None, database=None)
@given(hostile.tokenizers(trained(300).text))
def test_a_damaged_file_is_an_error_that_names_it_and_nothing_else_is_said(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, stderr_of_the_process() as said:
        file = Path(folder) / "tokenizer.json"
        file.write_bytes(content)
        try:
            demanded = read_vocab_size(file)
            found = from_path(folder, end=END)
            ids = found.encode("naïve ab " + END)
            found.decode(ids)
            found.encode_documents(["a b", ""])
            assert len(found.token_bytes) == len(found.n_bytes_V) <= demanded
        except DataError as error:
            assert str(file) in str(error)
        except UnicodeEncodeError:
            pass
    assert said == [b""]


def test_an_added_token_under_an_id_of_another_gets_one_of_its_own(tmp_path: Path) -> None:
    content = json.loads(trained(300).text)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 5, "content": "<new>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = from_path(str(tmp_path), end=END)
    assert read_vocab_size(tmp_path / "tokenizer.json") == len(found.token_bytes) == 301


def test_what_others_say_meanwhile_is_not_lost(tmp_path: Path, monkeypatch) -> None:
    class Chatty:
        def encode(self, *_: object, **__: object) -> None:
            os.write(2, b"a warning")
            raise LookupError

    found = trained(300)
    monkeypatch.setattr(found, "_backend", Chatty())
    with stderr_of_the_process() as said, pytest.raises(LookupError):
        found.encode("a")
    assert said == [b"a warning"]


def test_a_file_written_anew_is_counted_anew(tmp_path: Path) -> None:
    file, sizes = tmp_path / "tokenizer.json", []
    for number, vocab in enumerate((300, 280)):
        file.write_text(trained(vocab).text)
        os.utime(file, (number, number))
        sizes.append(FileTokenizer(path=str(file)).vocab_size())
    assert sizes == [300, 280]


@pytest.mark.parametrize("highest", [1 << 24, 1 << 31])
def test_ids_beyond_any_model_are_refused(tmp_path: Path, highest: int) -> None:
    content = json.loads(trained(300).text)
    content["added_tokens"].append({**content["added_tokens"][0], "id": highest, "content": "x"})
    content["model"]["vocab"]["x"] = highest
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    for read in (lambda: read_vocab_size(file), lambda: from_path(str(file))):
        with pytest.raises(DataError, match=rf"tokenizer.json: has the id {highest}"):
            read()


@contextmanager
def stderr_of_the_process() -> Iterator[list[bytes]]:
    """Give what is written to the descriptor, past Python too, once the context is left."""
    said: list[bytes] = []
    before = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            said.append(held.read())
