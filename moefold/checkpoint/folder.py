"""A folder of checkpoints: lists them, finds the newest complete one, removes old ones.

``step-00000123`` is a checkpoint. A suffix marks one in transition: ``.tmp-…`` is being written,
``.old-…`` is being replaced by one of the same step, ``.gone-…`` is being removed. They are ordered
by step, never by time. Imports no torch.
"""

import logging
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from moefold.checkpoint import manifest
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.disk import DISK, Disk, Warn, write_file
from moefold.checkpoint.errors import CheckpointError, DamagedError
from moefold.checkpoint.manifest import Manifest

POINTER = "latest"

_NAME = re.compile(r"step-(\d{8,15})(?:\.(tmp|old|gone)-[0-9a-f]+)?")
_TEMPORARY_POINTER = re.compile(rf"{POINTER}\.tmp-[0-9a-f]+")
_log = logging.getLogger("moefold.checkpoint")


@dataclass(frozen=True)
class Candidate:
    """A folder named like a checkpoint; ``suffix`` is tmp, old or gone, or empty."""

    step: int
    suffix: str
    path: Path


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def transition_path(path: Path, suffix: str) -> Path:
    """Return an unused name next to ``path`` for a checkpoint in transition: tmp, old or gone."""
    step = path.name.partition(".")[0]
    return path.with_name(f"{step}.{suffix}-{uuid.uuid4().hex[:12]}")


def list_candidates(folder: Path) -> list[Candidate]:
    """Return folders named like checkpoints, newest first; of one step the finished one first."""
    if not folder.is_dir():
        return []
    listed = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            listed.append(Candidate(int(match[1]), match[2] or "", path))
    return sorted(listed, key=lambda c: (-c.step, c.suffix, c.path.name))


def check_complete(path: Path, disk: Disk = DISK) -> Manifest:
    """Return a checkpoint's manifest after checking that all shards exist in full size.

    Raises ``DamagedError`` with the file, its expected and its actual size.
    """
    contents = manifest.read(path, disk)
    match = _NAME.fullmatch(path.name)
    if match and int(match[1]) != contents.step:
        what = f"states step {contents.step}, but the folder is named for another step"
        raise DamagedError(path, manifest.FILE, what)
    for shard in contents.shards:
        check_size(path, shard, disk)
    return contents


def check_size(path: Path, shard: manifest.ShardFile, disk: Disk = DISK) -> None:
    """Raise ``DamagedError`` if a shard is missing, of another size, or no regular file."""
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


def find_newest(
    folder: str | Path, *, before: int | None = None, warn: Warn = _log.warning, disk: Disk = DISK
) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None if none was ever finished.

    ``before`` excludes that step and later ones. Damaged checkpoints are skipped with a warning.
    Raises ``CheckpointError`` if there are checkpoints but none is complete, and
    ``VersionError`` if the newest is of a version that cannot be read: an older one would silently
    lose its steps.
    """
    folder = Path(folder)
    skipped: list[str] = []
    for candidate in list_candidates(folder):
        if candidate.suffix in ("tmp", "gone") or (before is not None and candidate.step >= before):
            continue
        try:
            check_complete(candidate.path, disk)
        except DamagedError as error:
            skipped.append(str(error))
            continue
        for defect in skipped:
            warn(f"{defect}. Falling back to {candidate.path.name}")
        return candidate.path
    if skipped:
        what = f"{folder}: no checkpoint is usable; move them away to begin at step 0"
        raise CheckpointError("\n  ".join((what, *skipped)))
    return None


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a complete checkpoint: its manifest is written last."""
    return (folder / manifest.FILE).is_file()


