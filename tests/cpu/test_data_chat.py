"""Conversations as data: ids and masks as transformers has them, whole packs, any step again."""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.cli.main import main
from moefold.config.load import load
from moefold.data.batch import IGNORE_INDEX, MicroBatch, from_ids
from moefold.data.config import Data, DataError
from moefold.data.corpora.sources import MAX_LONG, MAX_REFUSED
from moefold.data.loader import Loader
from moefold.data.packing import MaskedCorpus, best_fit_decreasing
from moefold.data.prepare import PreparedData, prepare
from moefold.layers.kinds.dense import Dense
from moefold.run import Run
from moefold.training.trainer import Trainer
from tests.chats import (
    CHATML,
    FAMILIES,
    conversation,
    drawn_example,
    template_of,
    write_chat_folder,
)
from tests.cpu.runs import equal, raw_run, weights
from tests.cpu.small import GQA, decoder, model_of, moe

EACH = 63
"""Conversations of each of eight families."""


def write_lines(file: Path, examples: Sequence[dict[str, Any]]) -> Path:
    lines = [json.dumps(example, ensure_ascii=False) for example in examples]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def prepared_from(
    folder: Path, tokenizer: Path, files: Path, seq: int = 512, **how: Any
) -> PreparedData:
    source = {"source": "chat", "files": [str(files)], **how}
    data = {"seq": seq, "tokenizer": {"kind": "file", "path": str(tokenizer)}, "train": [source]}
    return prepare(load(Data, data).record, folder / "prepared")


def documents(prepared: PreparedData) -> list[tuple[list[int], list[int]]]:
    """Ids and mask of each conversation, in order."""
    corpus = prepared.train[0].corpus
    assert isinstance(corpus, MaskedCorpus)
    pieces = [piece for i in range(corpus.n_documents) for piece in corpus.pieces(i)]
    return [(p.ids_N.tolist(), p.loss_mask_N.astype(int).tolist()) for p in pieces]  # type: ignore[union-attr]


