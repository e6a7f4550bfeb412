"""Mutated inputs of every kind, for :mod:`tests.fuzz`: most are changed in their structure.

What is changed byte by byte mostly ends at a format's first check. So values, types, keys, depths
and sizes are changed and written in the format again, with its lengths and digests made right.
"""

import copy
import json
import random
import re
import shutil
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pyarrow
import pyarrow.parquet
import yaml
from safetensors.numpy import save

from moefold.checkpoint import manifest
from moefold.checkpoint.manifest import with_digest
from moefold.cli.main import main
from moefold.config.load import load
from moefold.data.config import BpeTokenizer, Data
from moefold.data.index import IndexedDataset
from moefold.data.prepare import prepare
from moefold.data.tokenizer import train
from moefold.mesh.config import Sizes
from moefold.planner.hardware import MACHINE_FILE_VERSION
from moefold.run import load_run
from moefold.training.routing_trace import iter_figures

STATUSES = {0, 1, 2, 3, 75}
DATA = Path(__file__).parent / "data"
DIGEST = re.compile(rb'\{\n "sha256": "[0-9a-f]{64}"')
CANARY = "executed"
"""A file that hostile inputs would make if anything of them were run."""
TOKENIZER = train(BpeTokenizer(vocab=300), lambda size: iter(["a text of few words"] * 9)).text
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}"
)
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e300, -1e-300, float("nan"), "", "x", "\0",
    "x" * 5000, [], {}, [[]], [None], {"a": {}}, "../../etc/passwd", "/dev/zero", "/proc/self/mem",
    "~nobody", "*", "é" * 40, "9" * 400, {"kind": "x"}, [1] * 200,
)  # fmt: skip
EXECUTE = (
    f'!!python/object/apply:os.system ["touch {CANARY}"]',
    f"{{{{ cycler.__init__.__globals__.os.system('touch {CANARY}') }}}}",
    f"__import__('os').system('touch {CANARY}')",
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
)
SPOILT = (b"", b"\0" * 9, b"[" * 20_000, b'"text"', b"\xff\xfe", b"[1]", b"{}", b"9" * 5000)
TIERS = ("tp2 ep2", "pp2 ep2", "cp2 ep4", "pp2 vpp2", "tp2 cp2 pp2 ep2 etp2", "dp2 ep8", "ep8 etp1")
"""Layouts of which one number is changed."""
FIELDS = {
    "stages": ("Et*2|t*2L", "Etttt|(ttt)L", "Et|m|L", "E|tttt|L"),
    "schedule": ("zb_h1", "dualpipe_v", "gpipe", "1f1b", "{group: 0}", "{kind: interleaved}"),
    "zero": (-1, 0, 1, 2, 3, 99, "x"),
    "dispatch": ("padded", "{kind: spread, max_rows: 1}", "alltoall", "{}", "{kind: [1]}"),
    "recompute": ("full", "{kind: auto, limit: 9GB}", "{kind: auto, limit: -1}", "[]", "none"),
    "order": ("tp-cp-ep-dp-pp", "pp-tp", 1),
    "clones": (0, 1, 10**9, "{count: 2}"),
    "offload": ("{}", "true", "{optimizer: 2.0}"),
    "graphs": ("true", "{kind: full}", 3),
}
PIECES = (
    "{% for x in range(10**9) %}{% endfor %}", "{{ 'x' * 10**9 }}", "{{ messages[9] }}",
    "{{ messages | tojson }}", "{{ messages.content.foo.bar }}", "{{ raise_exception('no') }}",
    "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 'x' %}", "{{ (1, 'a') | sort }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages[::-1] }}", "{{ 1 / 0 }}",
    "{{ '%s' % messages }}", "{{ '%999999999d' % 1 }}", "{{ ''.__class__.__mro__ }}",
    "{{ 10**10**10 }}", "{{ messages | map(attribute='role') | join(',') }}", "{% break %}",
    "{% include 'a' %}", "{% import 'os' as os %}", "{{ strftime_now('%' * 9) }}", "\ud800",
    "{% if messages is string %}{{ bos_token }}{% else %}{{ eos_token }}{% endif %}", "\0",
    "{{ messages | indent(10**9) }}", "{{ tools }}", "{{ undefined.x }}", *EXECUTE,
)  # fmt: skip
"""What takes the place of a part of a template."""


