"""Exported folders in other tools: transformers 4 and 5, lm-eval and TRL.

    python bench/outside_generate.py [FAMILY...] [--environments DIR] [--save]

Trains a small model of each family on the repository's documents, exports it, and compares:

* greedy texts of 20 prompts and 64 tokens in fp32 by ``model.generate(**tokenizer(text))`` of both
  releases with those of moefold;
* lm-eval's loss on a local file with moefold's evaluation of the same file;
* TRL's ``SFTTrainer`` on conversations: that it runs and its loss falls.

Each tool runs in an environment of its own, made once in DIR (default: ``runs/outside``); what it
does not ask for in another version is that of this environment.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import moefold
from moefold.training.machine import cpu_name
from moefold.training.text_generator import TextGenerator

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "outside_generate.json"
ENVIRONMENTS = {
    "transformers 4": ["transformers==4.57.6"],
    "transformers 5": [],
    "lm-eval": ["lm-eval==0.4.13"],
    "trl": ["trl==1.16.0"],
}
"""What each environment asks for, beside what this one has."""
COMMON = "hidden: 32, layers: 2, heads: 4, experts: 4, top_k: 2, expert_width: 32"
SHAPES = {
    "mixtral": "kv_heads: 2",
    "olmoe": "kv_heads: 4",
    "qwen3_moe": "kv_heads: 2",
    "deepseek_v3": "q_rank: 16, kv_rank: 16, nope_dim: 8, rope_dim: 8, v_dim: 8",
    "gpt_oss": "kv_heads: 2, head_dim: 8, window: 128",
}
"""What the shapes of families have besides ``COMMON``."""
TOKENS, N_PROMPTS, SEQ = 64, 20, 1024
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def environment(name: str, folder: Path) -> Path:
    """Return the interpreter of an environment; make it if it is not there."""
    home = folder / name.replace(" ", "-")
    python = home / "bin" / "python"
    if (home / ".made").is_file():
        return python
    venv.create(home, with_pip=True, clear=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "zz_rest.pth").write_text(sysconfig.get_paths()["purelib"])
    if wanted := ENVIRONMENTS[name]:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    (home / ".made").touch()
    return python


def peer(python: Path, what: str, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what a tool makes of a folder."""
    words = [python, str(ROOT / "bench" / "outside_peer.py"), what, str(folder)]
    outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    outside |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, input=json.dumps(asked), capture_output=True, text=True, env=outside, cwd=folder
    )
    if done.returncode:
        raise RuntimeError(f"{python}: {what}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def documents() -> list[str]:
    """Return paragraphs of the repository's documents."""
    texts = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md"))]
    found = [part.strip() for text in texts for part in text.split("\n\n")]
    return [part for part in found if 100 < len(part) < 400]


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def trained(family: str, folder: Path) -> tuple[Path, float]:
    """Train and export a small model; return the export, and nats per token of the held-out file.

    The held-out file is ``valid.jsonl``; each of its documents lies in a sequence whole.
    """
    texts = documents()
    train, valid = folder / "train.jsonl", folder / "valid.jsonl"
    write_lines(train, [{"text": text} for text in texts[8:]])
    write_lines(valid, [{"text": text} for text in texts[:8]])
    run = moefold.load_run(
        "tiny",
        overrides=[
            f"model={{family: {family}, shape: {{{COMMON}, {SHAPES[family]}}}}}",
            f"data.seq={SEQ}",
            f"data.train=[{{source: jsonl, name: notes, files: [{train}]}}]",
            f"data.valid=[{{source: jsonl, name: held, files: [{valid}]}}]",
            "train.steps=40",
            "train.batch=4",
            "train.precision=fp32",
            "watch.evaluate=null",
            "optim.lr=0.01",
        ],
    )
    with moefold.open(run, folder / "run") as job:
        job.train()
        job.save()
        figures = job.evaluate()
    moefold.export(folder / "run", folder / "out")
    return folder / "out", figures["val/held/loss"]


def same_texts(family: str, folder: Path, pythons: dict[str, Path]) -> dict[str, Any]:
    """Return how many greedy texts of each release equal moefold's."""
    export, _ = trained(family, folder)
    prompts = [text[:20] for text in documents()[8 : 8 + N_PROMPTS]]
    generator = TextGenerator.open(folder / "run")
    ids = [generator.tokenizer.encode_prompt(text) for text in prompts]
    ours = generator.generate(ids, TOKENS, temperature=0)
    found: dict[str, Any] = {}
    for name in ("transformers 4", "transformers 5"):
        asked = {"prompts": prompts, "tokens": TOKENS}
        theirs = peer(pythons[name], "generate", export, asked)
        ends = theirs["ends"]
        cut = [new[:-1] if new[-1:] and new[-1] in ends else new for new in theirs["ids"]]
        same = sum(a == b for a, b in zip(ours, cut, strict=True))
        found[theirs["release"]] = same
        print(f"{family}: transformers {theirs['release']}: {same} of {len(prompts)} texts equal")
    return found


def same_loss(folder: Path, python: Path) -> dict[str, Any]:
    """Return the loss per token of a held-out file, by moefold and by lm-eval.

    Here the end of a document is a label; lm-eval gets it as the last token of each text.
    """
    export, ours = trained("qwen3_moe", folder)
    tokenizer = TextGenerator.open(folder / "run").tokenizer
    texts = [json.loads(line)["text"] for line in (folder / "valid.jsonl").open()]
    file = write_lines(folder / "ended.jsonl", [{"text": text + tokenizer.end} for text in texts])
    said = peer(python, "evaluate", export, {"file": str(file)})
    n_bytes = sum(len((text + tokenizer.end).encode()) for text in texts)
    n_tokens = sum(len(ids) - 1 for ids in tokenizer.encode_documents(texts))
    theirs = said["bits_per_byte"] * math.log(2) * n_bytes / n_tokens
    print(f"loss of a local file: {ours:.6f} here, {theirs:.6f} by lm-eval {said['release']}")
    return {"ours": ours, "lm-eval": theirs, "release": said["release"]}


def trains_there(folder: Path, python: Path) -> dict[str, Any]:
    """Return losses of TRL's trainer on conversations, on an export with a chat template."""
    export, _ = trained("qwen3_moe", folder)
    (export / "chat_template.jinja").write_text(TEMPLATE)
    talk = [
        {"role": "user", "content": "what is the weather"},
        {"role": "assistant", "content": "it is cold"},
    ]
    file = write_lines(folder / "chats.jsonl", [{"messages": talk}] * 32)
    said = peer(python, "train", export, {"file": str(file), "steps": 12})
    first, last = said["losses"][0], said["losses"][-1]
    print(f"trl {said['release']}: loss {first:.3f} to {last:.3f} in {len(said['losses'])} steps")
    return {"release": said["release"], "first": first, "last": last}


def main(words: Sequence[str]) -> int:
    """Run the comparisons; the status is 1 if one fails."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("families", nargs="*", choices=[[], *SHAPES], metavar="FAMILY")
    asked.add_argument("--environments", type=Path, default=ROOT / "runs" / "outside")
    asked.add_argument("--save", action="store_true")
    args = asked.parse_args(words)
    pythons = {name: environment(name, args.environments.absolute()) for name in ENVIRONMENTS}
    result: dict[str, Any] = {"cpu": cpu_name(), "prompts": N_PROMPTS, "tokens": TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        result["equal"] = {
            family: same_texts(family, _new(folder, family), pythons)
            for family in args.families or SHAPES
        }
        result["loss"] = same_loss(_new(folder, "loss"), pythons["lm-eval"])
        result["sft"] = trains_there(_new(folder, "sft"), pythons["trl"])
    if args.save:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    equal = all(n == N_PROMPTS for found in result["equal"].values() for n in found.values())
    close = abs(result["loss"]["ours"] - result["loss"]["lm-eval"]) < 1e-4
    return 0 if equal and close and result["sft"]["last"] < result["sft"]["first"] else 1


def _new(folder: str, name: str) -> Path:
    path = Path(folder, name)
    path.mkdir()
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
