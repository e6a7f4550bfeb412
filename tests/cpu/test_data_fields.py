"""Fields of conversations in prepared data: obeyed, refused by line, or named as left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.main import main
from moefold.config.load import load
from moefold.data.config import Data, DataError
from moefold.data.prepare import PreparedData, prepare
from tests.chats import CHATML, write_chat_folder
from tests.cpu.test_data_chat import documents, prepared_from, write_lines

UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ASK, ANSWER = {"role": "user", "content": "gate"}, {"role": "assistant", "content": "load"}
BAD = ANSWER | {"content": "bad token"}


def shown(prepared: PreparedData) -> list[str]:
    """The documents' texts, with what is trained between ⟦ and ⟧."""
    found = []
    for ids, mask in documents(prepared):
        text, before = "", 0
        for i, m in zip([*ids, None], [*mask, 0], strict=True):
            text += "⟦" * (m > before) + "⟧" * (m < before)
            text += "" if i is None else prepared.tokenizer.decode([i], special=True)
            before = m
        found.append(text)
    return found


def pairs_from(folder: Path, tokenizer: Path, files: Path, **how: Any) -> PreparedData:
    source = {"source": "preferences", "files": [str(files)], **how}
    data = {"seq": 256, "tokenizer": {"kind": "file", "path": str(tokenizer)}, "train": [source]}
    return prepare(load(Data, data).record, folder / "prepared")


