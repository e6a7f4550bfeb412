"""One fault in one run: who is ended, when and how; and is the resumed run the unbroken one?

For ``bench/faults.py`` and the tests. The tables say which moments, victims and signals there are,
and which of them exist together; a trial runs a command of the command line until ranks halt at the
moment (``halts.py``), sends the signal, looks for what stays, resumes as the program says, and
compares.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import halts
from fault_injection import computed

from moefold.checkpoint import manifest
from moefold.checkpoint.folder import find_newest, step_name
from moefold.cli.main import main as moefold
from moefold.config.dump import dump_yaml
from moefold.training.run_folder import History

STEPS, EVERY, HALF = 12, 3, 6
RANKS = 2
MARK = "MOEFOLD_FAULT_TRIAL"
"""Variable in the environment of all processes of a trial, by which they are found."""
REACH_S, END_S, GONE_S = 180.0, 90.0, 15.0
"""Seconds to come to the moment, for the command to end, and for its last process to be gone."""
STOPPED_S = 0.5
"""Seconds for which a process is stopped before it is killed, while the others go on."""

LAUNCHER, SERVER, RANK, WRITER = "launcher", "fork server", "rank", "rank that writes"
VICTIMS = (LAUNCHER, SERVER, RANK, WRITER)
SIGNALS = {
    "SIGKILL": (signal.SIGKILL,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGSTOP, SIGKILL": (signal.SIGSTOP, signal.SIGKILL),
}
STATUSES = {LAUNCHER: {0, 75, 76, -signal.SIGTERM, -signal.SIGKILL}}
"""Exit statuses of the command that are well: how the launcher itself died, or one of these."""
OTHERS_STATUSES = {0, 75, 76}


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
    draws, drawn = Random(seed), list[Fault]()
    left, seen = list[Fault](), set[tuple[str, str]]()
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


def raw_run(corpus: Path) -> dict[str, Any]:
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
        "uses": [halts.__file__],
    }


class Bench:
    """A folder with the run file, its data, and the unbroken runs that broken ones must equal."""

    def __init__(self, folder: Path) -> None:
        """Write the run file and train the unbroken runs."""
        self.folder = folder.absolute()
        self._corpus = self.folder / "corpus"
        self._corpus.mkdir(parents=True)
        words, draws = ["expert", "token", "router", "load", "bias", "gate", "fold"], Random(0)
        for number in range(12):
            text = " ".join(draws.choices(words, k=draws.randint(60, 160)))
            (self._corpus / f"{number:02d}.txt").write_text(f"{text}\n")
        self._run = self.folder / "run.yaml"
        self._run.write_text(dump_yaml(raw_run(self._corpus)))
        self.half = self.folder / "half"
        self.unbroken = {"nothing": self.folder / "unbroken"}
        _well(moefold(self._train(self.half, "--until", str(HALF))))
        _well(moefold(self._train(self.unbroken["nothing"])))

    def reference(self, starts: str) -> Path:
        """Return what an unbroken command leaves that starts from there."""
        if starts not in ("fork", "export"):
            starts = "nothing"
        if starts not in self.unbroken:
            folder = self.unbroken[starts] = self.folder / f"unbroken-{starts}"
            _well(moefold(self.words(starts, folder)))
        return self.unbroken[starts]

    def begin(self, starts: str, out: Path) -> None:
        """Make what a command starts from: nothing, text to prepare, or half of a run."""
        if starts == "text":
            return
        (out.parent / ".prepared").symlink_to(self.folder / ".prepared")
        if starts == "half":
            shutil.copytree(self.half, out)

    def words(self, starts: str, out: Path, in_step: bool = False) -> list[str]:
        """Return the words of a command; ``in_step``: without a thread that writes."""
        if starts == "export":
            return ["export", str(self.unbroken["nothing"]), str(out), "--uses", halts.__file__]
        more = ["watch.checkpoint.asynchronous=false"] * in_step
        if starts == "fork":
            return self._train(self.half, "--fork", str(out), *more)
        return self._train(out, *more)

    def _train(self, out: Path, *more: str) -> list[str]:
        return ["train", str(self._run), "--nproc", str(RANKS), "--folder", str(out), *more]


def _well(status: int) -> None:
    if status:
        raise RuntimeError(f"a command without faults ended with status {status}")


def trial(bench: Bench, fault: Fault, folder: Path) -> dict[str, Any]:
    """Carry out a fault in an empty folder; return what was found, ``problems`` if any."""
    moment, out = MOMENTS[fault.moment], folder / "out"
    temporary, plan = folder / "tmp", folder / "plan"
    for new in (folder, temporary):
        new.mkdir(parents=True, exist_ok=True)
    bench.begin(moment.starts, out)
    write_plan(plan, fault)
    words = bench.words(moment.starts, out, in_step=fault.victim == RANK)
    command = Command(words, temporary, plan)
    found: dict[str, Any] = asdict(fault)
    began = time.monotonic()
    problems = found["problems"] = command.strike(fault, plan)
    found |= {"status": command.status, "gone_s": command.gone_s}
    plan.unlink()
    problems += [f"{name} stays in the folder of temporary files" for name in names(temporary)]
    if command.status != 0:
        status, what = command.status, command.said()
        allowed = STATUSES.get(fault.victim, OTHERS_STATUSES)
        if status not in allowed or "Traceback" in what:
            problems.append(f"status {status}: {what[-1500:]}")
        words = resumed_words(words, what, out)
        status = moefold(words)
        problems += [f"resumed: status {status}"] if status else []
    problems += differences(out, bench.reference(moment.starts))
    beside = [*names(folder / ".prepared"), *(name for name in names(folder) if "out." in name)]
    problems += [f"{name} stays beside the run" for name in beside if "." in name]
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def write_plan(plan: Path, fault: Fault) -> None:
    """Write where the ranks halt."""
    moment = MOMENTS[fault.moment]
    planned = [moment.halt]
    if fault.victim == WRITER and moment.writes is not None:
        planned = list(dict.fromkeys((moment.writes, moment.halt)))
    if fault.moment == "end" and fault.victim == WRITER:
        planned = planned[:1]  # the lock is released after it
    in_ranks = moment.starts != "export"
    told = [
        asdict(halt) | ({"rank": fault.rank} if halt.rank is None and in_ranks else {})
        for halt in planned
    ]
    plan.write_text(json.dumps({"by": os.getpid(), "in_ranks": in_ranks, "halts": told}))


class Command:
    """A command of the command line in processes of its own, which a signal reaches.

    Attributes:
        status: its exit status, negative if a signal ended it; None while it runs.
        gone_s: seconds from the signal until its last process was gone.
    """

    def __init__(self, words: list[str], temporary: Path, plan: Path) -> None:
        """Start it."""
        self._mark, self._file = f"{MARK}={plan}", plan.with_name("said")
        self.status: int | None = None
        self.gone_s = 0.0
        self._shared = set(os.listdir("/dev/shm"))
        # PyTorch makes an empty folder for its compiler where temporary files are.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(plan.parent)}
        own = {MARK: str(plan), halts.PLAN: str(plan), "TMPDIR": str(temporary), **cache}
        with self._file.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moefold", *words],
                cwd=plan.parent,
                env=os.environ | own,
                stdout=said,
                stderr=said,
                process_group=0,
            )

    def said(self) -> str:
        """Return the output so far."""
        return self._file.read_text(errors="replace")

    def strike(self, fault: Fault, plan: Path) -> list[str]:
        """Wait for the moment, send the signal, wait for the end; return what is not well."""
        try:
            halted = self._wait_for_halt(plan)
            victim = self._victim(fault)
            doors = listening(self._processes())
            for number in SIGNALS[fault.signal]:
                os.kill(victim, number)
                if number == signal.SIGSTOP:
                    plan.with_name(f"{plan.name}.go").touch()
                    time.sleep(STOPPED_S)
            struck = time.monotonic()
            plan.with_name(f"{plan.name}.go").touch()
            self.status = self._process.wait(END_S)
            while self._processes() and time.monotonic() < struck + END_S + GONE_S:
                time.sleep(0.02)
            self.gone_s = round(time.monotonic() - struck, 1)
        except (LookupError, TimeoutError, subprocess.TimeoutExpired) as error:
            return [f"{type(error).__name__}: {error}: {self.said()[-1500:]}", *self._end()]
        for path in halted:
            path.unlink()
        problems = self._end()
        problems += [f"socket {inode} still listens" for inode in doors & listening_here()]
        return problems + [f"/dev/shm/{name} stays" for name in sorted(self._left_in_memory())]

    def _wait_for_halt(self, plan: Path) -> list[Path]:
        """Wait until all planned halts have been reached; return the files that say so."""
        number = len(json.loads(plan.read_text())["halts"])
        until = time.monotonic() + REACH_S
        while time.monotonic() < until:
            halted = sorted(plan.parent.glob(f"{plan.name}.halted-*"))
            if len({path.name.split("-")[1] for path in halted}) == number:
                return halted
            if self._process.poll() is not None:
                raise LookupError(f"it ended with {self._process.returncode} before the moment")
            time.sleep(0.01)
        raise TimeoutError("the moment did not come")

    def _victim(self, fault: Fault) -> int:
        launcher = self._process.pid
        if fault.victim == LAUNCHER:
            return launcher
        family = [(pid, parent(pid)) for pid in self._processes()]
        server = [
            pid
            for pid, above in family
            if above == launcher and b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        if fault.victim == SERVER:
            return server[0]
        ranks = [pid for pid, above in family if above == server[0]]
        return sorted(ranks, key=started)[fault.rank]

    def _processes(self) -> list[int]:
        """Return its processes that live, also those whose parents have ended."""
        mark, found = self._mark.encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def _end(self) -> list[str]:
        """End what goes on, and return what that was."""
        lasting = []
        for pid in self._processes():
            with suppress(OSError):
                name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                os.kill(pid, signal.SIGKILL)
                lasting.append(f"process {pid} goes on: {name[:200]}")
        self.status = self._process.wait()
        return lasting

    def _left_in_memory(self) -> set[str]:
        """Return new files of shared memory that libraries have named and no process has open."""
        new = set(os.listdir("/dev/shm")) - self._shared
        named = {name for name in new if re.match("torch_|psm_|sem[.]|mp-", name)}
        return {name for name in named if not any(name in text for text in all_maps())}


def parent(pid: int) -> int:
    """Return a process's parent; 0 if it has ended."""
    return int((_fields(pid) or [0, 0])[1])