@lru_cache(maxsize=1)
def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def theirs(folder: Path, examples: Sequence[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    tokenizer = tokenizer_of(folder)
    found = []
    for example in examples:
        said = tokenizer.apply_chat_template(
            example["messages"],
            tools=example.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found.append((said["input_ids"], said["assistant_masks"]))
    return found


def rewritten(family: str, example: dict[str, Any]) -> bool:
    """Whether a later turn changes what the template writes of an answer."""
    messages = example["messages"]
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    return (family == "gpt_oss" and len(answers) > 1) or loses_reasoning(family, example)


def loses_reasoning(family: str, example: dict[str, Any]) -> bool:
    """Whether the template leaves reasoning out once later turns follow."""
    messages = example["messages"]
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    earlier = answers[:-1] if family == "gpt_oss" else [i for i in answers if i < last]
    return any("reasoning_content" in messages[i] for i in earlier)


def theirs_each(folder: Path, example: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """For each answer the conversation up to it, with the labels of this answer.

    One that another begins with is part of it.
    """
    messages = example["messages"]
    texts = [
        theirs(folder, [example | {"messages": messages[: i + 1]}])[0]
        for i, m in enumerate(messages)
        if m["role"] == "assistant"
    ]
    found = list[tuple[list[int], list[int]]]()
    for ids, mask in texts:
        ends = [at for at in range(len(mask)) if mask[at] and not mask[at - 1]]
        mask = [int(at >= ends[-1] and m) for at, m in enumerate(mask)]
        if found and ids[: len(found[-1][0])] == found[-1][0]:
            before = found.pop()[1]
            mask[: len(before)] = before
        found.append((ids, mask))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_masks_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    draws = Random(f"chat {family}")
    examples = [drawn_example(draws, family) for _ in range(EACH)]
    lines = write_lines(tmp_path / "chats.jsonl", examples)
    folder = write_chat_folder(tmp_path / "marked", template_of(family), **FAMILIES[family])
    whole = theirs(folder, examples)
    each = [theirs_each(folder, example) for example in examples]

    found = documents(prepared_from(tmp_path, folder, lines))
    lost = [loses_reasoning(family, example) for example in examples]
    assert found == [
        document
        for one, several, apart in zip([[e] for e in whole], each, lost, strict=True)
        for document in (several if apart else one)
    ]

    without = write_chat_folder(
        tmp_path / "unmarked", template_of(family, marked=False), **FAMILIES[family]
    )
    assert documents(prepared_from(tmp_path, without, lines)) == [
        one for several in each for one in several
    ]
    if any(rewritten(family, example) for example in examples):
        left = prepared_from(tmp_path, without, lines, bad="skip", answers="all")
        kept = [
            e for e, example in zip(whole, examples, strict=True) if not rewritten(family, example)
        ]
        assert documents(left) == kept and len(kept) > EACH // 5
        assert left.skipped["chat"]["the template changes earlier messages"]["count"] == (
            EACH - len(kept)
        )


def test_of_several_templates_examples_with_tools_have_the_one_for_tools(tmp_path: Path) -> None:
    """As transformers chooses."""
    named = {"default": CHATML, "tool_use": "{{ tools | tojson }}\n" + CHATML}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    folder = write_chat_folder(tmp_path / "model", None, chat_template=listed)
    plain = {"messages": conversation(Random(1))}
    examples = [plain, plain | {"tools": [{"name": "clock"}]}]
    expected = theirs(folder, examples)
    assert expected[0] != expected[1]
    lines = write_lines(tmp_path / "chats.jsonl", examples)
    assert documents(prepared_from(tmp_path, folder, lines)) == expected


def chats(folder: Path, examples: Sequence[dict[str, Any]], template: str | None = CHATML) -> Path:
    """Write a ChatML folder and a file of examples; return the latter."""
    write_chat_folder(folder / "model", template)
    return write_lines(folder / "chats.jsonl", examples)


MARKED = [{"role": "user", "content": "\ufdd0a\ufdd1"}, {"role": "assistant", "content": "b"}]


def drawn(count: int, seed: int = 1) -> list[dict[str, Any]]:
    draws = Random(seed)
    return [{"messages": conversation(draws)} for _ in range(count)]


@given(st.lists(st.integers(1, 20), max_size=60))
@settings(max_examples=50, deadline=None)
def test_packs_hold_each_document_once_and_none_has_room_for_the_next(lengths: list[int]) -> None:
    packs = best_fit_decreasing(lengths, 20)
    assert sorted(n for pack in packs for n in pack) == list(range(len(lengths)))
    sums = [sum(lengths[n] for n in pack) for pack in packs]
    assert all(total <= 20 for total in sums)
    for i, pack in enumerate(packs):  # what opens a pack fitted in none before it
        first = (-lengths[pack[0]], pack[0])
        earlier = ([n for n in p if (-lengths[n], n) < first] for p in packs[:i])
        before = [sum(lengths[n] for n in p) for p in earlier]
        assert all(total + lengths[pack[0]] > 20 for total in before)
    assert len(packs) <= 11 / 9 * max(-(-sum(lengths) // 20), 1) + 20


def pieces(batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each document of a micro-batch."""
    ends = np.cumsum(batch.lengths)
    return [
        (batch.ids_T[e - n : e].tolist(), batch.labels_T[e - n : e].tolist())
        for n, e in zip(batch.lengths, ends, strict=True)
    ]


def labelled(found: Sequence[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of documents with their masks."""
    return [
        (
            ids,
            [
                *(i if m else IGNORE_INDEX for i, m in zip(ids[1:], mask[1:], strict=True)),
                IGNORE_INDEX,
            ],
        )
        for ids, mask in found
    ]


def test_every_conversation_is_in_an_epoch_once_and_whole(tmp_path: Path) -> None:
    file = chats(tmp_path, drawn(80))
    prepared = prepared_from(tmp_path, tmp_path / "model", file, seq=160)
    loader, expected = Loader(prepared, 160, 1, seed=4), labelled(documents(prepared))
    packs = round(1 / loader.epoch(1)["chat"])
    epochs = [
        [p for step in range(packs) for p in pieces(loader.load_step(start + step)[0])]
        for start in (0, packs)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(expected)
    assert epochs[0] != epochs[1] and len(expected) > packs > 9
    # Any step again, on any number of ranks, at any place of the batch.
    wide = [Loader(prepared, 160, 4, 2, seed=4, pad_to=64, rank=r, ranks=2) for r in range(2)]
    for step in (3, 1):
        batches = [wide[r].load_step(step)[0] for r in range(2)]
        alone = [loader.load_step(4 * step + i)[0] for i in range(4)]
        assert [p for b in batches for p in pieces(b)] == [p for b in alone for p in pieces(b)]
        numbers = np.concatenate([b.token_T.numpy() for b in batches])
        assert len(set(numbers.tolist())) == len(numbers)
        for r, batch in enumerate(batches):
            assert batch.n_labels == sum(b.n_labels for b in alone[2 * r : 2 * r + 2])
            valid = batch.token_T[: batch.n_valid]
            assert valid.tolist() == list(range(320 * r, 320 * r + batch.n_valid))
    # Another length of a sequence is another set, and held-out conversations are labels once.
    other = prepared_from(tmp_path, tmp_path / "model", file, seq=170, holdout=0.3)
    held = [p for b in Loader(other, 170, 1).evaluation() for p in pieces(b)]
    assert other.folder != prepared.folder
    assert sorted(held + labelled(documents(other))) == sorted(expected) and 9 < len(held) < 60


def test_packed_is_one_by_one(tmp_path: Path) -> None:
    """Loss and gradients, where no balance term looks at what else is in a micro-batch."""
    file = chats(tmp_path, drawn(9))
    prepared = prepared_from(tmp_path, tmp_path / "model", file, seq=256)
    record = decoder(GQA, Dense(width=24), moe(balance=()))
    model = model_of(record.model_copy(update={"vocab": prepared.tokenizer.vocab}))
    loader = Loader(prepared, 256, 2, 2, pad_to=8)
    (packed,) = loader.load_step(0)
    assert len(packed.lengths) > 4 and packed.rows > packed.n_valid
    (model.micro_batch_loss(packed).lm_loss * packed.n_labels).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss = model.micro_batch_loss(packed).lm_loss.item()
    model.zero_grad()
    summed = 0.0
    for ids, labels in pieces(packed):
        alone = from_ids(torch.tensor([ids]), torch.tensor([labels]))
        one = model.micro_batch_loss(alone).lm_loss * alone.n_labels
        one.backward()
        summed += one.item()
    assert summed / packed.n_labels == pytest.approx(loss, rel=1e-10)
    for name, p in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "the last message has role user"),
        ({"messages": []}, "without an answer: it has no messages"),
        ({"messages": [{"role": "human", "content": "a"}]}, "unknown role: message 0 .*'human'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role: message 0 .*'user'"),
        ({"messages": [{"role": "user"}]}, r"no content: message 0 \(user\)"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
            r"without an answer: message 1 \(assistant\) is empty",
        ),
        ({"messages": "hello"}, "not a conversation: messages must be a list"),
        ({"text": "hello"}, r"not a conversation: it has \['text'\], but needs"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a pair of answers: chosen and rejected"),
        ({"prompt": "a", "completion": ""}, "without an answer: completion is"),
        ({"prompt": "a", "completion": []}, "text beside messages: prompt is text, but completion"),
        ({"prompt": [], "completion": "b"}, "text beside messages: completion is text, but prompt"),
        ({"messages": MARKED}, "invalid text: it contains the noncharacter"),
        (
            {"messages": drawn(1)[0]["messages"], "tools": [{"name": "\ufdd0"}]},
            "invalid text: it contains",
        ),
    ],
)
def test_bad_examples_are_refused_by_line_or_left_out(
    tmp_path: Path, example: dict[str, Any], said: str
) -> None:
    file = chats(tmp_path, [*drawn(2), example])
    remedy = "correct the data, or leave such documents out with bad: skip"
    with pytest.raises(DataError, match=rf"chats\.jsonl:3: .*{said}(?s:.*){remedy}"):
        prepared_from(tmp_path, tmp_path / "model", file)
    left = prepared_from(tmp_path, tmp_path / "model", file, bad="skip")
    assert left.train[0].corpus.n_documents == 2
    ((_, note),) = left.skipped["chat"].items()
    assert note == {"count": 1, "first": [f"{file.as_posix()}:3"]}


def test_bad_examples_are_told_of_at_once_up_to_a_number(tmp_path: Path) -> None:
    bad = {"messages": []}
    file = chats(tmp_path, [bad, *drawn(2), *[bad] * 20])
    with pytest.raises(DataError) as caught:
        prepared_from(tmp_path, tmp_path / "model", file)
    *told, remedy = str(caught.value).replace("; correct", "\ncorrect").split("\n")
    assert [line.split(":")[1] for line in told] == ["1", *map(str, range(4, 4 + MAX_REFUSED - 1))]
    assert remedy.startswith("correct the data, or leave such")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system here') }}", r"chats\.jsonl:1: .*no system here"),
        (
            "\n{{ messages[0].content + 3 }}",
            r"chats\.jsonl:1: .*TypeError.*\(line 2 of .*chat_template\.jinja\)",
        ),
        ("{{ persona }}", r"chats\.jsonl:1: .*needs a missing value: 'persona' is undefined"),
        ("{{ strftime_now('%Y') }}", r"chats\.jsonl:1: .*current date.*\(line 1"),
        ("{{ persona | tojson }}", r"chats\.jsonl:1: .*needs a missing value: 'persona' is undef"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}",
            r"chats\.jsonl:1: .*without an answer: it has no",
        ),
        ("{% generation %}{% endgeneration %}a", r"chats\.jsonl:1: .*leaves out a part"),
        ("{{ ''.__class__.__mro__ }}", r"chats\.jsonl:1: .*unsafe"),
        ("{% for m in messages %}", r"chat_template\.jinja: line 1 .*correct it, or set data"),
        (None, "has no chat template.*set data.tokenizer.template"),
    ],
)
def test_templates_that_cannot_be_used(tmp_path: Path, template: str | None, said: str) -> None:
    file = chats(tmp_path, drawn(2), template)
    with pytest.raises(DataError, match=said):
        prepared_from(tmp_path, tmp_path / "model", file)


def test_conversations_longer_than_a_sequence(tmp_path: Path) -> None:
    long = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 300}]
    }
    late = {
        "messages": [{"role": "user", "content": "a" * 300}, {"role": "assistant", "content": "b"}]
    }
    file = chats(tmp_path, [*drawn(3), long, late])
    with pytest.raises(DataError) as caught:
        prepared_from(tmp_path, tmp_path / "model", file, seq=160)
    first, second = str(caught.value).split("\n")
    assert re.search(r"chats\.jsonl:4: a conversation of \d+ tokens does not fit .* 160$", first)
    assert re.search(r"chats\.jsonl:5: .* 160; raise data\.seq to (\d+), or set long: cut", second)
    left = prepared_from(tmp_path, tmp_path / "model", file, seq=160, long="skip")
    cut = prepared_from(tmp_path, tmp_path / "model", file, seq=160, long="cut")
    assert max(len(ids) for ids, _ in documents(cut)) == 160
    # Where nothing is left of the answer, the rest teaches nothing.
    assert cut.train[0].corpus.n_documents == left.train[0].corpus.n_documents + 1
    assert f"{file.as_posix()}:5" in str(cut.skipped["chat"])


