"""One writer per folder: a lock file that says who holds it and shows that the holder lives.

The file holds the owner, host, process and a heartbeat, a counter that the holder raises every
few seconds. A lock whose holder is known to be dead, or whose heartbeat stands still for some
time on this machine's monotonic clock, is taken over; clocks of two machines are never compared.
Imports no torch.
"""

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from moefold.checkpoint.disk import Say
from moefold.checkpoint.errors import LockError
from moefold.config.base import Record
from moefold.files import make_folder, remove_empty

FILE = "writer.lock"
BEAT_S = 10.0
LONGEST_WAIT_S = 120.0
ALIVE = "alive"
_ROOM = 4096
_log = logging.getLogger("moefold.checkpoint")


class Holder(Record):
    """What a lock file says."""

    run: Annotated[str, Field(max_length=500)]
    token: str
    host: str
    place: str
    """Name of the kernel and process namespace in which ``pid`` is one process."""
    pid: Annotated[int, Field(ge=1)]
    born: str
    """When the process started, so that a reused ``pid`` is told apart."""
    beat: int = 0
    beat_s: Annotated[float, Field(gt=0)] = BEAT_S

    def __str__(self) -> str:
        return f"{self.run!r} (process {self.pid} on {self.host}, heartbeat {self.beat})"


class FolderLock:
    """The right to write checkpoints into a folder, held while the context is open.

    ``owner`` names the run in what others are told. Entering raises ``LockError`` where a living
    run holds the folder. A lock left by a dead one is explained through ``say`` and taken over: at
    once if it died on this machine, else after ``patience_s`` (default: three of its heartbeats)
    without a heartbeat.
    """

    def __init__(
        self,
        folder: str | Path,
        owner: str,
        *,
        beat_s: float = BEAT_S,
        patience_s: float | None = None,
        say: Say = _log.warning,
    ) -> None:
        self.path = Path(folder) / FILE
        self.me = Holder(
            run=owner,
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            place=_place(),
            pid=os.getpid(),
            born=_born(os.getpid()),
            beat_s=beat_s,
        )
        self.patience_s = patience_s
        self.say = say
        self._fd = -1
        self._new: list[Path] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, creating the folder where there is none."""
        assert self._fd < 0, "a lock is taken once"
        self._new = make_folder(self.path.parent)
        try:
            while not self._create():
                stale, why = self._judge()
                if stale is not None and self._remove(stale):
                    self.say(f"{self.path}: {why}. Taking over")
        except OSError as error:
            remove_empty(self._new)
            raise LockError(f"{self.path}: the folder cannot be locked: {error}") from error
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="checkpoint lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock back, with the folder if it was made for it and holds nothing.

        Nothing happens where it has been taken over, or in a fork.
        """
        if self._fd < 0 or self.me.pid != os.getpid():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError), _guard(self.path.parent):
            if self.is_mine():
                self.path.unlink()
        os.close(self._fd)
        self._fd = -1
        remove_empty(self._new)

    def is_mine(self) -> bool:
        """Return whether the file still names this holder."""
        found = _read(self.path)
        return self._fd >= 0 and found is not None and found.token == self.me.token

    def check(self) -> None:
        """Raise ``LockError`` where the lock is not held: given back, or taken over by another."""
        for _ in range(3):
            if self.is_mine():
                return
            time.sleep(0.1)  # an unreadable file may be storage that is away for a moment
        else:
            found = _read(self.path)
            now = f"now {found} holds it" if found else "the file is gone"
            raise LockError(
                f"{self.path}: {self.me.run!r} no longer holds this folder, {now}. This process "
                "was silent for too long or the file was removed; it must not write here any more"
            )

    def _create(self) -> bool:
        """Create the lock file, which succeeds for one process only."""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        try:
            self._write()
        except OSError:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink()
            raise
        return True

    def _write(self) -> None:
        """Write the record in place: a file that was taken over is another file, left alone."""
        os.pwrite(self._fd, self.me.model_dump_json().encode().ljust(_ROOM), 0)
        os.fsync(self._fd)

    def _beat(self) -> None:
        """Raise the heartbeat until the lock is given back."""
        while not self._stop.wait(self.me.beat_s):
            self.me = self.me.model_copy(update={"beat": self.me.beat + 1})
            with contextlib.suppress(OSError):  # storage away for a moment; check() tells the rest
                self._write()

    def _judge(self) -> tuple[bytes | None, str]:
        """Return the stale lock file's identity and why it is stale; None where it is gone.

        Raises ``LockError`` where its holder lives.
        """
        holder = _read(self.path)
        if holder is not None and holder.place == self.me.place:
            if not _lives(holder):
                return holder.token.encode(), f"its holder {holder} no longer runs"
            raise self._refusal(holder, "that process runs on this machine")
        started = time.monotonic()
        patience = self.patience_s
        if patience is None:
            patience = min(3 * (holder.beat_s if holder else BEAT_S), LONGEST_WAIT_S)
        while time.monotonic() - started < patience:
            time.sleep(min(0.2, patience / 5))
            if not self.path.exists():
                return None, ""
            later = _read(self.path)
            if later != holder and later is not None:
                if holder is None:  # it was just being written
                    return self._judge()
                raise self._refusal(later, "its heartbeat goes on")
        token = holder.token.encode() if holder else b""
        who = f"the heartbeat of its holder {holder} stood still" if holder else "it is unreadable"
        return token, f"{who} for {patience:g} s"

    def _refusal(self, holder: Holder, why: str) -> LockError:
        return LockError(
            f"{self.path}: the folder is in use by {holder}; {why}. Stop that run, or give this "
            "one another folder"
        )

    def _remove(self, token: bytes) -> bool:
        """Remove the lock file if it is still the one judged; whether it was removed here."""
        with contextlib.suppress(FileNotFoundError), _guard(self.path.parent):
            found = _read(self.path)
            if (found.token.encode() if found else b"") == token:
                self.path.unlink()
                return True
        return False


@contextlib.contextmanager
def _guard(folder: Path) -> Iterator[None]:
    """Let one process at a time judge and remove, where the file system has such locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _read(path: Path) -> Holder | None:
    """Return what a lock file says, or None where it is missing, half written or something else."""
    try:
        with path.open("rb") as file:
            return Holder.model_validate_json(file.read(_ROOM))
    except (OSError, ValueError):
        return None


def _place() -> str:
    """Return a name for this kernel and process namespace, where a pid means one process."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _lives(holder: Holder) -> bool:
    """Return whether the holder's process, of this machine, still runs."""
    born = _born(holder.pid)
    return born != "" and (ALIVE in (born, holder.born) or born == holder.born)


def _born(pid: int) -> str:
    """Return when a process started: empty where it is dead, ``ALIVE`` where that is all we see."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except PermissionError:
        pass  # it is another user's
    try:
        # the command's name stands in parentheses and may hold spaces; the state follows it
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ALIVE
    return "" if state in "ZX" else fields[18]
