"""Every command with paths and files of no use: a message and a status, never a traceback.

`FUZZ_TRIES=2000 pytest tests/cpu/test_cli_fuzz.py` tries as often as a release asks for.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moefold.cli.main import INTERRUPTED, main
from moefold.data.config import BpeTokenizer
from moefold.data.tokenizer import train
from tests import hostile
from tests.cpu.runs import raw_run

TRIES = int(os.environ.get("FUZZ_TRIES", "20"))
STATUSES = {0, 1, 2, 3, 75}
LONG = "n" * 300
TOKENIZER = train(BpeTokenizer(vocab=300), lambda size: iter(["some text of a few words"] * 9)).text
CONFIG = (
    '{"model_type": "mixtral", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 300, '
    '"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16, '
    '"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64}'
)
LINES = '{"step": 1, "lm_loss": 3.0, "val_loss": 2.0}'
TREE = {
    "metrics.jsonl": LINES,
    "expert_load.jsonl": '{"step": 1, "load": {"0": [0.5, 0.5]}}',
    "baselines.json": '{"bigram": 2.5}',
    "events.jsonl": '{"event": "start", "step": 0, "time": 1.0}',
    "config.json": CONFIG,
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": '{"eos_token": "<|endoftext|>", "bos_token": null, "vocab": 300}',
    "step-00000001/manifest.json": '{"format": "moefold", "version": 1, "tensors": {}}',
    "LATEST": "step-00000001",
    "tokens.idx": "MMIDIDX",
    "tokens.bin": "1234",
}

path = st.sampled_from(
    [
        "file", "folder", "given", "given/config.json", "given/tokenizer.json", "given/tokens",
        "given/step-00000001", "file/x", "given/tokens.idx/x", "loop", "loop/x", "full", "dangling",
        "new", "new/deep", LONG, f"{LONG}/x", f"folder/{LONG}", "d/" * 2100, "/proc/self/mem",
        "/proc/none/x", "/sys/x", "caf\udce9", "caf\udce9/x", "~nobody/x", ".", "..", "", " ",
        "a=b", "run.yaml", "bad.yaml", "given/metrics.jsonl", "*", "[", "**", "tiny",
    ]
)  # fmt: skip
text = path | st.sampled_from(["\udcff", "text", "\x00", "\x1b[31m"])


def words(*parts: str | st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    """Return command lines of fixed and drawn words."""
    drawn = [part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts]
    return st.tuples(*drawn).map(list)


taken = st.sampled_from(["text", "jsonl", "parquet"]).map("--{}".format)
commands = st.one_of(
    words("train", path, "--dry-run"),
    words("train", "run.yaml", "--folder", path, "--dry-run"),
    words("train", "run.yaml", "--folder", path, "--until", "99"),
    words("train", "run.yaml", "--folder", path, "--fork", path),
    words("train", "run.yaml", path.map('data.train=[{{source: text, files: ["{}"]}}]'.format)),
    words("train", "run.yaml", path.map('data.tokenizer={{kind: file, path: "{}"}}'.format)),
    words("demo", "--folder", st.sampled_from(["file/x", "loop/x", "/proc/none/x", LONG])),
    words("explain", path),
    words("explain", "run.yaml", path.map('uses=["{}"]'.format)),
    words("plan", path, "--cluster", "h100x8", "--html", path),
    words("plan", "tiny", "--cluster", "h100x1", "--html", path),
    words("report", path, "--html", path),
    words("report", "given", "--html", path),
    words("export", path, path),
    words("import", path, path),
    words("import", "given", path, "--weights", path),
    words("checkpoint", st.sampled_from(["inspect", "verify"]), path),
    words("data", "inspect", path, "--tokenizer", path),
    words("data", "inspect", path),
    words("data", "prepare", taken, path, "--folder", path),
    words("data", "prepare", "--text", "file", "--tokenizer", path, "--folder", "new"),
    words("sample", path, "--prompt", text),
    words("verify", path.filter(lambda name: name not in ("run.yaml", "tiny"))),
    words("bench", "bad.yaml", "--machine", path),
    words("doctor", "--need", text),
)


@contextmanager
def place(spoilt: str, content: bytes) -> Iterator[Path]:
    """Make a folder with something of every sort, one of its files spoilt, and work there."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("file").write_text("some words in a file\n")
            Path("folder").mkdir()
            Path("loop").symlink_to("loop")
            Path("full").symlink_to("/dev/full")
            Path("dangling").symlink_to("not-there")
            Path("bad.yaml").write_bytes(content)
            Path("run.yaml").write_text(yaml.safe_dump(raw_run(Path(folder))))
            for name, right in TREE.items():
                file = Path("given") / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content if name == spoilt else right.encode())
            yield Path(folder)
        finally:
            os.chdir(before)


def spoilt(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
    """Return the file's name with damaged forms of its content."""
    right = TREE[name]
    forms = hostile.tokenizers(right) if name == "tokenizer.json" else hostile.cut(right)
    if right.startswith("{") and name != "tokenizer.json":
        forms |= hostile.changed(right).map(lambda data: data + b"\n")
    return st.tuples(st.just(name), forms | hostile.odd)


def status(argv: list[str]) -> tuple[int, str]:
    """Return how a command line ended, and what it said."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            found = main(argv)
        except SystemExit as end:
            found = end.code if isinstance(end.code, int) else INTERRUPTED
    return found, err.getvalue()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@settings(
    max_examples=TRIES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(commands, st.sampled_from(sorted(TREE)).flatmap(spoilt))
def test_no_traceback(argv: list[str], damage: tuple[str, bytes]) -> None:
    with place(*damage) as folder:
        found, said = status(argv)
        assert found in STATUSES, said
        assert found != 2 or "error: " in said, said
        assert "Traceback" not in said
        left = [at.name for at in folder.rglob(".*") if at.is_dir() and not any(at.iterdir())]
        assert not left, f"{left} were left behind, empty"