@pytest.mark.parametrize("template", [CHATML, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss_mask": 0}])
def test_answers_that_are_context_have_no_labels(
    tmp_path: Path, template: str, mark: dict[str, Any]
) -> None:
    tokenizer = write_chat_folder(tmp_path / "model", template)
    rows = [
        {"messages": [ASK, BAD | mark, ASK, ANSWER]},
        {"messages": [ASK, ANSWER, ASK, BAD | mark]},
        {"conversations": [{"from": "human", "value": "gate"}, {"from": "gpt", "value": "load"}]},
    ]
    lines = write_lines(tmp_path / "chats.jsonl", rows)
    head = "<|im_start|>user\ngate<|im_end|><|im_start|>assistant\n"
    told = shown(prepared_from(tmp_path, tokenizer, lines))
    assert told == [
        f"{head}bad token<|im_end|>{head}⟦load<|im_end|>⟧",
        f"{head}⟦load<|im_end|>⟧{head}bad token<|im_end|>",
        f"{head}⟦load<|im_end|>⟧",
    ]
    with pytest.raises(DataError, match=r"chats\.jsonl:2: .*no answer of it is trained"):
        prepared_from(tmp_path, tokenizer, lines, answers="last")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [ASK | {"content": [{"type": "image"}]}, ANSWER]}, "reads text only"),
        ({"messages": [ASK, ANSWER], "images": ["a.png"]}, "it has images"),
        ({"messages": [ASK, ANSWER | {"mood": "glad"}]}, r"message 1 \(assistant\) has mood"),
        ({"messages": [ASK | {"name": "Ann"}, ANSWER]}, r"message 0 \(user\) has name"),
        ({"messages": [ASK, ANSWER], "chat_template_kwargs": {"deep": 1}}, "kwargs has deep"),
        ({"messages": [ASK, ANSWER | {"weight": 2}]}, "message 1 has weight: 2"),
        ({"question": "gate", "answer": "load"}, r'row\["question"\]'),
    ],
)
def test_lines_are_refused_or_left_out(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    tokenizer = write_chat_folder(tmp_path / "model")
    lines = write_lines(tmp_path / "chats.jsonl", [{"messages": [ASK, ANSWER]}, row])
    with pytest.raises(DataError, match=rf"chats\.jsonl:2: .*{told}"):
        prepared_from(tmp_path, tokenizer, lines)
    left = prepared_from(tmp_path, tokenizer, lines, bad="skip")
    assert len(documents(left)) == 1 and len(left.skipped["chat"]) == 1


def test_ignored_fields_and_columns_are_left_out(tmp_path: Path) -> None:
    tokenizer = write_chat_folder(tmp_path / "model")
    plain = {"messages": [ASK, ANSWER]}
    noisy = {"messages": [ASK | {"mood": 1}, ANSWER | {"mood": 2}], "images": ["a.png"]}
    expected = documents(
        prepared_from(tmp_path, tokenizer, write_lines(tmp_path / "plain.jsonl", [plain]))
    )
    lines = write_lines(tmp_path / "chats.jsonl", [noisy])
    found = prepared_from(tmp_path, tokenizer, lines, ignore=["mood", "images"])
    assert documents(found) == expected


def test_columns_that_are_not_read_are_said_once(tmp_path: Path, capsys: Any) -> None:
    tokenizer = write_chat_folder(tmp_path / "model")
    rows = [{"messages": [ASK, ANSWER], "id": n, "source": "web"} for n in range(3)]
    lines = write_lines(tmp_path / "chats.jsonl", rows)
    found = prepared_from(tmp_path, tokenizer, lines)
    note = {"count": 2, "first": ["id", "source"], "unit": "column"}
    assert found.skipped == {"chat": {"not read": note}}
    source = json.dumps([{"source": "chat", "files": [str(lines)]}])
    words = [f"data.train={source}", f"data.tokenizer={{kind: file, path: {tokenizer}}}"]
    assert main(["data", "prepare", "tiny", *words, "--folder", str(tmp_path / "out")]) == 0
    assert "chat: 2 columns left out, not read: id, source" in capsys.readouterr().out


@pytest.mark.parametrize(
    "roles",
    [
        ("system", "assistant", "user", "assistant"),
        ("assistant", "user", "assistant"),
        ("user", "assistant", "assistant"),
        ("user", "user", "assistant"),
        ("user", "assistant", "user"),
        ("user", "assistant", "tool", "tool", "assistant"),
    ],
)
def test_the_template_decides_on_the_order_of_roles(tmp_path: Path, roles: Any) -> None:
    rows = [{"messages": [{"role": r, "content": f"turn {n}"} for n, r in enumerate(roles)]}]
    lines = write_lines(tmp_path / "chats.jsonl", rows)
    tokenizer = write_chat_folder(tmp_path / "model", UNMARKED)
    expected = "".join(
        f"<|im_start|>{r}\n⟦turn {n}<|im_end|>⟧"
        if r == "assistant"
        else f"<|im_start|>{r}\nturn {n}<|im_end|>"
        for n, r in enumerate(roles)
    )
    assert shown(prepared_from(tmp_path, tokenizer, lines)) == [expected]


def test_an_order_that_the_template_refuses_is_refused_with_its_words(tmp_path: Path) -> None:
    check = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    strict = f"{check}{{{{ raise_exception('Roles must alternate') }}}}{{% endif %}}"
    template = UNMARKED.replace("{% for m in messages %}", "{% for m in messages %}" + strict)
    tokenizer = write_chat_folder(tmp_path / "model", template)
    lines = write_lines(tmp_path / "chats.jsonl", [{"messages": [ANSWER, ASK, ANSWER]}])
    with pytest.raises(DataError, match=r"chats\.jsonl:1: .*: Roles must alternate"):
        prepared_from(tmp_path, tokenizer, lines)


def test_published_pairs_are_read(tmp_path: Path) -> None:
    """Whole texts, as Anthropic's; a question beside whole conversations, as UltraFeedback's."""
    tokenizer = write_chat_folder(tmp_path / "model", UNMARKED)
    texts = {
        "chosen": "\n\nHuman: gate?\n\nAssistant: a",
        "rejected": "\n\nHuman: gate?\n\nAssistant: b",
    }
    whole = {"prompt": "gate", "chosen": [ASK, ANSWER], "rejected": [ASK, BAD], "score": 1.0}
    lines = write_lines(tmp_path / "pairs.jsonl", [texts, whole, texts | {"rejected": "\n\nHuman"}])
    with pytest.raises(DataError, match=r"pairs\.jsonl:3: .*rejected is empty"):
        pairs_from(tmp_path, tokenizer, lines)
    found = pairs_from(tmp_path, tokenizer, lines, bad="skip")
    head = "<|im_start|>user\ngate<|im_end|><|im_start|>assistant\n"
    ids = [ids for ids, _ in documents(found)]
    decoded = [found.tokenizer.decode(each, special=True) for each in ids]
    end = "<|im_end|>"
    assert decoded[:2] == [text + end for text in texts.values()]
    assert decoded[2:] == [f"{head}load{end}", f"{head}bad token{end}"]
    assert found.skipped["preferences"]["not read"]["first"] == ["score"]


def test_columns_of_json_give_what_lines_give(tmp_path: Path) -> None:
    """Arrow's extension type, in Arrow folders and Parquet, at any depth of a column."""
    import pyarrow as pa
    from pyarrow import parquet

    template = UNMARKED.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content or [] %}"
        "{{ c.text }}{% endfor %}{% endif %}{{ m.tool_calls | tojson if m.tool_calls }}",
    )
    tokenizer = write_chat_folder(tmp_path / "model", "{{ tools | tojson if tools }}" + template)
    parts = ASK | {"content": [{"type": "text", "text": "gate"}]}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"a": None}}}}]
    rows = [{"messages": [ASK, ANSWER]}, {"messages": [parts, ANSWER]}]
    rows += [{"messages": [ASK, calling], "tools": tools}]
    lines = write_lines(tmp_path / "chats.jsonl", rows)
    expected = documents(prepared_from(tmp_path, tokenizer, lines))

    json_type, text = pa.json_(), pa.string()
    message = pa.struct({"role": text, "content": json_type, "tool_calls": json_type})
    schemas = {
        "content": pa.schema({"messages": pa.list_(message), "tools": json_type}),
        "messages": pa.schema({"messages": pa.list_(json_type), "tools": json_type}),
        "all": pa.schema({"messages": json_type, "tools": pa.large_list(json_type)}),
    }
    for name, schema in schemas.items():
        table = pa.table(
            [
                pa.array([as_stored(r.get(f.name), f.type) for r in rows], storage(f.type)).cast(
                    f.type
                )
                for f in schema
            ],
            schema=schema,
        )
        file = tmp_path / f"{name}.parquet"
        parquet.write_table(table, file)
        with pa.ipc.new_stream(tmp_path / f"{name}.arrow", schema) as writer:
            writer.write_table(table)
        for source in (file, tmp_path / f"{name}.arrow"):
            assert documents(prepared_from(tmp_path, tokenizer, source)) == expected, source


