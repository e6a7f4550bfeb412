"""Tokenizers of other libraries as a ``tokenizer.json``: SentencePiece, tiktoken and tekken files.

A conversion is proved on text: the library itself and the converted tokenizer must give the same
ids for every token's text, for strings of random tokens, and for strings that are often wrong. A
file whose conversion differs is refused. SentencePiece files are read with ``sentencepiece``, and
tiktoken and tekken files with ``tiktoken``.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from moefold.data.config import BYTES, TEKKEN, DataError
from moefold.files import read_json, write_json, write_text

_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER = 4
_UNUSED = 5
"""Types of pieces in a SentencePiece file."""
_UNIGRAM = 1
_BPE = 2
_STARTS = ("<s>", "<bos>")
_ENDS = ("</s>", "<eos>", "<|endoftext|>")
_MAX_BYTES = 1 << 26
_NEVER = -100.0
"""Score of pieces that text does not contain: lower than that of any other."""
_PROOF_STRINGS = 2000
_SPACE = "\u2581"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"
PATTERNS: dict[str, tuple[str, dict[str, int]]] = {
    "r50k": (
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        {_END: 50256},
    ),
    "cl100k": (
        _CL100K,
        {
            _END: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k": (_O200K, {_END: 199999, "<|endofprompt|>": 200018}),
    "qwen": (_CL100K.replace(r"\p{N}{1,3}", r"\p{N}"), {}),
}
"""What splits text into words, and special tokens, by the names that tiktoken gives them."""
_TEKKEN_SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
"""Special tokens of tekken files that do not list them; the others are ``<SPECIAL_N>``."""
_HARD = (
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "  a  b   c    ",
    "a\nb\n\nc\r\nd\te",
    "\n",
    " \n ",
    "it's I'LL we'Ve don't",
    "0123456789 3.14 1,000,000 ½ ² ٣",
    "def f(x):\n    return x + 1  # ok\n",
    "naïve café e\u0301 Å ﬁ ℌ ① ™",
    "日本語のテキスト。中文字符 한국어",
    "Привет, мир! שלום العربية",
    "👩‍👩‍👧 🇩🇪 😀😀",
    "\u00a0\u2003\u3000x\u200by",
    "▁a ▁ ▁▁",
    "…—“quoted” ‘it’",
    "\x00\x01\x7f\ufeff",
    "http://a.b/c?d=e&f=%20",
    "AAAAaaaaBBBB aaaaaaaaaaaaaaaa",
)


def convert_tokenizer(file: Path, pattern: str | None = None) -> str:
    """Return the ``tokenizer.json`` of a file.

    ``pattern`` is what splits words of tiktoken files: a name in ``PATTERNS``, or an expression.

    Raises:
        DataError: if the file is damaged or of an unknown kind, or the conversion is not exact.
    """
    if file.stat().st_size > _MAX_BYTES:
        raise DataError(f"{file}: has more than {_MAX_BYTES >> 20} MiB; name a tokenizer's file")
    if file.name == TEKKEN:
        content, encode = _from_tekken(file)
    else:
        data = file.read_bytes()
        if _is_tiktoken(data):
            content, encode = _from_tiktoken(file, data, pattern)
        else:
            content, encode = _from_sentencepiece(file, data)
    text = json.dumps(content, ensure_ascii=False)
    _prove(file, text, encode)
    return text


def _library(name: str, file: Path) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{file}: needs {name.partition('.')[0]} to be converted "
            "(pip install 'moefold[tokenizers]'), or convert it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from error


# ------------------------------------------------------------------------------ SentencePiece


def _from_sentencepiece(
    file: Path, data: bytes
) -> tuple[dict[str, Any], Callable[[str], list[int]]]:
    library = _library("sentencepiece", file)
    proto = _library("sentencepiece.sentencepiece_model_pb2", file).ModelProto()
    try:
        proto.ParseFromString(data)
        processor = library.SentencePieceProcessor(model_proto=data)
    except Exception as error:  # protobuf and sentencepiece have no common class of errors
        raise _no_tokenizer(file) from error
    kind = proto.trainer_spec.model_type
    pieces = list(proto.pieces)
    if not pieces:
        raise _no_tokenizer(file)
    names = [piece.piece for piece in pieces]
    problem = None
    if kind not in (_UNIGRAM, _BPE):
        problem = "its model is of words or characters"
    elif any(piece.type == _UNUSED for piece in pieces):
        problem = "it has unused pieces"
    elif proto.trainer_spec.treat_whitespace_as_suffix:
        problem = "white space follows its words"
    elif not proto.normalizer_spec.escape_whitespaces:
        problem = "it does not mark spaces"
    elif len(set(names)) != len(names):
        problem = "a piece occurs twice"
    if problem:
        raise _not_exact(file, problem)
    model = _unigram(proto, pieces) if kind == _UNIGRAM else _bpe(proto, pieces)
    special = {p.piece: i for i, p in enumerate(pieces) if p.type in (_CONTROL, _UNKNOWN)}
    content = _content(model, special)
    content |= _spaces(proto.normalizer_spec, bool(proto.trainer_spec.byte_fallback))
    if user := [piece.piece for piece in pieces if piece.type == _USER]:
        longest_first = sorted(user, key=len, reverse=True)
        whole = "|".join(re.escape(piece) for piece in longest_first)
        split = {"type": "Split", "pattern": {"Regex": whole}, "behavior": "Isolated"}
        content["pre_tokenizer"] = split | {"invert": False}
        model["ignore_merges"] = True
    return content, processor.encode


def _no_tokenizer(file: Path) -> DataError:
    return DataError(f"{file}: is neither a SentencePiece nor a tiktoken file; get a new copy")


def _bpe(proto: Any, pieces: Sequence[Any]) -> dict[str, Any]:
    """Return the model of a SentencePiece BPE: a merge per way to make a piece of two others."""
    scores = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
    merges = []
    for piece, score in scores.items():
        for at in range(1, len(piece)):
            left = piece[:at]
            right = piece[at:]
            if left in scores and right in scores:
                merges.append((-score, at, left, right))
    return {
        "type": "BPE",
        "vocab": {piece.piece: i for i, piece in enumerate(pieces)},
        "merges": [[left, right] for _, _, left, right in sorted(merges)],
        "unk_token": proto.trainer_spec.unk_piece,
        "fuse_unk": True,
        "byte_fallback": bool(proto.trainer_spec.byte_fallback),
    }


def _unigram(proto: Any, pieces: Sequence[Any]) -> dict[str, Any]:
    best = max((piece.score for piece in pieces if piece.type == _NORMAL), default=0.0)
    vocab = list[list[Any]]()
    for piece in pieces:
        score = piece.score if piece.type == _NORMAL else _NEVER
        if piece.type == _USER:
            score = len(piece.piece) * best - 0.1
        vocab.append([piece.piece, score])
    return {
        "type": "Unigram",
        "unk_id": next(i for i, piece in enumerate(pieces) if piece.type == _UNKNOWN),
        "vocab": vocab,
        "byte_fallback": bool(proto.trainer_spec.byte_fallback),
    }


def _spaces(spec: Any, byte_fallback: bool) -> dict[str, Any]:
    """Return the normalizer and the decoder: what becomes of characters and spaces."""
    steps = list[dict[str, Any]]()
    decode = [_replace({"String": _SPACE}, " ")]
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        steps.append(_replace({"Regex": r"\A +"}, ""))
        steps.append(_replace({"Regex": " {2,}"}, " "))
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append(_replace({"String": " "}, _SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(_replace({"Regex": rf"{_SPACE}+\z"}, ""))
    if byte_fallback:
        decode.append({"type": "ByteFallback"})
    decode.append({"type": "Fuse"})
    if spec.add_dummy_prefix:
        decode.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "decoder": {"type": "Sequence", "decoders": decode},
    }


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


# ------------------------------------------------------------------------ tiktoken and tekken


def _is_tiktoken(data: bytes) -> bool:
    """Return whether a file begins with a line of base64 and a number."""
    return re.match(rb"[A-Za-z0-9+/=]+ \d+\r?(\n|$)", data[:4096]) is not None


def _from_tiktoken(
    file: Path, data: bytes, pattern: str | None
) -> tuple[dict[str, Any], Callable[[str], list[int]]]:
    if pattern is None:
        raise DataError(
            f"{file}: a tiktoken file does not say how text is split into words; set --pattern to "
            f"{', '.join(PATTERNS)} or a regular expression"
        )
    regex, special = PATTERNS.get(pattern, (pattern, {}))
    ranks: dict[bytes, int] = {}
    taken: dict[int, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            encoded, rank_text = line.split()
            token = base64.b64decode(encoded, validate=True)
            rank = int(rank_text)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"{where}: is not base64 and a rank; get a new copy") from error
        if token in ranks:
            raise DataError(f"{where}: the token {token!r} occurs twice; get a new copy")
        if rank in taken:
            raise DataError(f"{where}: has the rank {rank} of line {taken[rank]}; get a new copy")
        ranks[token] = rank
        taken[rank] = number
    highest = max(taken)
    special = _named_special(file) or {t: i for t, i in special.items() if i > highest}
    if overlapping := [token for token, i in special.items() if i in taken]:
        raise DataError(f"{file}: the special token {overlapping[0]!r} has the id of another token")
    return _from_ranks(file, ranks, regex, special)


def _named_special(file: Path) -> dict[str, int]:
    """Return the special tokens by id in the ``tokenizer_config.json`` beside a file."""
    config = file.with_name("tokenizer_config.json")
    listed = read_json(config, DataError).get("added_tokens_decoder") if config.is_file() else None
    found = dict[str, int]()
    for number, entry in (listed if isinstance(listed, dict) else {}).items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (number.isdecimal() and isinstance(content, str)):
            raise DataError(f"{config}: added_tokens_decoder.{number} has no content")
        found[content] = int(number)
    return found


def _from_tekken(file: Path) -> tuple[dict[str, Any], Callable[[str], list[int]]]:
    whole = read_json(file, DataError, _MAX_BYTES)
    try:
        config = whole["config"]
        vocab = whole["vocab"]
        regex = config["pattern"]
        size = int(config["default_vocab_size"])
        n_special = int(config["default_num_special_tokens"])
        listed = whole.get("special_tokens")
        if listed is None:
            special = {name: i for i, name in enumerate(_TEKKEN_SPECIAL)}
        else:
            special = {str(entry["token_str"]): int(entry["rank"]) for entry in listed}
        for i in set(range(n_special)) - set(special.values()):
            special[f"<SPECIAL_{i}>"] = i
        entries = [(base64.b64decode(e["token_bytes"]), int(e["rank"])) for e in vocab]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: {error!r}: config, vocab or special_tokens is damaged") from error
    inner = [(token, rank) for token, rank in entries if rank < size - n_special]
    ranks = dict(inner)
    different_ranks = set(ranks.values())
    if len(ranks) != len(inner) or len(different_ranks) != len(inner):
        raise DataError(f"{file}: vocab has a token or a rank twice; get a new copy")
    if max(special.values(), default=-1) >= n_special:
        raise DataError(f"{file}: special_tokens has ranks from {n_special} on; get a new copy")
    return _from_ranks(file, ranks, regex, special, n_special)


def _from_ranks(
    file: Path, ranks: Mapping[bytes, int], regex: str, special: Mapping[str, int], first: int = 0
) -> tuple[dict[str, Any], Callable[[str], list[int]]]:
    """Return the tokenizer of byte strings with ranks; ids are ranks plus ``first``."""
    if missing := [b for b in range(BYTES) if bytes([b]) not in ranks]:
        raise DataError(f"{file}: has no token for the byte {missing[0]}; get a new copy")
    tiktoken = _library("tiktoken", file)
    try:
        encoding = tiktoken.Encoding(
            file.name, pat_str=regex, mergeable_ranks=dict(ranks), special_tokens={}
        )
    except Exception as error:  # errors of its regular expressions are ValueError or its own
        raise DataError(f"{file}: the pattern {regex!r} cannot be used: {error}") from error
    letters = _byte_letters()

    def spelt(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            left = token[:at]
            right = token[at:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], left, right))
    model = {
        "type": "BPE",
        "vocab": {spelt(token): rank + first for token, rank in ranks.items()},
        "merges": [[spelt(left), spelt(right)] for _, _, left, right in sorted(merges)],
        "ignore_merges": True,
    }
    content = _content(model, special)
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level |= {"use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    content["decoder"] = level
    return content, lambda text: [rank + first for rank in encoding.encode_ordinary(text)]


def _byte_letters() -> list[str]:
    """Return the character that stands for each byte in byte-level BPE, as in GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTES) if byte not in set(printable)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(BYTES + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(BYTES)]


