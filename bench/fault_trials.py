"""One fault in one run: who is ended, when and how; and is the resumed run the unbroken one?

For ``bench/faults.py`` and the tests. The tables say which moments, victims and signals there are,
and which of them exist together; a trial runs a command of the command line until ranks halt at the
moment, sends the signal, looks for what stays, resumes as the program says, and compares.
"""

import hashlib
import os
import re
import shutil
import signal
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import halts
from fault_command import Command, Plan, listening, listening_here, shared_memory, strike, unused
from fault_injection import computed

from moefold.checkpoint import manifest
from moefold.checkpoint.folder import find_newest, step_name
from moefold.cli.main import main as moefold
from moefold.config.dump import dump_yaml
from moefold.training.run_folder import History

STEPS = 12
EVERY = 3
"""Steps between checkpoints."""
HALF = 6
"""Steps between evaluations, samples and checks of health, and of half a run."""
RANKS = 2
END_S = 90.0
GONE_S = 15.0
"""Seconds for a command to end, and for its last process to be gone."""

LAUNCHER = "launcher"
SERVER = "fork server"
RANK = "rank"
WRITER = "rank that writes"
VICTIMS = (LAUNCHER, SERVER, RANK, WRITER)
SIGNALS = {
    "SIGKILL": (signal.SIGKILL,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGSTOP, SIGKILL": (signal.SIGSTOP, signal.SIGKILL),
}
BESIDES = re.compile(r"step-\d{8}/(rank-\d{5}-\d{5}\.safetensors|manifest\.json)|hangs/.+")
"""Files of a run that was broken besides those of the unbroken one: checkpoints of other steps, and
the reports of ranks whose operations failed."""
STATUSES = {0, 75, 76}
"""Exit statuses that are well, besides that of a launcher which the signal itself ended."""


@dataclass(frozen=True)
class Halt:
    """A call before which a rank halts (``halts.py``); rank None is that of the victim."""

    call: str
    about: str = ""
    rank: int | None = 0
    turn: int = 1


WRITE = "moefold.checkpoint.disk:Disk.write"


@dataclass(frozen=True)
class Moment:
    """When a signal comes.

    Attributes:
        halt: where a rank is then.
        writes: where the thread of the rank that writes is then; None if none writes.
        starts: what the command starts from (``Bench.begin``).
        victims: processes that exist then, besides the rank that writes.
    """

    halt: Halt
    writes: Halt | None = None
    starts: str = "nothing"
    victims: tuple[str, ...] = (LAUNCHER, SERVER, RANK)


def _writing(step: int, turn: int = 2) -> Halt:
    return Halt(WRITE, step_name(step), None, turn)


MOMENTS = {
    "start": Moment(Halt("moefold.comm.worker:join")),
    "first step": Moment(Halt("moefold.training.trainer:gradients")),
    "save": Moment(_writing(EVERY), _writing(EVERY)),
    "publish": Moment(
        Halt("moefold.checkpoint.disk:Disk.rename", step_name(EVERY)),
        Halt("moefold.checkpoint.disk:Disk.rename", step_name(EVERY)),
    ),
    "prune": Moment(
        Halt("moefold.checkpoint.disk:Disk.remove_folder", ".gone-"),
        Halt("moefold.checkpoint.disk:Disk.remove_folder", ".gone-"),
    ),
    "evaluate": Moment(Halt("moefold.training.evaluate:score"), _writing(EVERY)),
    "sample": Moment(
        Halt("moefold.parallel.pipeline.score:next_logits", turn=3),
        _writing(EVERY),
    ),
    "data preparation": Moment(Halt("moefold.data.prepare:_encode"), starts="text"),
    "resume": Moment(Halt("moefold.training.trainer:restore"), starts="half"),
    "fork": Moment(Halt("moefold.training.fork:restore"), starts="fork"),
    "export": Moment(
        Halt("moefold.convert.exporter:write_shard", rank=None),
        starts="export",
        victims=(LAUNCHER,),
    ),
    "end": Moment(Halt("moefold.checkpoint.lock:FolderLock.release"), _writing(STEPS)),
}


@dataclass(frozen=True)
class Fault:
    """A signal to a process at a moment; ``rank`` is the victim if that is a rank."""

    moment: str
    victim: str
    signal: str
    rank: int = 0


def existing() -> list[Fault]:
    """Return every combination of moment, victim and signal that exists."""
    return [
        Fault(moment, victim, sent)
        for moment, victim, sent in product(MOMENTS, VICTIMS, SIGNALS)
        if victim in MOMENTS[moment].victims or (victim == WRITER and MOMENTS[moment].writes)
    ]


def draw(number: int, seed: int) -> list[Fault]:
    """Draw faults so that few of them have as many pairs of moment, victim and signal as possible.

    None occurs twice before all have occurred.
    """
    draws = Random(seed)
    drawn = list[Fault]()
    left = list[Fault]()
    seen = set[tuple[str, str]]()
    while len(drawn) < number:
        if not left:
            left = existing()
            draws.shuffle(left)
        chosen = max(left, key=lambda fault: len(_pairs(fault) - seen))
        left.remove(chosen)
        seen |= _pairs(chosen)
        # Only the first rank publishes and prunes.
        alone = chosen.victim == WRITER and chosen.moment in ("publish", "prune")
        rank = 0 if alone else draws.randrange(RANKS)
        drawn.append(Fault(chosen.moment, chosen.victim, chosen.signal, rank))
    return drawn


def _pairs(fault: Fault) -> set[tuple[str, str]]:
    return {
        (fault.moment, fault.victim),
        (fault.moment, fault.signal),
        (fault.victim, fault.signal),
    }


def raw_run(corpus: Path, plug_in: Path) -> dict[str, Any]:
    """Return a tiny run that saves, evaluates and samples, and whose every bit is determined."""
    shape = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1}
    shape |= {"experts": 4, "top_k": 2, "expert_width": 16}
    source = {"source": "text", "files": [str(corpus / "*.txt")], "holdout": 0.2}
    return {
        "name": "faults",
        "deterministic": True,
        "model": {"family": "qwen3_moe", "shape": shape},
        "data": {"seq": 16, "tokenizer": {"kind": "bpe", "vocab": 300}, "train": [source]},
        "optim": {"kind": "adamw", "lr": 0.01},
        "train": {"steps": STEPS, "batch": 4, "micro_batch": 2, "precision": "fp32"},
        "layout": {"sizes": "ep2"},
        "watch": {
            "evaluate": {"every": HALF},
            "health": {"every": HALF},
            "sample": {"every": HALF, "prompts": ["expert token"], "tokens": 6},
            "checkpoint": {"every": EVERY, "keep": 2, "asynchronous": True},
            "plots": None,
            "experts_page": None,
            "pace": None,
            "metrics": {"tensorboard": "off"},
            "progress": {"style": "off"},
            "time_out_s": 60,
        },
        "uses": [str(plug_in)],
    }