class Input(NamedTuple):
    """A mutated input, which lies in a folder."""

    parses: bool
    """Whether its format can be read, so that what is in it comes under scrutiny."""
    use: Callable[[], object]
    """Gives it to the program."""


# ------------------------------------------------------------------------------ mutations


def mutated_bytes(draw: random.Random, data: bytes) -> bytes:
    """Return bytes with some of them changed, cut, doubled or moved."""
    if draw.random() < 0.1:
        return draw.choice(SPOILT)
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(out) + 1)
        length = draw.choice((1, 2, 8, 64))
        way = draw.randrange(6)
        if way == 0:
            out[at : at + 1] = bytes([draw.randrange(256)])
        elif way == 1:
            del out[at : at + length]
        elif way == 2:
            out[at:at] = bytes(draw.randrange(256) for _ in range(length))
        elif way == 3:
            out[at:at] = out[at : at + length]
        elif way == 4:
            out[at : at + length] = draw.choice((b"\xff", b"\0", b"\x7f")) * length
        else:
            del out[at:]
    return bytes(out)


def other_value(draw: random.Random, value: Any) -> Any:
    """Return a value that is near another, of another type, deeper, larger or hostile."""
    way = draw.randrange(8)
    if way == 0 and isinstance(value, int | float):
        return draw.choice((value + 1, value - 1, -value, value * 10**6, value / 3, float(value)))
    if way == 0 and isinstance(value, str):
        return draw.choice((value[:-1], value * 2, value.upper(), value[::-1], f" {value}"))
    if way == 0 and isinstance(value, list):
        return draw.choice((value * 3, value[:-1], value[::-1], value * 500))
    if way == 1:
        return draw.choice((str(value), [value], {"kind": value}, [value, value], None))
    if way == 2:
        deep = value
        for _ in range(draw.choice((3, 60, 200))):
            deep = [deep] if draw.random() < 0.5 else {"a": deep}
        return deep
    if way == 3:
        return draw.choice(EXECUTE)
    return copy.deepcopy(draw.choice(HOSTILE))