def resolve_checkpoint(source: Path) -> Path:
    """Return ``source`` if it is a checkpoint, else the newest one in this folder.

    Raises:
        CheckpointError: if there is none.
    """
    path = source if is_checkpoint(source) else find_newest(source)
    if path is None and source.is_dir() and _NAME.fullmatch(source.name):
        manifest.read(source)  # raises with the defect
    if path is None:
        hub = any((source / name).is_file() for name in ("config.json", "adapter_config.json"))
        hint = "convert this Hugging Face folder with moefold import"
        hint = hint if hub else "name a run's folder, or a step-… folder in one"
        raise CheckpointError(f"{source} is not a checkpoint and contains none; {hint}")
    return path


def require_not_checkpoint(folder: Path) -> None:
    """Check that a run would not write into a checkpoint.

    Raises:
        CheckpointError: if ``folder`` is one, with the folder that is probably meant.
    """
    if is_checkpoint(folder):
        raise CheckpointError(
            f"{folder} is a checkpoint, not a run's folder; resume that run from its newest "
            f"checkpoint with --folder {folder.parent}, or start a new run from this one with "
            f"--folder {folder} --fork NEW"
        )


def write_pointer(folder: Path, target: Path, disk: Disk = DISK) -> None:
    """Write the name of ``target`` to the file ``latest``, which only people read."""
    temporary = folder / f"{POINTER}.tmp-{uuid.uuid4().hex[:12]}"
    write_file(disk, temporary, f"{target.name}\n".encode())
    disk.rename(temporary, folder / POINTER)
    disk.sync_folder(folder)


def remove_leftovers(folder: Path, warn: Warn = _log.warning, disk: Disk = DISK) -> None:
    """Remove leftovers of interrupted saves; only the holder of the folder's lock may call this."""
    for candidate in list_candidates(folder):
        final = folder / step_name(candidate.step)
        if candidate.suffix == "old" and not final.exists():
            # Interrupted between the two renames of a replacement: undo it; otherwise finish it.
            disk.rename(candidate.path, final)
        elif candidate.suffix == "old":
            try:
                check_complete(final, disk)
                remove_checkpoint(candidate.path, warn, disk)
            except CheckpointError as error:
                warn(f"{error}. Keeping {candidate.path.name}, which it replaced")
        elif candidate.suffix:
            try_remove(candidate.path, warn, disk)
    for path in folder.iterdir():
        if _TEMPORARY_POINTER.fullmatch(path.name):
            disk.remove_file(path)


def apply_retention(
    folder: Path, policy: CheckpointPolicy, published: Path, warn: Warn, disk: Disk = DISK
) -> None:
    """Remove checkpoints that the policy does not keep; ``published`` always stays.

    Damaged checkpoints are not counted, and stay for inspection until they are older than all
    recent ones.
    """
    complete = []
    damaged = []
    for candidate in list_candidates(folder):
        if candidate.suffix:
            continue
        try:
            check_complete(candidate.path, disk)
            complete.append(candidate)
        except DamagedError:
            damaged.append(candidate)
        except CheckpointError as error:  # of another version: not removed
            warn(str(error))
    recent = {c.path for c in complete[: policy.keep]} | {published}
    oldest_recent = min((c.step for c in complete if c.path in recent), default=0)
    for candidate in complete:
        periodic = policy.keep_every is not None and candidate.step % policy.keep_every == 0
        if candidate.path not in recent and not periodic:
            remove_checkpoint(candidate.path, warn, disk)
    for candidate in damaged:
        if candidate.step < oldest_recent:
            remove_checkpoint(candidate.path, warn, disk)


def remove_checkpoint(path: Path, warn: Warn, disk: Disk = DISK) -> None:
    """Remove a checkpoint: rename it atomically, then delete its files."""
    renamed = transition_path(path, "gone")
    try:
        disk.rename(path, renamed)
    except OSError as error:
        warn(f"{path} could not be removed: {error}")
        return
    try_remove(renamed, warn, disk)


def try_remove(path: Path, warn: Warn, disk: Disk = DISK) -> None:
    """Remove a folder; warn on failure, and leave the rest to the next save."""
    try:
        disk.remove_folder(path)
    except OSError as error:
        warn(f"{path} could not be removed; the next save tries again: {error}")
