"""A folder of checkpoints: which there are, which is the newest good one, which go.

``step-00000123`` is a checkpoint. The same name with a suffix is one on its way: ``.tmp-…`` is
being written, ``.old-…`` makes way for a new one of the same step, ``.gone-…`` is being removed.
The order is the step's, never that of a clock. Imports no torch.
"""

import logging
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from moefold.checkpoint import manifest
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.disk import DISK, Disk, Say, write_whole
from moefold.checkpoint.errors import CheckpointError, DamagedError
from moefold.checkpoint.manifest import Manifest

POINTER = "latest"

_NAME = re.compile(r"step-(\d{8,15})(?:\.(tmp|old|gone)-[0-9a-f]+)?")
_POINTER_ON_ITS_WAY = re.compile(rf"{POINTER}\.tmp-[0-9a-f]+")
_log = logging.getLogger("moefold.checkpoint")


@dataclass(frozen=True)
class Candidate:
    """A folder that is named like a checkpoint; ``way`` is its suffix's word or empty."""

    step: int
    way: str
    path: Path


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def on_its_way(path: Path, way: str) -> Path:
    """Return a fresh name beside ``path`` for a checkpoint on its way: tmp, old or gone."""
    step = path.name.partition(".")[0]
    return path.with_name(f"{step}.{way}-{uuid.uuid4().hex[:12]}")


def candidates(folder: Path) -> list[Candidate]:
    """Return what is named like a checkpoint, newest first; of one step the finished one first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Candidate(int(match[1]), match[2] or "", path))
    return sorted(found, key=lambda c: (-c.step, c.way, c.path.name))


def check_complete(path: Path, disk: Disk = DISK) -> Manifest:
    """Return the manifest of a checkpoint whose shards are all there in their full size.

    Raises ``DamagedError`` naming the file, its expected and its actual size.
    """
    found = manifest.read(path, disk)
    match = _NAME.fullmatch(path.name)
    if match and int(match[1]) != found.step:
        what = f"is of step {found.step}, but the folder has another step's name"
        raise DamagedError(path, manifest.FILE, what)
    for shard in found.shards:
        check_size(path, shard, disk)
    return found


def check_size(path: Path, shard: manifest.ShardFile, disk: Disk = DISK) -> None:
    """Raise ``DamagedError`` where a shard is missing, of another size, or no regular file."""
    try:
        size = disk.size(path / shard.file)
    except FileNotFoundError:
        what = f"is missing; expected {shard.size} bytes"
        raise DamagedError(path, shard.file, what) from None
    except OSError as error:
        raise DamagedError(path, shard.file, f"cannot be read: {error}") from error
    if size != shard.size:
        what = f"expected {shard.size} bytes, found {size}; " + manifest.USE_OLDER
        raise DamagedError(path, shard.file, what)


def newest(
    folder: str | Path, *, before: int | None = None, say: Say = _log.warning, disk: Disk = DISK
) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None where none was ever finished.

    ``before`` leaves out that step and later ones. A damaged checkpoint is passed over and ``say``
    is told so. Raises ``CheckpointError`` where there are checkpoints and none is complete, and
    ``VersionError`` where the newest is of a version that cannot be read: an older one would
    silently lose its steps.
    """
    folder = Path(folder)
    passed: list[str] = []
    for candidate in candidates(folder):
        if candidate.way in ("tmp", "gone") or (before is not None and candidate.step >= before):
            continue
        try:
            check_complete(candidate.path, disk)
        except DamagedError as error:
            passed.append(str(error))
            continue
        for what in passed:
            say(f"{what}. Falling back to {candidate.path.name}")
        return candidate.path
    if passed:
        listed = "\n  ".join(passed)
        raise CheckpointError(
            f"{folder}: no checkpoint is usable; move them away to start anew\n  {listed}"
        )
    return None