def mutated_value(draw: random.Random, value: Any) -> Any:
    """Return plain data with some values replaced, removed, renamed, moved or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 2, 3))):
        holder: Any = value
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw.choice(keys)
            if isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.7:
                holder = holder[key]
                continue
            way = draw.randrange(7)
            if way == 0:
                del holder[key]
            elif way == 1 and isinstance(holder, dict):
                holder[f"{key}_"] = holder.pop(key)
            elif way == 2:
                holder[key] = copy.deepcopy(holder[draw.choice(keys)])
            else:
                holder[key] = other_value(draw, holder[key])
            break
    return value


def mutated_json(draw: random.Random, value: Any) -> bytes:
    """Return JSON with changed values, or with changed bytes."""
    if draw.random() < 0.85:
        return json.dumps(mutated_value(draw, value)).encode()
    return mutated_bytes(draw, json.dumps(value).encode())


def mutated_parts(draw: random.Random, parts: Sequence[str]) -> str:
    """Return a text of which some parts are left out, doubled, moved or replaced."""
    found = list(parts)
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(len(found) or 1)
        way = draw.randrange(4)
        if way == 0 and found:
            del found[at]
        elif way == 1 and found:
            found.insert(draw.randrange(len(found)), found[at])
        else:
            found.insert(at, draw.choice(PIECES))
    return "".join(found)


def reads(read: Callable[[Any], object], data: Any) -> bool:
    """Return whether a reader of a format takes data."""
    with suppress(Exception):
        read(data)
        return True
    return False


# ---------------------------------------------------------------------------------- kinds


def command(*words: str) -> None:
    """Run a command; an unknown status is an error."""
    try:
        status = main(list(words))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    if status not in STATUSES:
        raise AssertionError(f"status {status} of {words}")


RUN: dict[str, Any] = {
    "name": "a",
    "model": {
        "family": "qwen3_moe",
        "shape": {
            "hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "experts": 4, "top_k": 2,
            "expert_width": 16,
        },
        "balance": [{"kind": "aux"}, {"kind": "z"}],
        "router": {"kind": "sinkhorn", "rounds": 4},
    },
    "data": {
        "seq": 16,
        "tokenizer": {"kind": "bpe", "vocab": 300},
        "train": [{"source": "text", "files": ["*.txt"], "holdout": 0.1, "weight": 2.0}],
    },
    "optim": {"kind": "muon", "lr": 0.01, "schedule_lr": {"kind": "wsd", "warmup": 2}},
    "train": {"steps": 8, "batch": 4, "micro_batch": 2, "precision": "fp32"},
    "layout": {"sizes": "tp1", "zero": 1, "recompute": {"kind": "auto"}},
    "watch": {"checkpoint": {"every": 3}, "evaluate": None, "sample": {"prompts": ["a"]}},
}  # fmt: skip
FOLDER: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 300,
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e4,
    "moe_intermediate_size": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
}  # fmt: skip
MACHINE: dict[str, Any] = {
    "form": MACHINE_FILE_VERSION, "name": "x", "fp32": 1e11, "bf16": 1e11, "bandwidth": 1e10,
    "memory_bytes": 1 << 34, "rates": {"bf16": {"gemm": 0.5, "memory": 0.5, "launch_s": 1e-5}},
}  # fmt: skip


def run_files(draw: random.Random, at: Path) -> Input:
    """Run files."""
    path = at / "run.yaml"
    if draw.random() < 0.85:
        text = yaml.safe_dump(mutated_value(draw, RUN), allow_unicode=True)
        path.write_bytes(text.replace("'!!python", "!!python").encode("utf-8", "replace"))
    else:
        path.write_bytes(mutated_bytes(draw, yaml.safe_dump(RUN).encode()))
    return Input(reads(yaml.safe_load, path.read_bytes()), lambda: load_run(path))


def layouts(draw: random.Random, at: Path) -> Input:
    """Axis sizes, stages, numbers of ranks and other fields of layouts."""
    axes = draw.choice(TIERS).split()
    for _ in range(draw.choice((0, 1, 1, 2))):
        sizes = (0, 1, 2, 3, 7, 8, 10**6, 10**7)
        name = draw.choice(("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "tp", "x"))
        axes = [axis for axis in axes if axis.rstrip("0123456789") != name]
        axes.append(f"{name}{draw.choice(sizes)}")
    words = []
    for name in draw.sample(sorted(FIELDS), draw.randint(0, 2)):
        value = str(draw.choice(FIELDS[name]))
        if draw.random() < 0.3:
            value = json.dumps(draw.choice(HOSTILE[:20]))
        elif name == "stages":
            value = "".join(mutated_parts(draw, value)) if draw.random() < 0.2 else value
        words.append(f"layout.{name}={value}")
    world = str(draw.choice((1, 2, 4, 8, 16, 64, 999_983, 10**6, 10**9, -1, 0)))
    given = " ".join(axes)
    parses = reads(Sizes.parse, given) and all(
        reads(yaml.safe_load, word.partition("=")[2]) for word in words
    )
    use = lambda: command("explain", "tiny", "--layout", given, "--world", world, *words)  # noqa: E731
    return Input(parses, use)


def folders(draw: random.Random, at: Path) -> Input:
    """Hugging Face folders."""
    (at / "tokenizer.json").write_text(TOKENIZER)
    (at / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    content = mutated_json(draw, FOLDER)
    (at / "config.json").write_bytes(content)
    return Input(reads(json.loads, content), lambda: load_run(at))


def data_of(at: Path, source: dict[str, Any], tokenizer: Any = None) -> Data:
    """Return the record of data with one source."""
    tokenizer = tokenizer or {"kind": "bpe", "vocab": 260}
    return load(Data, {"seq": 128, "tokenizer": tokenizer, "train": [source]}).record


def templates(draw: random.Random, at: Path) -> Input:
    """Chat templates, and the conversations that they write."""
    (at / "tokenizer.json").write_text(TOKENIZER)
    if draw.random() < 0.85:
        template = mutated_parts(draw, re.findall(r"{%.*?%}|{{.*?}}|[^{]+", TEMPLATE))
    else:
        template = mutated_bytes(draw, TEMPLATE.encode()).decode("utf-8", "replace")
    config = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    talk = mutated_value(draw, talk) if draw.random() < 0.4 else talk
    (at / "chat.jsonl").write_text(json.dumps(talk) + "\n")
    source = {"source": "chat", "files": [str(at / "chat.jsonl")]}
    unmarked = re.sub(r"{% (end)?generation %}", "", template)
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)

    def use() -> None:
        prepare(data_of(at, source, {"kind": "file", "path": str(at)}), at / "out")

    return Input(reads(environment.parse, unmarked), use)


def tokenizers(draw: random.Random, at: Path) -> Input:
    """Files of tokenizers."""
    settings: Any = {"eos_token": "<|endoftext|>", "bos_token": None, "added_tokens_decoder": {}}
    contents = {"tokenizer.json": json.loads(TOKENIZER), "tokenizer_config.json": settings}
    spoilt = draw.choice((*contents, "both"))
    parses = True
    for name, value in contents.items():
        data = mutated_json(draw, value) if spoilt in (name, "both") else json.dumps(value).encode()
        (at / name).write_bytes(data)
        parses = parses and reads(json.loads, data)
    (at / "a.txt").write_text("some text of a few words")
    source = {"source": "text", "files": [str(at / "a.txt")]}

    def use() -> None:
        prepare(data_of(at, source, {"kind": "file", "path": str(at)}), at / "out")

    return Input(parses, use)


def jsonl(draw: random.Random, at: Path) -> Input:
    """JSON lines."""
    lines = [json.dumps({"text": f"line {i} of some words"}).encode() for i in range(6)]
    at_line = draw.randrange(6)
    lines[at_line] = mutated_json(draw, {"text": "some words", "more": [1, {"a": 2}]})
    content = b"\n".join(lines)
    content = mutated_bytes(draw, content) if draw.random() < 0.1 else content
    (at / "a.jsonl").write_bytes(content)
    bad = draw.choice(("refuse", "skip"))
    source = {"source": "jsonl", "files": [str(at / "*.jsonl")], "bad": bad}
    parses = all(reads(json.loads, line) for line in content.splitlines())
    return Input(parses, lambda: prepare(data_of(at, source), at / "o"))


def parquet(draw: random.Random, at: Path) -> Input:
    """Parquet files of other columns and types, and of changed pages and footers."""
    words: list[Any] = ["some words to read"] * 20
    columns: tuple[list[Any], ...] = (
        words, [1, 2], [None, "a"], [b"\xff"], [["a"]], [{"text": "a"}], [], [None], [True],
        [1e300], ["a" * 100_000], ["\0"], [""], [[["a"], None]],
    )  # fmt: skip
    names = draw.choice((["text"], ["text", "more"], ["Text"], ["text", "text"], [""], ["a.b"]))
    size = draw.choice((1, 3, 20))
    arrays = [pyarrow.array((draw.choice(columns) * size)[:size]) for _ in names]
    arrays[0] = pyarrow.array(words[:size]) if draw.random() < 0.6 else arrays[0]
    shortest = min(map(len, arrays))
    table = pyarrow.table([column[:shortest] for column in arrays], names)
    path = at / "a.parquet"
    compression = draw.choice(("snappy", "none", "gzip", "zstd"))
    pyarrow.parquet.write_table(
        table, path, row_group_size=draw.choice((1, 7, 100)), compression=compression
    )
    data = path.read_bytes()
    (footer,) = struct.unpack_from("<I", data, len(data) - 8)
    end = max(len(data) - 8 - footer, 5)
    way = draw.random()
    if way < 0.4:  # pages, with a footer that finds them
        changed = bytearray(data)
        for _ in range(draw.choice((1, 4, 16))):
            changed[draw.randrange(4, end)] = draw.randrange(256)
        path.write_bytes(changed)
    elif way < 0.6:
        path.write_bytes(mutated_bytes(draw, data))
    source = {"source": "parquet", "files": [str(path)]}
    parses = reads(pyarrow.parquet.ParquetFile, path)
    return Input(parses, lambda: prepare(data_of(at, source), at / "out"))


def manifests(draw: random.Random, at: Path) -> Input:
    """Manifests of checkpoints, mostly with the digest that belongs to them."""
    stored = DATA / "checkpoint_v1" / "step-00000007"
    folder = at / "step-00000007"
    folder.mkdir()
    for file in stored.iterdir():
        if file.name != manifest.FILE:
            shutil.copyfile(file, folder / file.name)
    raw = (stored / manifest.FILE).read_bytes()
    parses = draw.random() < 0.85
    if parses:
        digest, *_ = content = json.loads(raw)
        text = json.dumps({digest: content.pop(digest)} | mutated_value(draw, content), indent=1)
        parses = DIGEST.match(text.encode()) is not None
        raw = with_digest(text.encode()) if parses else text.encode()
    else:
        raw = mutated_bytes(draw, raw)
    (folder / manifest.FILE).write_bytes(raw)
    what = draw.choice(("inspect", "verify"))
    return Input(parses, lambda: command("checkpoint", what, str(folder)))


def token_files(draw: random.Random, at: Path) -> Input:
    """Token files and their metadata; most of the indices have the sizes that they state."""
    lengths, codes = [3, 1, 7, 2], {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
    code = draw.choice((*codes, 8, 8, 6, 7, 0, 255))
    width = codes.get(code, 2)
    offsets = [width * sum(lengths[:i]) for i in range(len(lengths))]
    marks = list(range(len(lengths) + 1))
    numbers = (-1, 0, 1, 2**31 - 1, -(2**31), 10**6)
    for values in draw.sample((lengths, offsets, marks), draw.choice((0, 1, 1, 2))):
        way = draw.randrange(4)
        place = draw.randrange(len(values))
        if way == 0:
            del values[place]
        elif way == 1:
            values.insert(place, values[place])
        else:
            values[place] = draw.choice(numbers)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(marks))
    index = header + b"".join(
        np.array(values, dtype).tobytes()
        for values, dtype in ((lengths, "<i4"), (offsets, "<i8"), (marks, "<i8"))
    )
    is_whole = draw.random() < 0.85
    (at / "x.idx").write_bytes(index if is_whole else mutated_bytes(draw, index))
    ids = np.array(draw.choices((0, 1, 5, 127, 255, 299, -1), k=13))
    (at / "x.bin").write_bytes(ids.astype(f"<i{width}").tobytes()[: draw.choice((99, 99, 20, 0))])
    facts = draw.random() < 0.3
    if facts:
        (at / "x.json").write_bytes(mutated_json(draw, {"tokenizer": "a" * 64, "tokens": 13}))

    def use() -> None:
        if facts:
            command("data", "inspect", str(at / "x"))
        indexed = IndexedDataset(at / "x")
        for i in range(min(len(indexed), 50)):
            indexed.document(i)

    return Input(is_whole, use)


def routing_records(draw: random.Random, at: Path) -> Input:
    """Recordings of routers' choices: other tensors and notes, in a header of its true length."""
    parses = True
    for step in range(2):
        path = at / f"step-{step:08d}" / "0-of-1.safetensors"
        path.parent.mkdir()
        tokens = draw.choice((5, 5, 5, 0, 4))
        kept = draw.choice((np.int32, np.int32, np.int64, np.uint8, np.float32, np.bool_))
        tensors = {
            "token": np.arange(tokens),
            "id": np.arange(5).astype(draw.choice((np.int64, np.int64, np.float32))),
            "layers.0": np.full((5, draw.choice((2, 2, 0, 9))), draw.choice((0, 3, 4)), kept),
        }
        if draw.random() < 0.2:
            del tensors[draw.choice(sorted(tensors))]
        experts = draw.choice(HOSTILE) if draw.random() < 0.3 else 4
        data = save(tensors, {"choices": json.dumps({"layers.0": experts})})
        (size,) = struct.unpack_from("<Q", data)
        way = draw.random()
        if way < 0.5:
            header = json.dumps(mutated_value(draw, json.loads(data[8 : 8 + size]))).encode()
            data = struct.pack("<Q", len(header)) + header + data[8 + size :]
        elif way < 0.65:
            data = mutated_bytes(draw, data)
            parses = False
        path.write_bytes(data)
    return Input(parses, lambda: list(iter_figures(at, tokens=True)))


