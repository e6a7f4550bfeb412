"""Starts on an index of many documents, with and without a holdout: seconds and memory.

Token files with ``--documents`` documents of four tokens are written; the ids are a sparse file of
zeros. The first start with a holdout chooses the held-out documents and stores the choice. Then
starts with and without it alternate, each in a process of its own: from the run's record to open
token files. Peak memory is the process's largest resident set.

    python bench/index_start.py --documents 100000000 --rounds 3 --save
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from moefold.config.load import load
from moefold.data.config import BpeTokenizer, Data
from moefold.data.index import _HEADER, MAGIC, VERSION
from moefold.data.prepare import prepare
from moefold.data.tokenizer import train
from moefold.files import write_json
from moefold.training.machine import cpu_name

RESULT = Path(__file__).parent / "results" / "index_start.json"
TOKENS = 4
"""Tokens of each document."""
BOUND_S = 5.0
"""A second start with a holdout may take that much longer than one without."""
CHUNK = 1 << 20


def write_files(prefix: Path, documents: int) -> None:
    """Write token files whose ids are all zero."""
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(documents * TOKENS * 2)
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(_HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        for kind in ("lengths", "offsets", "marks"):
            end = documents + (kind == "marks")
            for start in range(0, end, CHUNK):
                numbers = np.arange(start, min(start + CHUNK, end), dtype=np.int64)
                if kind == "lengths":
                    numbers = np.full(len(numbers), TOKENS, np.int32)
                elif kind == "offsets":
                    numbers *= TOKENS * 2
                file.write(numbers.tobytes())


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer, without which token files are not read."""
    folder.mkdir()
    learned = train(BpeTokenizer(vocab=300), lambda _: iter(["one text of few words"]))
    (folder / "tokenizer.json").write_text(learned.text, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": learned.end}
    write_json(folder / "tokenizer_config.json", config)


def start_once(prefix: Path, holdout: float, folder: Path) -> None:
    """Open the files as a run does; print seconds and the peak of memory as JSON."""
    source = {"source": "indexed", "prefix": str(prefix), "holdout": holdout}
    tokenizer = {"kind": "file", "path": str(prefix.parent / "tokenizer")}
    raw = {"seq": 128, "tokenizer": tokenizer, "train": [source]}
    record = load(Data, raw).record
    begun = time.perf_counter()
    prepared = prepare(record, folder)
    seconds = time.perf_counter() - begun
    assert prepared.train[0].corpus.n_tokens
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps({"seconds": seconds, "peak_gb": peak_gb}))


def measure(prefix: Path, holdout: float, folder: Path) -> dict[str, float]:
    """Return what a process of its own prints about one start."""
    command = [sys.executable, __file__, "--once", str(prefix), str(holdout), str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Carry out the bench; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT}")
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        start_once(Path(args.once[0]), float(args.once[1]), Path(args.once[2]))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prefix = folder / "corpus"
        write_files(prefix, args.documents)
        write_tokenizer(folder / "tokenizer")
        shares = {"without": 0.0, "with": 0.01}
        first = {name: measure(prefix, share, folder) for name, share in shares.items()}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in shares}
        for _ in range(args.rounds):
            for name, share in shares.items():
                found[name].append(measure(prefix, share, folder))
    medians = {
        name: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for name, each in found.items()
    }
    more_s = medians["with"]["seconds"] - medians["without"]["seconds"]
    for name, each in medians.items():
        print(f"{name} holdout: {each['seconds']:.1f} s, {each['peak_gb']:.1f} GB at the peak")
    print(f"a second start with a holdout takes {more_s:+.1f} s (at most {BOUND_S:g})")
    if args.save:
        write_json(
            RESULT,
            {
                "machine": cpu_name(),
                "documents": args.documents,
                "first": first,
                "medians": medians,
                "starts": found,
            },
        )
    return 0 if more_s <= BOUND_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
