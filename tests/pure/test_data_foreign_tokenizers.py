"""Tokenizers of other libraries: converted with their ids, proved, or refused."""

import base64
import io
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from moefold.cli.main import main
from moefold.config.load import load
from moefold.data import foreign_tokenizers
from moefold.data.config import DataError, FileTokenizer
from moefold.data.foreign_tokenizers import PATTERNS, convert_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

LINES = [
    *(Path(json.__file__).with_name("decoder.py").read_text("utf-8").splitlines()),
    "naïve café — “quoted” ＡＢＣ ﬁ",
    "日本語のテキスト 中文字符",
    "Привет, мир! <s> a </s>",
]
IDENTITY: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
SPM: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe"},
    "like llama": {"model_type": "bpe", "byte_fallback": True, "split_digits": True, **IDENTITY},
    "like gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<mask>", "\n", "\n\n", "▁▁", "<start_of_turn>"],
        **IDENTITY,
    },
    "case folded": {"model_type": "bpe", "normalization_rule_name": "nfkc_cf"},
    "extra spaces removed": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "unigram": {"model_type": "unigram"},
    "unigram of words": {"model_type": "unigram", "user_defined_symbols": ["<sep>", "foo bar"]},
    "unigram, plain": {"model_type": "unigram", **IDENTITY},
}


def trained(file: Path, **fields: Any) -> Path:
    """Write a SentencePiece file."""
    out = io.BytesIO()
    sizes = {"vocab_size": 620, "minloglevel": 3, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=out, **sizes, **fields
    )
    file.write_bytes(out.getvalue())
    return file


def byte_ranks() -> dict[bytes, int]:
    """Ranks of all bytes, and of merges of common pairs."""
    ranks = {bytes([b]): b for b in range(256)}
    text = "\n".join(LINES)
    before = 0
    # Common pairs that the pattern keeps apart never become one: in the end nothing is new.
    while before < len(ranks) <= 700:
        before = len(ranks)
        encoding = tiktoken.Encoding(
            "t", pat_str=PATTERNS["cl100k"][0], mergeable_ranks=ranks, special_tokens={}
        )
        parts = [encoding.decode_single_token_bytes(i) for i in encoding.encode_ordinary(text)]
        pairs: dict[bytes, int] = {}
        for left, right in pairwise(parts):
            pairs[left + right] = pairs.get(left + right, 0) + 1
        for pair in sorted(pairs, key=lambda p: (-pairs[p], p))[:20]:
            ranks.setdefault(pair, len(ranks))
    return ranks


RANKS = byte_ranks()


def tiktoken_file(file: Path, ranks: dict[bytes, int] | None = None, more: str = "") -> Path:
    entries = (RANKS if ranks is None else ranks).items()
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in entries)
    file.write_text("".join(lines) + more)
    return file


def tekken_file(file: Path, **changes: Any) -> Path:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in RANKS.items()
    ]
    config = {
        "pattern": PATTERNS["o200k"][0],
        "default_vocab_size": 400 + 30,
        "default_num_special_tokens": 30,
        "version": "v3",
    }
    file.write_text(json.dumps({"config": config, "vocab": vocab} | changes))
    return file


def ids_of(text: str) -> Callable[[str], list[int]]:
    converted = tokenizers.Tokenizer.from_str(text)
    return lambda sample: converted.encode(sample, add_special_tokens=False).ids


@pytest.mark.parametrize("case", SPM)
def test_sentencepiece_files_give_their_library_s_ids(tmp_path: Path, case: str) -> None:
    file = trained(tmp_path / "tokenizer.model", **SPM[case])
    library = sentencepiece.SentencePieceProcessor(model_file=str(file))
    text = convert_tokenizer(file)
    ids = ids_of(text)
    for sample in [*LINES, "  two  spaces \t tab ", "unknown ☃ 🎉", "x" * 50, "\n\n  \n"]:
        if "<s>" not in sample:  # there the text of a special token, here the token
            assert ids(sample) == library.encode(sample), sample
    converted = tokenizers.Tokenizer.from_str(text)
    assert converted.get_vocab_size() == library.get_piece_size()
    for i in range(library.get_piece_size()):
        assert converted.id_to_token(i) == library.id_to_piece(i)
    plain = "plain words, 123"
    assert converted.decode(ids(plain)) == library.decode(library.encode(plain))


@pytest.mark.parametrize("pattern", [*PATTERNS, r"\s+|\S+"])
def test_tiktoken_files_give_their_library_s_ids(tmp_path: Path, pattern: str) -> None:
    file = tiktoken_file(tmp_path / "a.tiktoken")
    regex = PATTERNS.get(pattern, (pattern, {}))[0]
    library = tiktoken.Encoding("t", pat_str=regex, mergeable_ranks=RANKS, special_tokens={})
    ids = ids_of(convert_tokenizer(file, pattern))
    for sample in [*LINES, "unknown ☃ 🎉", "x" * 50, "1234567 it'S"]:
        assert ids(sample) == library.encode_ordinary(sample), sample