# -------------------------------------------------------------------------------------- proof


def _content(model: dict[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
    """Return a ``tokenizer.json`` with a model and special tokens, which its vocabulary gets."""
    if model["type"] == "BPE":
        model["vocab"] |= special
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    by_id = sorted((i, token) for token, i in special.items())
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, **flags, "special": True} for i, t in by_id],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }


def _prove(file: Path, text: str, encode: Callable[[str], list[int]]) -> None:
    """Raise ``DataError`` unless the converted tokenizer gives the library's ids."""
    try:
        converted = import_module("tokenizers").Tokenizer.from_str(text)
    except Exception as error:  # the library raises no class of its own
        raise _not_exact(file, f"tokenizers refuses it: {error}") from error
    converted.encode_special_tokens = True
    for sample in _samples(converted):
        found = converted.encode(sample, add_special_tokens=False).ids
        if found != (wanted := encode(sample)):
            raise _not_exact(file, f"{sample[:40]!r} is {wanted[:12]}, converted {found[:12]}")


def _samples(converted: Any) -> Iterator[str]:
    """Yield the texts of a proof: hard ones, each token's, and random mixtures of tokens."""
    yield from _HARD
    special = set(converted.get_added_tokens_decoder())
    size = converted.get_vocab_size()
    ids = [i for i in range(size) if i not in special and converted.id_to_token(i) is not None]
    texts = [converted.decode([i]) for i in ids]
    for at in range(0, len(texts), 16):
        yield " ".join(texts[at : at + 16])
    chance = Random(0)
    for _ in range(_PROOF_STRINGS):
        mixed = [chance.choice(texts) for _ in range(chance.randint(1, 12))]
        mixed.insert(0, chance.choice(_HARD))
        yield chance.choice(("", " ", "\n")).join(mixed)