def storage(kind: Any) -> Any:
    """The type whose values Arrow stores for a type."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, storage(f.type)) for f in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(storage(kind.value_type))
    return pa.list_(storage(kind.value_type)) if pa.types.is_list(kind) else kind


def as_stored(value: Any, kind: Any) -> Any:
    """A value with JSON text wherever its type says so."""
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return json.dumps(value)
    if pa.types.is_struct(kind):
        return {f.name: as_stored(value.get(f.name), f.type) for f in kind}
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return [as_stored(each, kind.value_type) for each in value] if listed else value


def test_json_that_is_malformed_is_refused_by_row(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    tokenizer = write_chat_folder(tmp_path / "model")
    stored = pa.array([json.dumps([ASK, ANSWER]), "[{"], pa.string())
    parquet.write_table(pa.table({"messages": stored.cast(pa.json_())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:1: not JSON: column messages is of type"):
        prepared_from(tmp_path, tokenizer, tmp_path / "a.parquet")


def test_values_that_all_conversations_have_are_kept_with_the_tokenizer(tmp_path: Path) -> None:
    template = "{% if deep is defined and not deep %}plain {% endif %}{{ mood }}" + CHATML
    tokenizer = write_chat_folder(tmp_path / "model", template)
    rows = [
        {"messages": [ASK, ANSWER], "chat_template_kwargs": {"deep": False, "mood": str(n)}}
        for n in range(2)
    ]
    lines = write_lines(tmp_path / "chats.jsonl", rows)
    found = prepared_from(tmp_path, tokenizer, lines)
    assert shown(found)[0].startswith("plain 0<|im_start|>user")
    assert found.tokenizer.files.template_values() == {"deep": False}
    lines = write_lines(
        tmp_path / "more.jsonl",
        [rows[0], {"messages": [ASK, ANSWER], "chat_template_kwargs": {"mood": "0"}}],
    )
    assert prepared_from(tmp_path, tokenizer, lines).tokenizer.files.template_values() == {
        "mood": "0"
    }