class Bench:
    """A folder with the run file, its data, and the unbroken runs that broken ones must equal.

    Attributes:
        plan: where the ranks of its runs halt.
    """

    def __init__(self, folder: Path) -> None:
        """Write the run file and its text."""
        self.folder = folder.absolute()
        corpus = self.folder / "corpus"
        corpus.mkdir(parents=True)
        words = ["expert", "token", "router", "load", "bias", "gate", "fold"]
        draws = Random(0)
        for number in range(12):
            text = " ".join(draws.choices(words, k=draws.randint(60, 160)))
            (corpus / f"{number:02d}.txt").write_text(f"{text}\n")
        self._plug_in = Path(shutil.copy(halts.__file__, self.folder))
        self._run = self.folder / "run.yaml"
        self._run.write_text(dump_yaml(raw_run(corpus, self._plug_in)))
        self._references = dict[str, Path]()
        self.plan = Plan(self._plug_in)

    @cached_property
    def half(self) -> Path:
        """The folder of a run that ended in the middle."""
        folder = self.folder / "half"
        _well(moefold(self.train(folder, "--until", str(HALF))))
        return folder

    def reference(self, starts: str) -> Path:
        """Return what an unbroken command leaves that starts from there."""
        if starts not in ("fork", "export"):
            starts = "nothing"
        if starts not in self._references:
            folder = self.folder / f"unbroken-{starts}"
            _well(moefold(self.words(starts, folder)))
            self._references[starts] = folder
        return self._references[starts]

    def begin(self, starts: str, out: Path) -> None:
        """Make what a command starts from: nothing, text to prepare, or half of a run."""
        self.reference(starts)  # which prepares the data
        if starts == "text":
            return
        (out.parent / ".prepared").symlink_to(self.folder / ".prepared")
        if starts == "half":
            shutil.copytree(self.half, out)

    def words(self, starts: str, out: Path, in_step: bool = False) -> list[str]:
        """Return the words of a command; ``in_step``: without a thread that writes."""
        if starts == "export":
            return ["export", str(self.reference("")), str(out), "--uses", str(self._plug_in)]
        more = ["watch.checkpoint.asynchronous=false"] * in_step
        if starts == "fork":
            return self.train(self.half, "--fork", str(out), *more)
        return self.train(out, *more)

    def train(self, out: Path, *more: str) -> list[str]:
        """Return the words of a command that trains in a folder."""
        return ["train", str(self._run), "--nproc", str(RANKS), "--folder", str(out), *more]

    def halt(self, fault: Fault) -> None:
        """Let ranks halt at a fault's moment."""
        moment = MOMENTS[fault.moment]
        planned = [moment.halt]
        if fault.victim == WRITER and moment.writes is not None:
            # At the end the lock is not released before the thread has written.
            planned = [moment.writes, *planned] if fault.moment != "end" else [moment.writes]
        in_ranks = moment.starts != "export"
        told = [asdict(halt) for halt in dict.fromkeys(planned)]
        for halt in told:
            halt["rank"] = fault.rank if halt["rank"] is None and in_ranks else halt["rank"]
        self.plan.write(told, in_ranks)


