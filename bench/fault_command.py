"""Commands in processes of their own, the moment at which they halt, and what outlives them.

Reads ``/proc``, so Linux only. Processes of a command are found by a variable of their environment,
which they keep when their parent ends.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "MOEFOLD_FAULT_TRIAL"
"""Variable in the environment of all processes of a command."""
REACH_S = 180.0
"""Seconds in which a command comes to its moment."""
STOPPED_S = 0.5
"""Seconds for which a process is stopped before it is killed, while the others go on."""
POLL_S = 0.02


class Plan:
    """Where ranks halt (``halts.py``), and the word for them to go on."""

    def __init__(self, plug_in: Path) -> None:
        """Plan for runs that use this copy of the plug-in."""
        self.file = plug_in.with_suffix(".plan")

    def write(self, halts: Sequence[dict[str, Any]], in_ranks: bool = True) -> None:
        """Let processes that start from now on halt: ranks, or else children of this process."""
        self.forget()
        plan = {"by": os.getpid(), "in_ranks": in_ranks, "halts": list(halts)}
        self.file.write_text(json.dumps(plan))

    def wait(self, has_ended: Callable[[], bool]) -> None:
        """Wait until every halt has been reached.

        Raises:
            TimeoutError: if that takes too long, or the command ends before.
        """
        wanted = {str(number) for number in range(len(json.loads(self.file.read_text())["halts"]))}
        until = time.monotonic() + REACH_S
        while {name.rpartition("halted-")[2].partition("-")[0] for name in self._notes()} != wanted:
            if has_ended():
                raise TimeoutError("the command ended before its moment")
            if time.monotonic() > until:
                raise TimeoutError("the moment did not come")
            time.sleep(POLL_S)

    def go(self) -> None:
        """Let all that have halted go on."""
        self.file.with_name(f"{self.file.name}.go").touch()

    def forget(self) -> None:
        """Let nothing halt any more."""
        for name in (self.file.name, *self._notes(), f"{self.file.name}.go"):
            self.file.with_name(name).unlink(missing_ok=True)

    def _notes(self) -> list[str]:
        return [path.name for path in self.file.parent.glob(f"{self.file.name}.halted-*")]


def strike(victim: int, signals: Iterable[int], plan: Plan) -> None:
    """Send signals to a process while ranks have halted, and let them go on."""
    for number in signals:
        os.kill(victim, number)
        if number == signal.SIGSTOP:
            plan.go()
            time.sleep(STOPPED_S)
    plan.go()


class Command:
    """A command of the command line in processes of its own.

    Attributes:
        pid: the launcher's process.
    """

    def __init__(self, program: Sequence[str], folder: Path) -> None:
        """Start ``python PROGRAM``; ``folder`` is for its output and its temporary files."""
        self._mark = f"{MARK}={folder}"
        self._output = folder / "said"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        own = {MARK: str(folder), "TMPDIR": str(self.temporary)}
        # PyTorch makes an empty folder for its compiler where temporary files are.
        own["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        with self._output.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, *program],
                cwd=folder,
                env=os.environ | own,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                text=True,
                process_group=0,
            )
        self.pid = self._process.pid

    def said(self) -> str:
        """Return the output so far."""
        return self._output.read_text(errors="replace")

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def has_ended(self) -> bool:
        """Return whether the launcher has ended."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> int:
        """Return the launcher's exit status, negative if a signal ended it.

        Raises:
            TimeoutError: if it does not end in time.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the command goes on after {seconds:g} s") from None

    def processes(self) -> list[int]:
        """Return its processes that live, also those whose parents have ended."""
        mark = self._mark.encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def server(self) -> int:
        """Return the process that its ranks fork from."""
        marked = b"multiprocessing.forkserver"
        own = [pid for pid in self.processes() if parent(pid) == self.pid]
        return next(pid for pid in own if marked in Path(f"/proc/{pid}/cmdline").read_bytes())

    def ranks(self, number: int) -> list[int]:
        """Return the processes of its ranks, in their order, once all of them have been forked."""
        server = self.server()
        found = list[int]()
        until = time.monotonic() + REACH_S
        while len(found) < number and time.monotonic() < until:
            found = [pid for pid in self.processes() if parent(pid) == server]
        return sorted(found, key=started)

    def end(self) -> list[str]:
        """Kill what goes on; return what that was."""
        lasting = []
        for pid in self.processes():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                os.kill(pid, signal.SIGKILL)
                lasting.append(f"process {pid} goes on: {words[:200]}")
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        return lasting


def parent(pid: int) -> int:
    """Return a process's parent; 0 if it has ended."""
    return int(_fields(pid)[1])


def started(pid: int) -> int:
    """Return when a process started, in ticks; 0 if it has ended."""
    return int(_fields(pid)[19])


def _fields(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["0"] * 20


def listening(pids: Iterable[int]) -> set[str]:
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


def shared_memory() -> set[str]:
    """Return the files of shared memory that libraries have named."""
    return {name for name in os.listdir("/dev/shm") if re.match("torch_|psm_|sem[.]|mp-", name)}


def unused(names: Iterable[str]) -> list[str]:
    """Return those of files of shared memory that no process has mapped."""
    maps = list(_maps()) if (names := sorted(names)) else []
    return [name for name in names if not any(name in text for text in maps)]


def _maps() -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield (entry / "maps").read_text()