def started(pid: int) -> int:
    """Return when a process started, in ticks."""
    return int((_fields(pid) or [0] * 20)[19])


def _fields(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def listening(pids: list[int]) -> set[str]:
    """Return the inodes of sockets at which these processes listen."""
    held = set[str]()
    for entry in (entry for pid in pids for entry in Path(f"/proc/{pid}/fd").glob("*")):
        with suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
            held |= {found[1]} if found else set()
    return held & listening_here()


def listening_here() -> set[str]:
    """Return the inodes of all listening sockets of this machine."""
    found = set[str]()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
            found |= {row.split()[9] for row in rows if row.split()[3] == "0A"}
    return found


def all_maps() -> Iterator[str]:
    """Yield the mapped files of all processes of this machine."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield (entry / "maps").read_text()


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
    old, fork = words.index("--folder"), words.index("--fork")
    return [*words[:old], "--folder", words[fork + 1], *words[fork + 2 :]]


def differences(out: Path, reference: Path) -> list[str]:
    """Return how what a command left differs from what the unbroken one left."""
    found, wanted = files(out), files(reference)
    if (reference / "config.json").exists():  # an exported folder
        everything = sorted(found.keys() | wanted.keys())
        return [f"{name} differs" for name in everything if found.get(name) != wanted.get(name)]
    problems = [
        f"{name} stays in the run's folder"
        for name in sorted(found.keys() - wanted.keys())
        if not re.match(r"step-\d{8}/(rank-\d{5}-\d{5}\.safetensors|manifest\.json)$", name)
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
