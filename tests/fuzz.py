"""Mutated inputs of every kind: a message and a status, never a traceback, a hang or gigabytes.

``python -m tests.fuzz [--tries N] [--seed S]`` (``make fuzz``) draws a seed, prints it, and tries N
inputs in one process; only after a crash, or a hang that no signal interrupts, the rest is tried in
another. A failure is printed with its kind, number and seed, which make the same input again.
"""

import argparse
import json
import os
import random
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import yaml
from safetensors.numpy import save_file

from moefold.checkpoint import manifest
from moefold.checkpoint.manifest import with_digest
from moefold.cli.main import main
from moefold.config.load import load
from moefold.data.config import BpeTokenizer, Data
from moefold.data.index import IndexedDataset, IndexWriter
from moefold.data.prepare import prepare
from moefold.data.tokenizer import train
from moefold.run import load_run
from moefold.training.routing_trace import iter_figures

SECONDS, GIGABYTE = 5.0, 1 << 20
"""Bounds of an input: processor time, and growth of the process's memory in KiB."""
STATUSES = {0, 1, 2, 3, 75}
DATA = Path(__file__).parent / "data"
DIGEST = re.compile(rb'\{\n "sha256": "[0-9a-f]{64}"')
CANARY = "executed"
"""A file that hostile inputs would make if anything of them were run."""
ENDED = 120
"""Seconds after which a worker that no signal reaches is ended."""
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


class Failure(NamedTuple):
    """An input that was not answered as it should be."""

    kind: str
    number: int
    what: str


class Hang(BaseException):
    """An input took more than its time; no code catches this by accident."""


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


def mutated_value(draw: random.Random, value: Any) -> Any:
    """Return plain data with some values replaced, removed, renamed or doubled."""
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
            way = draw.randrange(5)
            if way == 0:
                del holder[key]
            elif way == 1 and isinstance(holder, dict):
                holder[f"{key}_"] = holder.pop(key)
            elif way == 2:
                holder[key] = draw.choice(EXECUTE)
            else:
                holder[key] = draw.choice(HOSTILE)
            break
    return value


def mutated_json(draw: random.Random, value: Any) -> bytes:
    """Return JSON with changed values, or with changed bytes."""
    if draw.random() < 0.7:
        return json.dumps(mutated_value(draw, value)).encode()
    return mutated_bytes(draw, json.dumps(value).encode())


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


def run_files(draw: random.Random, at: Path) -> None:
    """Run files."""
    path = at / "run.yaml"
    if draw.random() < 0.6:
        text = yaml.safe_dump(mutated_value(draw, RUN), allow_unicode=True)
        path.write_bytes(text.replace("'!!python", "!!python").encode("utf-8", "replace"))
    else:
        path.write_bytes(mutated_bytes(draw, yaml.safe_dump(RUN).encode()))
    load_run(path)