def test_long_conversations_are_told_of_all_at_once(tmp_path: Path) -> None:
    file = chats(tmp_path, drawn(MAX_LONG + 5))
    lengths = [len(ids) for ids, _ in documents(prepared_from(tmp_path, tmp_path / "model", file))]
    with pytest.raises(DataError) as caught:
        prepared_from(tmp_path, tmp_path / "model", file, seq=2)
    *told, rest = str(caught.value).split("\n")
    assert [line.split(":")[1] for line in told] == [str(i + 1) for i in range(MAX_LONG)]
    assert rest.startswith(f"  and 5 more; raise data.seq to {max(lengths)}, or set long: cut")
    prepared_from(tmp_path, tmp_path / "model", file, seq=max(lengths))


def test_an_empty_set_is_refused(tmp_path: Path) -> None:
    file = chats(tmp_path, [])
    with pytest.raises(DataError, match=r"source chat: has no document.*; check .*chats\.jsonl"):
        prepared_from(tmp_path, tmp_path / "model", file)
    write_lines(file, [{"messages": []}])
    with pytest.raises(DataError, match=r"left out: 1 \(example without an answer\)"):
        prepared_from(tmp_path, tmp_path / "model", file, bad="skip")


def test_tables_and_folders_of_datasets_give_what_lines_give(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    examples = drawn(12)
    file = chats(tmp_path, examples)
    expected = documents(prepared_from(tmp_path, tmp_path / "model", file))
    # Tables have every key in each row.
    beside = {"made": datetime(2026, 1, 2), "raw": b"\xff"}
    rows = [
        {"messages": [m | {"tool_calls": None} for m in e["messages"]]} | beside for e in examples
    ]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "chats.parquet")
    folder = tmp_path / "set"
    folder.mkdir()
    for number, part in enumerate((table.slice(0, 7), table.slice(7))):
        name = folder / f"data-{number:05d}-of-00002.arrow"
        with pyarrow.ipc.new_stream(name, table.schema) as writer:
            writer.write_table(part)
    names = [{"filename": f"data-{number:05d}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    for source in (tmp_path / "chats.parquet", folder):
        assert documents(prepared_from(tmp_path, tmp_path / "model", source)) == expected
    broken = pyarrow.array([b"fine", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"prompt": ["one", "two"], "completion": broken})
    parquet.write_table(table, tmp_path / "broken.parquet")
    with pytest.raises(DataError, match=r"broken\.parquet:1: not UTF-8: byte 0"):
        prepared_from(tmp_path, tmp_path / "model", tmp_path / "broken.parquet")
    found = prepared_from(tmp_path, tmp_path / "model", tmp_path / "broken.parquet", bad="skip")
    assert found.skipped["chat"]["not UTF-8"]["count"] == 1 and len(documents(found)) == 1
    several = tmp_path / "several"
    several.mkdir()
    (several / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match="several sets"):
        prepared_from(tmp_path, tmp_path / "model", several)


def test_prompts_and_completions(tmp_path: Path) -> None:
    (said,) = drawn(1, 3)
    messages = said["messages"]
    examples: list[dict[str, Any]] = [
        {"prompt": "the gate", "completion": " is open"},
        {"prompt": messages[:-1], "completion": messages[-1:]},
    ]
    file = chats(tmp_path, [*examples, said])
    prepared = prepared_from(tmp_path, tmp_path / "model", file)
    text, pair, whole = documents(prepared)
    tokenizer = prepared.tokenizer
    answer = tokenizer.encode(" is open")
    assert text[0] == [*tokenizer.encode("the gate"), *answer, tokenizer.end_id]
    assert sum(text[1]) == len(answer) + 1 and text[1][-1] == 1
    assert pair[0] == whole[0]
    only = documents(prepared_from(tmp_path, tmp_path / "model", file, answers="last"))
    assert pair[1] == only[2][1]
    assert sum(pair[1]) == len(tokenizer.encode(messages[-1]["content"])) + 1


@pytest.mark.parametrize("start", [None, "", "<|im_start|>"])
def test_a_prompt_of_text_begins_as_documents_do(tmp_path: Path, start: str | None) -> None:
    file = chats(tmp_path, [{"prompt": "the gate", "completion": " is open"}] * 3)
    folder = write_chat_folder(tmp_path / "model", bos_token="<|endoftext|>")
    sources = [{"source": "chat", "files": [str(file)]}]
    sources += [{"source": "jsonl", "files": [str(file)], "field": "prompt"}]
    tokenizer = {"kind": "file", "path": str(folder), "start": start}
    data = {"seq": 20, "tokenizer": tokenizer, "train": sources}
    prepared = prepare(load(Data, data).record, tmp_path / "prepared")
    chat, text = (part.corpus.document(0).tolist() for part in prepared.train)
    assert chat[: len(text) - 1] == text[:-1]


def test_inspect_shows_a_conversation_with_its_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [("user", "the gate"), ("assistant", "is open")]
    example = {"messages": [{"role": role, "content": text} for role, text in said]}
    file = chats(tmp_path, [example])
    prepared = prepared_from(tmp_path, tmp_path / "model", file)
    prefix = str(prepared.folder / "chat.train")
    assert main(["data", "inspect", prefix, "--document", "0"]) == 0
    assert "assistant\n⟦is open<|im_end|>⟧\n" in capsys.readouterr().out
    assert main(["data", "inspect", str(prepared.folder), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 1
    mask = prepared.folder / "chat.train.mask.bin"
    mask.write_bytes(bytes(len(mask.read_bytes())))
    assert main(["data", "inspect", prefix]) == 1


def test_a_run_goes_on_where_it_was_and_lowers_the_loss_of_answers(tmp_path: Path) -> None:
    file = chats(tmp_path, drawn(60))
    raw = raw_run(tmp_path, train={"steps": 12})
    raw["data"] = {
        "seq": 160,
        "tokenizer": {"kind": "file", "path": str(tmp_path / "model")},
        "train": [{"source": "chat", "files": [str(file)], "holdout": 0.2}],
    }
    run, cache = load(Run, raw).record, tmp_path / "prepared"
    with Trainer(run, tmp_path / "whole", cache=cache) as job:
        before = job.evaluate()
        job.train()
        after, expected = job.evaluate(), weights(job)
    for name in ("val/chat/loss", "val/chat/bits_per_byte"):
        assert after[name] < 0.95 * before[name], (before, after)
    with Trainer(run, tmp_path / "parts", cache=cache) as job:
        for _ in range(5):
            job.step()
        job.save()
    with Trainer(run, tmp_path / "parts", cache=cache) as job:
        assert job.step_number == 5
        job.train()
        assert equal(weights(job), expected) == []