def _well(status: int) -> None:
    if status:
        raise RuntimeError(f"a command without faults ended with status {status}")


def victim_of(fault: Fault, command: Command) -> int:
    """Return the process that a fault is for."""
    if fault.victim == LAUNCHER:
        return command.pid
    return command.server() if fault.victim == SERVER else command.ranks(RANKS)[fault.rank]


def trial(bench: Bench, fault: Fault, folder: Path) -> dict[str, Any]:
    """Carry out a fault in an empty folder; return what was found, ``problems`` if any."""
    began = time.monotonic()
    moment = MOMENTS[fault.moment]
    out = folder / "out"
    folder.mkdir(parents=True, exist_ok=True)
    bench.begin(moment.starts, out)
    words = bench.words(moment.starts, out, in_step=fault.victim == RANK)
    bench.halt(fault)
    found = {**asdict(fault), **broken(words, fault, bench.plan, folder)}
    bench.plan.forget()
    if found["status"] != 0:
        said = (folder / "said").read_text(errors="replace")
        status = moefold(resumed_words(words, said, out))
        found["problems"] += [f"resumed: status {status}"] if status else []
    found["problems"] += differences(out, bench.reference(moment.starts))
    beside = [*names(folder / ".prepared"), *(name for name in names(folder) if "out." in name)]
    found["problems"] += [f"{name} stays beside the run" for name in beside if "." in name]
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def broken(words: list[str], fault: Fault, plan: Plan, folder: Path) -> dict[str, Any]:
    """Carry out a fault in a command; return its status, and what stayed of it as ``problems``."""
    shared = shared_memory()
    command = Command(["-m", "moefold", *words], folder)
    try:
        plan.wait(command.has_ended)
        doors = listening(command.processes())
        strike(victim_of(fault, command), SIGNALS[fault.signal], plan)
        struck = time.monotonic()
        status = command.wait(END_S)
        while command.processes() or doors & listening_here():
            if time.monotonic() > struck + END_S + GONE_S:
                break
            time.sleep(0.02)
    except TimeoutError as error:
        lasting = command.end()
        said = command.said()[-1500:]
        return {"status": command.wait(END_S), "problems": [f"{error}: {said}", *lasting]}
    gone_s = round(time.monotonic() - struck, 1)
    problems = command.end()
    problems += [f"socket {inode} still listens" for inode in doors & listening_here()]
    problems += [f"/dev/shm/{name} stays" for name in unused(shared_memory() - shared)]
    problems += [f"{name} stays among temporary files" for name in names(command.temporary)]
    ended = {-SIGNALS[fault.signal][-1]} if fault.victim == LAUNCHER else set[int]()
    if status not in STATUSES | ended or "Traceback" in command.said():
        problems.append(f"status {status}: {command.said()[-1500:]}")
    return {"status": status, "gone_s": gone_s, "problems": problems}