def _not_exact(file: Path, reason: str) -> DataError:
    return DataError(
        f"{file}: cannot be converted exactly: {reason}; convert it with transformers, and check "
        "the result: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def write_tokenizer(file: Path, folder: Path, pattern: str | None = None) -> int:
    """Convert a file, write ``tokenizer.json`` into ``folder``, and return the number of ids.

    A ``tokenizer_config.json`` with the start and end tokens is written unless there is one.

    Raises:
        DataError: as :func:`convert_tokenizer`, or if the folder has a ``tokenizer.json``.
    """
    target = folder / "tokenizer.json"
    config = folder / "tokenizer_config.json"
    if target.exists():
        raise DataError(f"{target}: exists; name another folder, or remove it first")
    text = convert_tokenizer(file, pattern)
    content = json.loads(text)
    special = [token["content"] for token in content["added_tokens"]]
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, names in (("bos_token", _STARTS), ("eos_token", _ENDS)):
        if found := [name for name in names if name in special]:
            named[key] = found[0]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(target, text)
    if not config.exists():
        write_json(config, named)
    return len({*_all_ids(content["model"]), *(token["id"] for token in content["added_tokens"])})


def _all_ids(model: Mapping[str, Any]) -> Iterator[int]:
    vocab = model["vocab"]
    return iter(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