def run_folders(draw: random.Random, at: Path) -> Input:
    """Folders of runs."""
    contents: dict[str, Any] = {
        "metrics.jsonl": {"step": 1, "lm_loss": 3.0, "val/a/loss": 2.0, "tokens": 9, "mfu": 0.1},
        "expert_load.jsonl": {"step": 1, "load": {"0": [0.5, 0.5], "1": [1.0]}},
        "baselines.json": {"bigram": 2.5},
        "events.jsonl": {"event": "start", "step": 0, "time": 1.0, "loss": "cross_entropy"},
    }
    spoilt = draw.choice(sorted(contents))
    parses = True
    for name, value in contents.items():
        lines = [json.dumps(value).encode()]
        if name == spoilt:
            lines.insert(draw.randrange(2), mutated_json(draw, value))
            lines = lines[:1] if name.endswith(".json") else lines
            parses = all(reads(json.loads, line) for line in lines)
        (at / name).write_bytes(b"\n".join(lines) + b"\n")
    more = draw.choice(((), ("--json",)))
    return Input(parses, lambda: command("report", str(at), *more))


def plans(draw: random.Random, at: Path) -> Input:
    """Inputs of plans: clusters, measured machines, numbers."""
    content = mutated_json(draw, MACHINE)
    (at / "m.json").write_bytes(content)
    cluster = draw.choice((str(at / "m.json"), "h100x0", "h100x99999999999", "x8", "h100x8", ""))
    words: tuple[str, ...] = ("--layout", draw.choice(("tp9", "pp0", "tp10000000", "x", "ep2")))
    if draw.random() < 0.6:
        number = draw.choice(("-1", "0", "1e300", "nan", "inf", "x", "9" * 30, "1e-300", "7"))
        name = draw.choice(("batch", "seq", "memory", "load", "tokens", "price"))
        words = (f"--{name}", number)
    parses = reads(json.loads, content) if "json" in cluster else "x" in cluster[1:]
    return Input(parses, lambda: command("plan", "tiny", "--cluster", cluster, *words))


KINDS: dict[str, Callable[[random.Random, Path], Input]] = {
    each.__name__: each
    for each in (
        run_files, layouts, folders, templates, tokenizers, jsonl, parquet, manifests, token_files,
        routing_records, run_folders, plans,
    )
}  # fmt: skip
