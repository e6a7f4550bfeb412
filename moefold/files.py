"""File access with the path in every error, and atomic writes. Standard library only."""

import errno
import fcntl
import json
import math
import os
import resource
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

UNSYNCED = frozenset({errno.EINVAL, errno.ENOTSUP})
"""Errors of network file systems that do not sync folders."""
SPARE_HANDLES = 256
"""Files besides those of data that a process has open: modules, logs, sockets, checkpoints."""


@contextmanager
def path_in_errors(path: str | Path, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Add ``path`` to errors raised in the context that name no file.

    Python names the file when opening fails, but not when reading or writing an open file fails.
    A ``UnicodeDecodeError`` cannot hold a file name and becomes an error of class ``kind``.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    except UnicodeDecodeError as error:
        raise kind(f"{path}: is not UTF-8 text: {error}") from error


KINDS_OF_FILE = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Names of what is not a regular file, by its type bits."""


def irregularity(path: Path) -> str | None:
    """Return what ``path`` is if not a regular file or a link to one: reading may never end.

    Raises:
        OSError: if it does not exist.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return None
    what = KINDS_OF_FILE.get(stat.S_IFMT(mode), "something else")
    return f"is not a regular file but {what}; put the file itself there"


def require_regular(path: Path, kind: type[ValueError] = ValueError) -> None:
    """Check that ``path`` is a regular file or a link to one.

    Raises:
        ValueError: as class ``kind``, if it is a pipe, a socket, a device or a folder.
        OSError: if it does not exist.
    """
    what = irregularity(path)
    if what is not None:
        raise kind(f"{path} {what}")


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: on failure the previous content stays.

    Anything other than a regular file, such as a pipe, is written to directly.
    """
    if path.exists() and not path.is_file():
        with path_in_errors(path):
            path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        error.filename = str(path)
        error.filename2 = None
        raise
    finally:
        with suppress(OSError):
            draft.unlink()


def plain(value: Any) -> Any:
    """Convert NumPy and torch numbers to Python's; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def write_json(path: Path, content: Any) -> None:
    """Write plain data as an indented JSON file, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(
    path: Path, kind: type[ValueError] = ValueError, limit: int | None = None
) -> dict[str, Any]:
    """Read a JSON object of at most ``limit`` bytes, without NaN and infinities.

    Raises:
        ValueError: as class ``kind``, naming the file, if it is no regular file, too large, or not
            a JSON object.
        OSError: if it cannot be read.
    """

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not allowed")

    require_regular(path, kind)
    with path_in_errors(path, kind):
        if limit is not None and path.stat().st_size > limit:
            raise kind(f"{path} is larger than {limit} bytes")
        text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text, parse_constant=refuse)
    except (RecursionError, ValueError) as error:
        raise kind(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise kind(f"{path} must contain a JSON object, not a {type(content).__name__}")
    return content


def reserve_handles(number: int, what: str) -> None:
    """Raise this process's limit of open files so that ``number`` more can be opened.

    Raises:
        ValueError: if the system's hard limit is too low; says the number, and ``what`` needs it.
    """
    needed = number + SPARE_HANDLES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) and soft == hard:
        return
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ValueError(
                f"{what} need {needed} open files in each process, but the system allows {hard}; "
                f"raise the hard limit (ulimit -Hn {needed}), or join files"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def make_folder(path: Path) -> list[Path]:
    """Create a folder and its missing parents; return the created folders, innermost first."""
    new: list[Path] = []
    try:
        for folder in [path, *path.parents]:
            if folder.exists():
                break
            new.append(folder)
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty_folders(new)
        raise
    return new


def unused_folder(name: str) -> Path:
    """Return the first of ``runs/name``, ``runs/name-2``, ... that is empty or missing."""
    folder = Path("runs") / name
    number = 2
    while folder.exists() and any(folder.iterdir()):
        folder = Path("runs") / f"{name}-{number}"
        number += 1
    return folder


def remove_empty_folders(folders: list[Path]) -> None:
    """Remove the empty ones among the folders, in the given order."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """Create a folder for the context; on an error, remove the created folders that are empty."""
    new = make_folder(path)
    try:
        yield
    except BaseException:
        remove_empty_folders(new)
        raise


@contextmanager
def draft_folder(parent: Path, prefix: str, mode: int = 0o777) -> Iterator[Path]:
    """Create a folder in ``parent`` for the context; remove it at the end unless it was renamed.

    Drafts of killed processes of this machine are removed too: each process holds the lock of its
    own, which the kernel releases with the process. Where folders cannot be locked, drafts stay.

    Args:
        parent: an existing folder.
        prefix: begins the names of drafts for one purpose, and of nothing else in ``parent``.
        mode: permissions, which the process's mask limits.
    """
    prefix = f"{prefix}{socket.gethostname()}-"
    for stale in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError):
            handle = _lock_folder(stale)
            shutil.rmtree(stale, ignore_errors=True)
            os.close(handle)
    draft, handle = _locked_draft(parent, prefix, mode)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def scratch_folder(purpose: str) -> AbstractContextManager[Path]:
    """Return a :func:`draft_folder` among the system's temporary files, for this user only."""
    return draft_folder(Path(tempfile.gettempdir()), f"moefold-{purpose}-", 0o700)


def sync_folder(path: Path) -> None:
    """Return once the folder's entries are on the medium."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSYNCED:
            raise
    finally:
        os.close(fd)


def _locked_draft(parent: Path, prefix: str, mode: int) -> tuple[Path, int | None]:
    """Create a folder and lock it; return it and its descriptor, None if it cannot be locked."""
    while True:
        draft = parent / f"{prefix}{uuid.uuid4().hex[:12]}"
        draft.mkdir(mode)
        try:
            handle = _lock_folder(draft)
        except (FileNotFoundError, BlockingIOError):
            continue  # another process took it for one that was left, and removes it
        except OSError:
            return draft, None
        if draft.exists():
            return draft, handle
        os.close(handle)


def _lock_folder(folder: Path) -> int:
    """Lock a folder and return its descriptor; ``OSError`` if another process holds the lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def try_output(path: Path) -> None:
    """Try, before long work, whether ``write_text`` can write ``path``; nothing stays.

    What is not a regular file, such as a pipe, is not opened.

    Raises:
        OSError: if its folder does not exist, takes no files, or ``path`` is a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        require_writable(path)
        return
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:
            file.write(b" ")
            file.flush()
    except OSError as error:
        error.filename = str(path)
        error.filename2 = None
        raise
    finally:
        with suppress(OSError):
            draft.unlink()


def require_writable(path: Path) -> None:
    """Check, without writing, that the file or folder ``path`` could be created or written to.

    Raises:
        OSError: if ``path``, or its nearest existing parent, is not writable.
    """
    for ancestor in (path, *path.parents):
        with suppress(FileNotFoundError):
            os.stat(ancestor)
            if not os.access(ancestor, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(ancestor))
            return