def test_tekken_files_have_special_tokens_first_and_a_cut_vocabulary(tmp_path: Path) -> None:
    file = tekken_file(tmp_path / "tekken.json")
    ranks = {token: rank for token, rank in RANKS.items() if rank < 400}
    pattern = PATTERNS["o200k"][0]
    library = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    text = convert_tokenizer(file)
    ids = ids_of(text)
    for sample in LINES[:-1]:
        assert ids(sample) == [rank + 30 for rank in library.encode_ordinary(sample)]
    converted = tokenizers.Tokenizer.from_str(text)
    assert converted.get_vocab_size() == 430 and converted.token_to_id("</s>") == 2
    assert converted.token_to_id("<SPECIAL_29>") == 29
    assert ids("<s>a") == [1, *ids("a")]
    listed = [
        {"rank": 0, "token_str": "<unk>", "is_control": True},
        {"rank": 7, "token_str": "[X]"},
    ]
    (tmp_path / "b").mkdir()
    text = convert_tokenizer(tekken_file(tmp_path / "b" / "tekken.json", special_tokens=listed))
    converted = tokenizers.Tokenizer.from_str(text)
    assert converted.token_to_id("[X]") == 7 and converted.token_to_id("</s>") is None


BAD_FILES: dict[str, tuple[str, str]] = {
    "not one": ("hello there", "is neither a SentencePiece nor a tiktoken file; get a new copy"),
    "empty": ("", "is neither a SentencePiece nor a tiktoken file"),
    "a bad line": ("IQ== 0\nIg= 1\n", r":2: is not base64 and a rank"),
    "no rank": ("IQ== 0\nIg==\n", r":2: is not base64 and a rank"),
    "a token twice": ("IQ== 0\nIg== 1\nIQ== 2\n", r":3: the token b'!' occurs twice"),
    "a rank twice": ("IQ== 0\n\nIg== 0\n", r":3: has the rank 0 of line 1"),
    "no bytes": ("IQ== 0\nIg== 1\n", "has no token for the byte 0"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path, case: str) -> None:
    content, said = BAD_FILES[case]
    (tmp_path / "tokenizer.model").write_text(content)
    began = time.process_time()
    with pytest.raises(DataError, match=rf"tokenizer\.model:? ?{said}"):
        convert_tokenizer(tmp_path / "tokenizer.model", "cl100k")
    assert time.process_time() - began < 2


def test_what_cannot_be_converted_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case, fields, said in (
        ("char", {"model_type": "char", "vocab_size": 120}, "its model is of words or characters"),
        (
            "suffix",
            {"model_type": "bpe", "treat_whitespace_as_suffix": True},
            "white space follows",
        ),
    ):
        file = tmp_path / f"{case}.model"
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_writer=out,
            minloglevel=3,
            hard_vocab_limit=False,
            **{"vocab_size": 620, **fields},
        )
        file.write_bytes(out.getvalue())
        with pytest.raises(DataError, match=rf"{said}.*AutoTokenizer\.from_pretrained"):
            convert_tokenizer(file)
    file = tiktoken_file(tmp_path / "a.tiktoken")
    with pytest.raises(DataError, match=r"set --pattern to r50k, cl100k, o200k, qwen or a regular"):
        convert_tokenizer(file)
    with pytest.raises(DataError, match=r"the pattern '\(' cannot be used"):
        convert_tokenizer(file, "(")
    tekken = tekken_file(tmp_path / "tekken.json", vocab=[{"rank": 0}])
    with pytest.raises(DataError, match=r"tekken\.json: .*is damaged"):
        convert_tokenizer(tekken)
    # A conversion that gives other ids is noticed by its proof.
    monkeypatch.setattr(foreign_tokenizers, "_spaces", lambda *_: {})
    bpe = trained(tmp_path / "b.model", model_type="bpe")
    with pytest.raises(DataError, match=r"cannot be converted exactly: .* is \[.*, converted \["):
        convert_tokenizer(bpe)


def test_a_folder_without_tokenizer_json_says_the_command_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trained(tmp_path / "tokenizer.model", model_type="bpe")
    record = load(FileTokenizer, {"kind": "file", "path": str(tmp_path)}).record
    with pytest.raises(DataError, match=r"convert it with: moefold data tokenizer \S+\.model"):
        record.vocab_size()
    assert main(["data", "tokenizer", str(file)]) == 0
    assert "tokenizer.json" in capsys.readouterr().out
    library = sentencepiece.SentencePieceProcessor(model_file=str(file))
    assert record.vocab_size() == library.get_piece_size()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    assert main(["data", "tokenizer", str(file)]) == 2
    assert "tokenizer.json: exists" in capsys.readouterr().err