def checkpoint_in(source: Path) -> Path:
    """Return the checkpoint that a folder is, or the newest one of those that it holds.

    Raises:
        CheckpointError: where there is none.
    """
    path = source if (source / manifest.FILE).is_file() else newest(source)
    if path is None and source.is_dir() and _NAME.fullmatch(source.name):
        manifest.read(source)  # which says what is wrong with it
    if path is None:
        hub = any((source / name).is_file() for name in ("config.json", "adapter_config.json"))
        hint = "moefold import makes a checkpoint of this Hugging Face folder"
        hint = hint if hub else "give a run's folder or step-…"
        raise CheckpointError(f"{source} is no checkpoint and holds none; {hint}")
    return path


def demand_no_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint where the folder of a run belongs, which it would be filled with.

    Raises:
        CheckpointError: with the folder that is meant.
    """
    if (folder / manifest.FILE).is_file():
        raise CheckpointError(
            f"{folder} is a checkpoint, and no run's folder: the run goes on from its newest one "
            f"with --folder {folder.parent}, and a new run begins at this one with "
            f"--folder {folder} --fork NEW"
        )


def point(folder: Path, target: Path, disk: Disk = DISK) -> None:
    """Let the file ``latest`` name ``target``. It is for people; ``newest`` does not read it."""
    fresh = folder / f"{POINTER}.tmp-{uuid.uuid4().hex[:12]}"
    write_whole(disk, fresh, f"{target.name}\n".encode())
    disk.rename(fresh, folder / POINTER)
    disk.sync_folder(folder)


def sweep(folder: Path, say: Say = _log.warning, disk: Disk = DISK) -> None:
    """Remove what killed saves left behind; only the folder's one writer may call this."""
    for candidate in candidates(folder):
        final = folder / step_name(candidate.step)
        if candidate.way == "old" and not final.exists():
            # Its replacement was cut short between two renames, and is undone; else it is finished.
            disk.rename(candidate.path, final)
        elif candidate.way == "old":
            try:
                check_complete(final, disk)
                discard(candidate.path, say, disk)
            except CheckpointError as error:
                say(f"{error}. Keeping {candidate.path.name} beside it")
        elif candidate.way:
            try_remove(candidate.path, say, disk)
    for path in folder.iterdir():
        if _POINTER_ON_ITS_WAY.fullmatch(path.name):
            disk.remove_file(path)


def retain(folder: Path, policy: CheckpointPolicy, just: Path, say: Say, disk: Disk = DISK) -> None:
    """Remove checkpoints beyond the policy's; ``just`` and the newest complete ones stay.

    A damaged checkpoint counts for nothing and stays to be looked at until it is older than all
    that stay as recent.
    """
    complete, damaged = [], []
    for candidate in candidates(folder):
        if candidate.way:
            continue
        try:
            check_complete(candidate.path, disk)
            complete.append(candidate)
        except DamagedError:
            damaged.append(candidate)
        except CheckpointError as error:  # another version's: not ours to remove
            say(str(error))
    recent = {c.path for c in complete[: policy.keep]} | {just}
    oldest = min((c.step for c in complete if c.path in recent), default=0)
    for candidate in complete:
        kept = policy.keep_every is not None and candidate.step % policy.keep_every == 0
        if candidate.path not in recent and not kept:
            discard(candidate.path, say, disk)
    for candidate in damaged:
        if candidate.step < oldest:
            discard(candidate.path, say, disk)


def discard(path: Path, say: Say, disk: Disk = DISK) -> None:
    """Remove a checkpoint: out of sight in one step, then its files."""
    going = on_its_way(path, "gone")
    try:
        disk.rename(path, going)
    except OSError as error:
        say(f"{path} could not be removed and stays: {error}")
        return
    try_remove(going, say, disk)


def try_remove(path: Path, say: Say, disk: Disk = DISK) -> None:
    """Remove a folder; where that fails, say so and leave the rest to the next sweep."""
    try:
        disk.remove_folder(path)
    except OSError as error:
        say(f"{path} could not be removed, the next save tries again: {error}")