def layouts(draw: random.Random, at: Path) -> None:
    """Axis sizes, stages, numbers of ranks and other fields of layouts."""
    axis = [
        f"{a}{draw.choice((0, 1, 2, 3, 7, 8, 10**6, 10**7))}"
        for a in draw.sample(("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "x"), draw.randint(1, 4))
    ]
    stages = "".join(draw.choice("EtLm|()*0123456789, ") for _ in range(draw.randint(0, 20)))
    fields = [
        f"layout.stages={stages}",
        f"layout.schedule={draw.choice(('zb_h1', 'dualpipe_v', 'gpipe', 'x', '{group: 0}'))}",
        f"layout.zero={draw.choice((-1, 0, 3, 99, 'x'))}",
        f"layout.dispatch={draw.choice(('padded', '{kind: spread, max_rows: 1}', 'x', '{}'))}",
        f"layout.recompute={draw.choice(('full', '{kind: auto, limit: 9GB}', 'x', '[]'))}",
        f"layout.{draw.choice(('order', 'clones', 'offload', 'graphs', 'x'))}="
        + json.dumps(draw.choice(HOSTILE[:20])),
    ]
    words = draw.sample(fields, draw.randint(0, 2))
    world = str(draw.choice((1, 2, 3, 64, 999_983, 10**6, 10**9, -1, 0)))
    command("explain", "tiny", "--layout", " ".join(axis), "--world", world, *words)


def folders(draw: random.Random, at: Path) -> None:
    """Hugging Face folders."""
    (at / "tokenizer.json").write_text(TOKENIZER)
    (at / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (at / "config.json").write_bytes(mutated_json(draw, FOLDER))
    load_run(at)


def data_of(at: Path, source: dict[str, Any], tokenizer: Any = None) -> Data:
    """Return the record of data with one source."""
    tokenizer = tokenizer or {"kind": "bpe", "vocab": 260}
    return load(Data, {"seq": 128, "tokenizer": tokenizer, "train": [source]}).record


def templates(draw: random.Random, at: Path) -> None:
    """Chat templates, and the conversations that they write."""
    (at / "tokenizer.json").write_text(TOKENIZER)
    template = mutated_bytes(draw, TEMPLATE.encode()).decode("utf-8", "replace")
    if draw.random() < 0.2:
        template += draw.choice(EXECUTE)
    config = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    talk = mutated_value(draw, talk) if draw.random() < 0.4 else talk
    (at / "chat.jsonl").write_text(json.dumps(talk) + "\n")
    source = {"source": "chat", "files": [str(at / "chat.jsonl")]}
    prepare(data_of(at, source, {"kind": "file", "path": str(at)}), at / "out")


def tokenizers(draw: random.Random, at: Path) -> None:
    """Files of tokenizers."""
    (at / "tokenizer.json").write_bytes(mutated_json(draw, json.loads(TOKENIZER)))
    settings = {"eos_token": "<|endoftext|>", "bos_token": None, "added_tokens_decoder": {}}
    (at / "tokenizer_config.json").write_bytes(mutated_json(draw, settings))
    (at / "a.txt").write_text("some text of a few words")
    source = {"source": "text", "files": [str(at / "a.txt")]}
    prepare(data_of(at, source, {"kind": "file", "path": str(at)}), at / "out")


def jsonl(draw: random.Random, at: Path) -> None:
    """JSON lines."""
    lines = [json.dumps({"text": f"line {i} of some words"}).encode() for i in range(6)]
    at_line = draw.randrange(6)
    lines[at_line] = mutated_json(draw, {"text": "some words", "more": [1, {"a": 2}]})
    content = b"\n".join(lines)
    (at / "a.jsonl").write_bytes(mutated_bytes(draw, content) if draw.random() < 0.3 else content)
    bad = draw.choice(("refuse", "skip"))
    prepare(data_of(at, {"source": "jsonl", "files": [str(at / "*.jsonl")], "bad": bad}), at / "o")


def parquet(draw: random.Random, at: Path) -> None:
    """Parquet files."""
    import pyarrow
    from pyarrow import parquet as files

    path = at / "a.parquet"
    others: tuple[list[Any], ...] = ([1, 2], [None, "a"], [b"\xff"], [["a"]])
    values = ["some words to read"] * 20 if draw.random() < 0.8 else draw.choice(others)
    files.write_table(pyarrow.table({"text": values}), path)
    if draw.random() < 0.9:
        path.write_bytes(mutated_bytes(draw, path.read_bytes()))
    prepare(data_of(at, {"source": "parquet", "files": [str(path)]}), at / "out")


def manifests(draw: random.Random, at: Path) -> None:
    """Manifests of checkpoints, with their digest made right in half of the inputs."""
    stored = DATA / "checkpoint_v1" / "step-00000007"
    folder = at / "step-00000007"
    folder.mkdir()
    for file in stored.iterdir():
        if file.name != manifest.FILE:
            shutil.copyfile(file, folder / file.name)
    raw = (stored / manifest.FILE).read_bytes()
    if draw.random() < 0.5:
        content = mutated_value(draw, json.loads(raw))
        text = json.dumps(content, indent=1).encode()
        raw = with_digest(text) if DIGEST.match(text) else text
    else:
        raw = mutated_bytes(draw, raw)
    (folder / manifest.FILE).write_bytes(raw)
    command("checkpoint", draw.choice(("inspect", "verify")), str(folder))


def token_files(draw: random.Random, at: Path) -> None:
    """Token files and their metadata."""
    with IndexWriter(at / "x", 300) as writer:
        for n in (3, 1, 7, 2):
            writer.add(np.arange(n))
    name = draw.choice(("x.idx", "x.idx", "x.bin"))
    (at / name).write_bytes(mutated_bytes(draw, (at / name).read_bytes()))
    if draw.random() < 0.3:
        (at / "x.json").write_bytes(mutated_json(draw, {"tokenizer": "a" * 64, "tokens": 13}))
        command("data", "inspect", str(at / "x"))
    indexed = IndexedDataset(at / "x")
    for i in range(min(len(indexed), 50)):
        indexed.document(i)


def routing_records(draw: random.Random, at: Path) -> None:
    """Recordings of routers' choices."""
    for step in range(2):
        path = at / f"step-{step:08d}" / "0-of-1.safetensors"
        path.parent.mkdir()
        chosen = np.zeros((5, 2), np.int32)
        tensors = {"token": np.arange(5), "id": np.arange(5), "layers.0": chosen}
        experts = draw.choice(HOSTILE) if draw.random() < 0.2 else 4
        choices = json.dumps({"layers.0": experts})
        save_file(tensors, path, {"choices": choices})
        if draw.random() < 0.6:
            path.write_bytes(mutated_bytes(draw, path.read_bytes()))
    list(iter_figures(at, tokens=True))


def run_folders(draw: random.Random, at: Path) -> None:
    """Folders of runs."""
    contents: dict[str, Any] = {
        "metrics.jsonl": {"step": 1, "lm_loss": 3.0, "val/a/loss": 2.0, "tokens": 9, "mfu": 0.1},
        "expert_load.jsonl": {"step": 1, "load": {"0": [0.5, 0.5], "1": [1.0]}},
        "baselines.json": {"bigram": 2.5},
        "events.jsonl": {"event": "start", "step": 0, "time": 1.0, "loss": "cross_entropy"},
    }
    spoilt = draw.choice(sorted(contents))
    for name, value in contents.items():
        data = mutated_json(draw, value) if name == spoilt else json.dumps(value).encode()
        (at / name).write_bytes(data + b"\n")
    command("report", str(at), *draw.choice(((), ("--json",))))


def plans(draw: random.Random, at: Path) -> None:
    """Inputs of plans: clusters, measured machines, numbers."""
    rates = {"name": "x", "fp32": 1e11, "bf16": 1e11, "bandwidth": 1e10, "rows": [[1, 2.0]]}
    (at / "m.json").write_bytes(mutated_json(draw, rates))
    cluster = draw.choice(("m.json", "h100x0", "h100x99999999999", "x8", "h100x", "", "cpux2"))
    words = [
        f"--{draw.choice(('batch', 'seq', 'memory', 'load', 'tokens', 'price'))}",
        draw.choice(("-1", "0", "1e300", "nan", "inf", "x", "9" * 30, "1e-300")),
    ]
    if draw.random() < 0.7:
        cluster = cluster if draw.random() < 0.5 else "h100x8"
    else:
        words = ["--layout", draw.choice(("tp9", "pp0", "tp10000000", "x"))]
        cluster = "h100x1" if cluster == "h100x8" else cluster
    command(
        "plan", "tiny", "--cluster", str(at / cluster) if "json" in cluster else cluster, *words
    )


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    each.__name__: each
    for each in (
        run_files, layouts, folders, templates, tokenizers, jsonl, parquet, manifests, token_files,
        routing_records, run_folders, plans,
    )
}  # fmt: skip


# -------------------------------------------------------------------------------- running


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`Hang` after so many seconds of processor time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def attempt(kind: str, number: int, seed: int) -> Failure | None:
    """Try one input in a folder of its own; return how it failed, or None."""
    draw = random.Random(f"{seed} {kind} {number}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out, err, home = StringIO(), StringIO(), Path.cwd()
    problem = ""
    with tempfile.TemporaryDirectory(prefix="moefold-fuzz-") as folder:
        os.chdir(folder)
        try:
            with redirect_stdout(out), redirect_stderr(err), limited(SECONDS):
                KINDS[kind](draw, Path(folder))
        except (ValueError, OSError):
            pass
        except Hang:
            problem = f"hang: more than {SECONDS} s\n" + traceback.format_exc(limit=-6)
        except BaseException:
            problem = traceback.format_exc(limit=-8)
        finally:
            os.chdir(home)
        if Path(folder, CANARY).exists() or (home / CANARY).exists():
            problem = "something in the input was executed"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > GIGABYTE:
        problem = problem or f"{grown / GIGABYTE:.1f} GiB"
    if "Traceback" in err.getvalue():
        problem = problem or err.getvalue()
    return Failure(kind, number, problem) if problem else None


def attempts(tries: int) -> list[tuple[str, int]]:
    """Return kind and number of each input, the kinds in turn."""
    names = list(KINDS)
    return [(names[i % len(names)], i // len(names)) for i in range(tries)]


def work(seed: int, tries: int, first: int, notes: Path) -> None:
    """Try inputs from ``first`` on; note each before it is tried, and its failure."""
    with notes.open("a") as file:
        for at, (kind, number) in list(enumerate(attempts(tries)))[first:]:
            file.write(json.dumps({"at": at}) + "\n")
            file.flush()
            signal.alarm(ENDED)  # ends the process where no exception can be raised
            failure = attempt(kind, number, seed)
            signal.alarm(0)
            if failure is not None:
                file.write(json.dumps({"failed": failure}) + "\n")
                file.flush()


def run(seed: int, tries: int) -> list[Failure]:
    """Try all inputs in a process, and in another after each crash; return the failures."""
    failures: list[Failure] = []
    planned = attempts(tries)
    first = 0
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        while first < tries:
            notes.write_text("")
            words = ["--seed", str(seed), "--tries", str(tries), "--from", str(first)]
            status = subprocess.run([sys.executable, "-m", "tests.fuzz", *words, "--notes", notes])
            lines = [json.loads(line) for line in notes.read_text().splitlines()]
            failures += [Failure(*line["failed"]) for line in lines if "failed" in line]
            reached = max((line["at"] for line in lines if "at" in line), default=first)
            first = reached + 1
            if status.returncode:
                what = f"the process ended with status {status.returncode}"
                failures.append(Failure(*planned[reached], what))
    return failures


def cli() -> int:
    """Run the command line; the exit status is 1 if an input failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tries", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--only", metavar="KIND:NUMBER", help="try one input, with its traceback")
    parser.add_argument("--from", dest="first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.notes is not None:
        work(args.seed, args.tries, args.first, args.notes)
        return 0
    if args.only:
        kind, _, number = args.only.partition(":")
        failure = attempt(kind, int(number), args.seed)
        print(failure.what if failure else "answered as it should be")
        return int(failure is not None)
    print(f"seed {args.seed}, {args.tries} inputs of {len(KINDS)} kinds", flush=True)
    started = time.monotonic()
    failures = run(args.seed, args.tries)
    for failure in failures:
        print(f"\n{failure.kind}:{failure.number}  (--seed {args.seed})\n{failure.what}")
    print(f"{len(failures)} failed, {time.monotonic() - started:.0f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(cli())
