"""Preparation of text beside ``datasets.map``: processor time, wall time and memory.

The text is Python's standard library and installed packages, as JSON lines. Both read the same
file, tokenize it with the same ``tokenizer.json`` and write tokens: ours to token files, theirs
(``load_dataset`` and a batched ``map`` with the fast tokenizer of transformers) to Arrow files,
with one process and with one per core, of which the better counts for each figure. Commands
alternate, each in a process of its own. Processor time is that of a process and its children;
memory is the highest sum of their proportional set sizes, which is sampled, so what processes share
counts once. It is measured twice: with all pages, and without those of files, which the system can
drop (the peer maps its Arrow files). Other programs on the machine move wall time, and processor
time less. Linux; the peer's Python needs ``datasets`` and
``transformers`` (no torch).

    python bench/data_prepare.py --rounds 3 --peer-python /path/to/venv/bin/python --save
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moefold.data.config import BpeTokenizer
from moefold.data.tokenizer import train
from moefold.files import write_json
from moefold.training.machine import cpu_name

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "data_prepare.json"
VOCAB = 32_000
SAMPLE = 3_000_000
"""Characters on which the tokenizer is trained."""
SECONDS = 0.05
"""Time between two samples of memory."""
BOUNDS = {"processor_s": 0.75, "wall_s": 0.75, "peak_mb": 0.25, "peak_own_mb": 0.25}
PEER = """
import sys
import datasets
from transformers import AutoTokenizer

corpus, tokenizer_folder, out, processes = sys.argv[1:]
datasets.disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
data = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=out)


def encode(batch):
    found = tokenizer(
        batch["text"],
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in found["input_ids"]]}


processes = None if processes == "1" else int(processes)
done = data.map(encode, batched=True, num_proc=processes, remove_columns=["text"])
print(len(done))
"""


class Cost(NamedTuple):
    """What a command took."""

    processor_s: float
    """Processor time of the command and its children, in seconds."""
    wall_s: float
    peak_mb: float
    """Highest memory of all its processes together, in MB."""
    peak_own_mb: float
    """The same without pages of files."""


def write_corpus(file: Path, n_bytes: int) -> list[str]:
    """Write about ``n_bytes`` of text as JSON lines; return the texts that a tokenizer learns."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    paths = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    written = 0
    sample = list[str]()
    sampled = 0
    with file.open("w", encoding="utf-8") as out:
        for path in _each_once(paths):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if not text:
                continue
            if sampled < SAMPLE:
                sample.append(text)
                sampled += len(text)
            out.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
            if written >= n_bytes:
                return sample
    raise SystemExit(f"only {written / 1e6:.0f} MB of text are installed; choose --megabytes")


def _each_once(paths: Iterator[Path]) -> Iterator[Path]:
    """Yield paths; site-packages is below the standard library in some installations."""
    seen = set[Path]()
    for path in paths:
        if path not in seen:
            seen.add(path)
            yield path


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def memory_mb(pid: int) -> tuple[float, float]:
    """Return the memory of a process and its descendants in MB, and that without pages of files."""
    pages = {"Pss:": 0, "Pss_File:": 0}
    try:
        for member in family(pid):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                name, *values = line.split()
                if name in pages:
                    pages[name] += int(values[0])
    except (OSError, ValueError):  # one has ended
        return 0.0, 0.0
    return pages["Pss:"] / 1e3, (pages["Pss:"] - pages["Pss_File:"]) / 1e3


def run(command: Sequence[str | Path]) -> Cost:
    """Run a command and return what it took; raise if it fails."""
    before = os.times()
    began = time.perf_counter()
    peak = own = 0.0
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([str(c) for c in command], stdout=said, stderr=said, env=env)
        while process.poll() is None:
            all_pages, own_pages = memory_mb(process.pid)
            peak = max(peak, all_pages)
            own = max(own, own_pages)
            time.sleep(SECONDS)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{command[0]} failed:\n{said.read().decode()[-2000:]}")
    after = os.times()
    processor = after.children_user + after.children_system
    processor -= before.children_user + before.children_system
    return Cost(processor, time.perf_counter() - began, peak, own)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[Cost]]:
    """Return the costs of each program, by rounds."""
    corpus = folder / "corpus.jsonl"
    tokenizer = folder / "tokenizer"
    sample = write_corpus(corpus, args.megabytes * 1_000_000)
    tokenizer.mkdir()
    learned = train(BpeTokenizer(vocab=VOCAB), lambda _: iter(sample))
    (tokenizer / "tokenizer.json").write_text(learned.text, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": learned.end}
    write_json(tokenizer / "tokenizer_config.json", config)
    peer = folder / "peer.py"
    peer.write_text(PEER)
    costs: dict[str, list[Cost]] = {}
    for number in range(args.rounds):
        out = folder / f"ours-{number}"
        command = [sys.executable, "-m", "moefold", "data", "prepare", "--jsonl", corpus]
        command += ["--tokenizer", tokenizer, "--folder", out]
        costs.setdefault("moefold", []).append(run(command))
        for processes in dict.fromkeys((1, os.cpu_count() or 1)):
            out = folder / f"theirs-{number}-{processes}"
            command = [args.peer_python, peer, corpus, tokenizer, out, str(processes)]
            name = f"datasets, num_proc {processes}"
            costs.setdefault(name, []).append(run(command))
        for name, each in costs.items():
            print(f"round {number}, {name}: {each[-1]}", flush=True)
    return costs


def main() -> None:
    """Measure, print and, on request, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = measure(args, Path(folder))
    ours = costs.pop("moefold")
    theirs = list(costs.values())
    ratios = {
        figure: [
            getattr(mine, figure) / min(getattr(each[i], figure) for each in theirs)
            for i, mine in enumerate(ours)
        ]
        for figure in BOUNDS
    }
    for figure, values in ratios.items():
        middle = statistics.median(values)
        print(f"{figure}: {middle:.2f} of datasets' ({min(values):.2f} to {max(values):.2f})")
        print(f"    bound {BOUNDS[figure]}: {'kept' if middle <= BOUNDS[figure] else 'BROKEN'}")
    if args.save:
        versions = "import datasets, transformers as t; print(datasets.__version__, t.__version__)"
        done = subprocess.run(
            [args.peer_python, "-c", versions], capture_output=True, text=True, check=True
        )
        content = {
            "machine": cpu_name(),
            "cores": os.cpu_count(),
            "megabytes": args.megabytes,
            "datasets, transformers": done.stdout.split(),
            "costs": {
                name: [cost._asdict() for cost in each]
                for name, each in {"moefold": ours, **costs}.items()
            },
            "ratios": ratios,
            "bounds": BOUNDS,
        }
        write_json(RESULT, content)


if __name__ == "__main__":
    main()
