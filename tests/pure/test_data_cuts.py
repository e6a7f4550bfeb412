"""Long texts are cut where the ids of the parts are those of the whole, and only there."""

import json
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from moefold.data.cuts import _DEEPSEEK, DIVIDING, HARMLESS, PART, divide, find_places
from moefold.data.tokenizer import GROUP, Tokenizer

ENDS = (
    "don't it's WE'LL ab\u0301 ",
    "x\n y",
    "a\t b",
    "e\u0301 e",
    "wo rd\u00a0wo ",
    "q \n\n r  s",
)
SIGNS = (
    "12345",
    "3.14",
    "...",
    "?!",
    "\r\n",
    "  ",
    "   ",
    " ",
    "\n",
    "\t",
    "/",
    "'s",
    "\u4e2d\u6587",
)
WORDS = (
    "the",
    "The",
    "THE",
    "cat",
    "x",
    "na\u00efve",
    "\u0434\u0430",
    "<s>",
    "<end>",
    "</s>",
    "\U0001f600",
)
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = BYTES | {"use_regex": True}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
Content = dict[str, Any]


def drawn(chance: Random, pieces: int) -> str:
    kinds = (WORDS, WORDS, (" ",), (" ",), SIGNS, ENDS)
    return "".join(chance.choice(chance.choice(kinds)) for _ in range(pieces))


def split(expression: str) -> Content:
    return SPLIT | {"pattern": {"Regex": expression}}


def sequence(*parts: Content) -> Content:
    return {"type": "Sequence", "pretokenizers": list(parts)}


@cache
def trained(pre_tokenizer: str, normalizer: str) -> str:
    """Return a BPE that was trained on drawn text."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    start = json.loads(backend.to_str())
    start |= {"pre_tokenizer": json.loads(pre_tokenizer), "normalizer": json.loads(normalizer)}
    backend = tokenizers.Tokenizer.from_str(json.dumps(start))
    letters = [chr(i) for i in range(ord("A"), ord("z") + 1)]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", "<end>"],
        initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), *letters, "\u2581"],
        show_progress=False,
    )
    chance = Random(0)
    backend.train_from_iterator([drawn(chance, 200) for _ in range(10)], trainer)
    return backend.to_str()


def content(pre_tokenizer: Content | None, normalizer: Content | None = None) -> Content:
    return json.loads(trained(json.dumps(pre_tokenizer), json.dumps(normalizer)))


def metaspace(scheme: str) -> Content:
    kind = {"type": "Metaspace", "replacement": "\u2581"}
    return kind | {"prepend_scheme": scheme, "split": True}


GEMMA = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
DEEPSEEK = sequence(*(split(each) for each in sorted(HARMLESS)), split(_DEEPSEEK), BYTES)
FORMS: dict[str, Callable[[], Content]] = {
    "gpt2": lambda: content(GPT2),
    "prefix": lambda: content(GPT2 | {"add_prefix_space": True}),
    "digits": lambda: content(sequence({"type": "Digits", "individual_digits": True}, GPT2)),
    "deepseek": lambda: content(DEEPSEEK),
    "metaspace": lambda: content(metaspace("first")),
    "whole metaspace": lambda: (
        content(metaspace("always")) | {"pre_tokenizer": metaspace("always") | {"split": False}}
    ),
    **{
        f"expression {number}": lambda each=each: content(
            sequence(split(each), BYTES), {"type": "NFC"}
        )
        for number, each in enumerate(sorted(DIVIDING))
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_parts_have_the_ids_of_the_whole(form: str) -> None:
    found = FORMS[form]()
    places = find_places(found)
    assert places
    backend = tokenizers.Tokenizer.from_str(json.dumps(found))
    chance = Random(form)
    cuts = 0
    for _ in range(40):
        text = drawn(chance, 60)
        parts = list(divide(text, places, chance.randint(0, 9)))
        cuts += len(parts) - 1
        assert "".join(parts) == text
        encoded = backend.encode_batch(parts, add_special_tokens=False)
        joined = [i for each in encoded for i in each.ids]
        assert joined == backend.encode(text, add_special_tokens=False).ids, (text, parts)
    assert cuts > 40


def with_token(text: str, **flags: bool) -> Content:
    token = ADDED | {"id": 600, "content": text, "special": False} | flags
    found = content(GPT2)
    return found | {"added_tokens": [*found["added_tokens"], token]}


def with_model(**changed: Any) -> Content:
    found = content(metaspace("first"))
    return found | {"model": found["model"] | changed}


def with_merge_over_space() -> Content:
    found = with_model()
    found["model"]["vocab"]["t\u2581"] = 600
    return found


WHOLE: dict[str, Callable[[], Content]] = {
    "an added token holds a space": lambda: with_token("the cat"),
    "an added token takes the space after it": lambda: with_token("cat", rstrip=True),
    "an added token is a word alone": lambda: with_token(" cat", single_word=True),
    "an added token begins with a line": lambda: with_token("\n <"),
    "an added token takes the line before it": lambda: with_token("<", lstrip=True),
    "an unknown expression": lambda: content(sequence(split(r"\w+ \w+|\s"), BYTES)),
    "no expression": lambda: content(BYTES),
    "another normalizer": lambda: content(GPT2, {"type": "Lowercase"}),
    "merges that are drawn": lambda: with_model(dropout=0.5),
    "a merge over a space": with_merge_over_space,
    "words that are looked up whole": lambda: with_model(ignore_merges=True),
    "a space before each text": lambda: content(None, {"type": "Prepend", "prepend": "\u2581"}),
    "a unigram": lambda: content(metaspace("first")) | {"model": {"type": "Unigram"}},
}


@pytest.mark.parametrize("form", WHOLE)
def test_texts_of_other_tokenizers_stay_whole(form: str) -> None:
    assert find_places(WHOLE[form]()) is None


def test_a_long_document_is_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(1)
    long = drawn(chance, GROUP // 2)
    texts = ["the cat", long, "", "cat"]
    tokenizer = Tokenizer(json.dumps(content(GPT2)), "</s>")
    whole = [tokenizer.encode(text) for text in texts]
    assert len(long) > GROUP > 2 * PART
    sizes = list[int]()
    encode = tokenizer._backend.encode_batch_fast

    class Watched:
        def encode_batch_fast(self, parts: list[str], add_special_tokens: bool) -> Any:
            sizes.append(sum(map(len, parts)))
            return encode(parts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "_backend", Watched())
    found = tokenizer.encode_documents(texts)
    assert [ids.tolist() for ids in found] == [[*ids, tokenizer.end_id] for ids in whole]
    assert sum(sizes) == sum(map(len, texts)) and max(sizes) <= GROUP