def names(folder: Path) -> list[str]:
    """Return the names in a folder; none if there is no such folder."""
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def resumed_words(words: list[str], said: str, out: Path) -> list[str]:
    """Return the words of the command that the program advises, or its documents if it could not.

    A run in a folder is resumed by the same command; a fork without ``--fork`` once the new run has
    a checkpoint. An export is made again.
    """
    if "--fork" not in words:
        return words
    advice = re.search(r"repeat the command with --folder \S+( and without --fork)?", said)
    has_begun = advice[1] is not None if advice else find_newest(out) is not None
    if not has_begun:
        return words
    old = words.index("--folder")
    fork = words.index("--fork")
    return [*words[:old], "--folder", words[fork + 1], *words[fork + 2 :]]


def differences(out: Path, reference: Path) -> list[str]:
    """Return how what a command left differs from what the unbroken one left."""
    found = files(out)
    wanted = files(reference)
    if (reference / "config.json").exists():  # an exported folder
        everything = sorted(found.keys() | wanted.keys())
        return [f"{name} differs" for name in everything if found.get(name) != wanted.get(name)]
    problems = [
        f"{name} stays in the run's folder"
        for name in sorted(found.keys() - wanted.keys())
        if not BESIDES.fullmatch(name)
    ]
    problems += [f"{name} is not there" for name in sorted(_lasting(wanted) - found.keys())]
    last = step_name(STEPS)
    problems += [
        f"{name} differs"
        for name in sorted(wanted.keys() & found.keys())
        if name.startswith(last) and name.endswith("safetensors") and found[name] != wanted[name]
    ]
    if problems:
        return problems
    for name in ("samples.txt", "expert_load.jsonl", "latest"):
        if found.get(name) != wanted.get(name):
            problems.append(f"{name} differs")
    if computed(History.read(out)) != computed(History.read(reference)):
        problems.append("metrics.jsonl differs")
    ours, theirs = (manifest.read(folder / last) for folder in (out, reference))
    if ours.tensors != theirs.tensors:
        problems.append("the manifest's tensors differ")
    for key in ("progress", "sources", "hooks", "data"):
        if ours.meta.get(key) != theirs.meta.get(key):
            problems.append(f"the manifest's {key} differs")
    return problems


def _lasting(wanted: dict[str, str]) -> set[str]:
    """Return the names that are there at the end of a run, wherever it was broken."""
    last = step_name(STEPS)
    return {name for name in wanted if not name.startswith("step-") or name.startswith(last)}


def files(folder: Path) -> dict[str, str]:
    """Return the digests of all files below a folder, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
