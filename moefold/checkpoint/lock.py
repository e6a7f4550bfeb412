"""One writer per checkpoint folder: a file lock, and a file next to it that names the holder.

The lock is ``filelock``'s; the kernel releases it when its process ends, in whatever way. On a file
system without locks a marker file of the library replaces it; a marker left by a dead process of
this machine is replaced, one of another machine stays until someone removes it. Imports no torch.
"""

import errno
import fcntl
import logging
import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Self

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from pydantic import Field

from moefold.checkpoint.disk import Warn
from moefold.checkpoint.errors import LockError
from moefold.config.base import Record
from moefold.files import make_folder, remove_empty_folders

LOCK_FILE = "writer.lock"
HOLDER_FILE = "writer.json"
WAIT_S = 1.0
"""Seconds to wait for the lock: another process may be about to release it."""
UNSUPPORTED_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})
"""Errors of file systems without locks, or whose lock service is off."""
_log = logging.getLogger("moefold.checkpoint")


class Holder(Record):
    """The holder of a folder's lock, as stored in ``writer.json``."""

    run: Annotated[str, Field(max_length=500)]
    host: str
    pid: Annotated[int, Field(ge=1)]
    since: str
    """When it requested the lock, for display; times are never compared."""
    token: str
    """Distinguishes two holders in one process."""

    def __str__(self) -> str:
        return f"{self.run!r} (process {self.pid} on {self.host}, since {self.since})"


class FolderLock:
    """The exclusive right to write checkpoints into a folder, held inside the context.

    ``owner`` names the run in other runs' error messages. Entering raises ``LockError`` if another
    run holds the folder, and warns of a holder that ended without releasing the lock.
    """

    def __init__(self, folder: str | Path, owner: str, *, warn: Warn = _log.warning) -> None:
        folder = Path(folder)
        self.path = folder / LOCK_FILE
        self.holder = Holder(
            run=owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            token=uuid.uuid4().hex,
        )
        self._holder_path = folder / HOLDER_FILE
        self._warn = warn
        self._lock: BaseFileLock = FileLock(self.path, timeout=WAIT_S, thread_local=False)
        self._created_folders: list[Path] = []

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquire the lock, creating the folder if necessary.

        Raises:
            LockError: if another run holds it, or the folder is not writable.
        """
        assert not self._lock.is_locked, "a lock is acquired once"
        self._created_folders = make_folder(self.path.parent)
        try:
            if not _supports_locks(self.path.parent):
                self._lock = SoftFileLock(self.path, timeout=WAIT_S, thread_local=False)
            self._lock.acquire()
            previous = _read_holder(self._holder_path)
            text = self.holder.model_dump_json(indent=1) + "\n"
            self._holder_path.write_text(text, encoding="utf-8")
        except Timeout:
            raise LockError(self._describe_refusal()) from None
        except OSError as error:
            self._lock.release()
            remove_empty_folders(self._created_folders)
            raise LockError(f"{self.path}: the folder cannot be locked: {error}") from error
        if previous is not None:
            self._warn(f"{self.path}: {previous} held this lock and no longer runs. Taking over")

    def release(self) -> None:
        """Release the lock, and remove the folder if it was created for the lock and is empty.

        Does nothing if it was already released, or in a fork of the holder.
        """
        if not self._lock.is_locked or self.holder.pid != os.getpid():
            return
        if _read_holder(self._holder_path) == self.holder:
            with suppress(OSError):
                self._holder_path.unlink()
                self.path.unlink()  # while locked: a process waiting for this file finds it gone
        self._lock.release()
        remove_empty_folders(self._created_folders)

    def check(self) -> None:
        """Raise ``LockError`` if the lock is no longer held: released, or its files removed."""
        for pause_s in (0.1, 0.1, 0.0):
            current = _read_holder(self._holder_path)
            if self._lock.is_locked and current == self.holder:
                return
            time.sleep(pause_s)  # an unreadable file may be a transient storage error
        if current is None:
            reason = f"{HOLDER_FILE} is gone or unreadable"
        else:
            reason = "it was released" if current == self.holder else f"{current} holds it now"
        raise LockError(
            f"{self.path}: {self.holder.run!r} no longer holds this lock; {reason}. "
            "Only the holder may write checkpoints to this folder"
        )

    def _describe_refusal(self) -> str:
        """Return why the lock cannot be acquired, and a remedy."""
        if not self.path.exists():
            return f"{self.path}: the folder cannot be locked: no file can be created in it"
        remedy = "Stop that run, or use another folder for this one"
        if isinstance(self._lock, SoftFileLock):
            remedy += f". This file system has no locks: if that run has ended, remove {self.path}"
        holder = _read_holder(self._holder_path) or "another process"
        return f"{self.path}: the folder is in use by {holder}. {remedy}"


def _read_holder(path: Path) -> Holder | None:
    """Return the holder in a file, or None if it is missing or unreadable."""
    try:
        return Holder.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _supports_locks(folder: Path) -> bool:
    """Return whether the file system has locks, by locking a temporary file."""
    with TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in UNSUPPORTED_LOCKS
    return True
