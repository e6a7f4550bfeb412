"""Writing a checkpoint so that at every moment the newest complete one is whole.

The order: shards into a temporary folder, each on the medium before the next step; the manifest
last; the folder's entries; the rename that publishes it; the parent's entries; the pointer; only
then retention.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from moefold.checkpoint import folder as folders
from moefold.checkpoint import manifest
from moefold.checkpoint.config import Policy
from moefold.checkpoint.disk import DISK, FULL, Disk, Say, retried, write_whole
from moefold.checkpoint.errors import CheckpointError, SaveError
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.manifest import CHUNK_BYTES, Manifest, Shard, Slice, Stored
from moefold.checkpoint.meta import check_meta
from moefold.checkpoint.shards import Piece, plan, write_shard
from moefold.checkpoint.tensors import (
    NAMES,
    Part,
    TensorSource,
    Unread,
    check_dtype,
    check_storable,
)

POLICY = Policy()
_log = logging.getLogger("moefold.checkpoint")


Content = Tensor | Unread | Part
"""What is saved under a name: a whole tensor, or a box of one that other ranks have the rest of."""
Contents = Mapping[str, Content | Sequence[Part]]


def save(
    folder: str | Path,
    step: int,
    tensors: Contents,
    meta: dict[str, Any],
    policy: Policy = POLICY,
    *,
    lock: FolderLock | None = None,
    say: Say = _log.warning,
    disk: Disk = DISK,
) -> Path:
    """Write ``folder/step-…`` and return its path once it is on the medium and published.

    ``tensors`` may lie on any device and have any strides; besides them at most 64 MiB of host
    memory is taken. An ``Unread`` one exists only while it is written. ``meta`` is plain JSON. A
    checkpoint of the same step is replaced. ``lock`` is the folder's, held by the caller; without
    it one is held during the call. ``say`` is told of attempts that failed and of what could not be
    cleaned up.

    Raises ``CheckpointError`` for what cannot be stored, before anything is written; ``LockError``
    where another run holds the folder; ``SaveError``, with what is needed and what is free, where
    the storage refuses: the partial checkpoint is then removed, and those before it still stand.
    """
    work = Work.of(folder, step, tensors, meta, policy, say, disk)
    work.make_folder()
    own = FolderLock(folder, f"a save of step {step}", say=say)
    with own if lock is None else nullcontext(lock) as held:
        work.clear()
        work.conclude(work.stage(policy.attempts), policy, held)
    return work.final


def _pieces(tensors: Contents) -> Iterator[Piece]:
    for name, content in tensors.items():
        for part in content if isinstance(content, Sequence) else (content,):
            yield _piece(name, part)


def _piece(name: str, content: Content) -> Piece:
    shape = tuple(content.shape)
    at = content.at if isinstance(content, Part) else (0,) * len(shape)
    if isinstance(content, Unread):
        check_dtype(name, content.dtype)
        return Piece(name, NAMES[content.dtype], shape, at, shape, content)
    tensor = content.tensor if isinstance(content, Part) else content
    check_storable(name, tensor)
    return Piece(name, NAMES[tensor.dtype], shape, at, tuple(tensor.shape), TensorSource(tensor))


def _check_manifest(step: int, pieces: list[Piece], meta: dict[str, Any]) -> None:
    """Refuse what could not be read back: names, a step, facts that the manifest cannot hold."""
    check_meta(meta)
    drafts = {p.name: Stored(dtype=p.dtype, shape=p.global_shape, slices=()) for p in pieces}
    try:
        Manifest(writer="", step=step, shards=(), tensors=drafts, meta=meta)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{at} cannot be stored: {first['msg']}") from None


@dataclass(frozen=True)
class Work:
    """One save: what this process writes and where; ``save`` and ``together`` call its parts."""

    folder: Path
    step: int
    groups: list[list[Piece]]
    meta: dict[str, Any]
    say: Say
    disk: Disk

    @classmethod
    def of(
        cls,
        folder: str | Path,
        step: int,
        tensors: Contents,
        meta: dict[str, Any],
        policy: Policy,
        say: Say,
        disk: Disk = DISK,
    ) -> "Work":
        """Check what is to be saved, and group it into shards."""
        pieces = list(_pieces(tensors))
        _check_manifest(step, pieces, meta)
        return cls(Path(folder), step, plan(pieces, policy.shard_bytes), meta, say, disk)

    @property
    def final(self) -> Path:
        """The checkpoint's folder once it is published."""
        return self.folder / folders.step_name(self.step)

    @property
    def needed(self) -> int:
        """Bytes that the checkpoint takes, roughly where headers and manifest are concerned."""
        pieces = [piece for group in self.groups for piece in group]
        digests = sum(64 * (1 + piece.size // CHUNK_BYTES) for piece in pieces)
        return sum(piece.size for piece in pieces) + digests + 512 * (len(pieces) + 8)

    def make_folder(self) -> None:
        """Make the folder of checkpoints."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(self.folder, f"the folder cannot be made: {error}") from error

    def tidy(self, what: str, op: Callable[[], None]) -> None:
        """Do what a checkpoint does not depend on; a failure is told and left to the next save."""
        try:
            op()
        except OSError as error:
            self.say(f"{self.folder}: {what} failed: {error}")

    def clear(self) -> None:
        """Remove what earlier saves left half done."""
        self.tidy("clearing leftovers", lambda: folders.sweep(self.folder, self.say, self.disk))

    def conclude(self, staged: Path, policy: Policy, held: FolderLock) -> None:
        """Publish what is staged, point to it, and let go of older ones."""
        try:
            held.check()
            self.publish(staged)
        finally:
            if staged.exists():
                folders.try_remove(staged, self.say, self.disk)
        self.tidy(
            "naming it as the latest", lambda: folders.point(self.folder, self.final, self.disk)
        )
        self.tidy(
            "removing older ones",
            lambda: folders.retain(self.folder, policy, self.final, self.say, self.disk),
        )

    def stage(self, attempts: int) -> Path:
        """Write the whole checkpoint under a temporary name and return it."""
        try:
            return retried(self._attempt, self.final.name, attempts, self.say, self.disk)
        except OSError as error:
            raise self.refused(error, attempts) from error

    def publish(self, staged: Path) -> None:
        """Give the staged checkpoint its name; one of the same step steps aside first."""
        aside = None
        try:
            if self.final.exists():
                aside = folders.on_its_way(self.final, "old")
                self.disk.rename(self.final, aside)
            try:
                self.disk.rename(staged, self.final)
            except OSError:
                if aside is not None:
                    self.disk.rename(aside, self.final)
                raise
            retried(self._sync_folder, self.final.name, 3, self.say, self.disk)
        except OSError as error:
            raise SaveError(self.final, f"written, but could not be published: {error}") from error
        if aside is not None:
            folders.discard(aside, self.say, self.disk)

    def _sync_folder(self) -> None:
        self.disk.sync_folder(self.folder)

    def _attempt(self) -> Path:
        """Write the checkpoint once, on the medium; leave nothing behind where that fails."""
        staged = folders.on_its_way(self.final, "tmp")
        free = self.disk.free(self.folder)
        if free < self.needed:
            raise OSError(min(FULL), "not enough room", str(staged))
        try:
            self.disk.make_folder(staged)
            self._write(staged)
        except BaseException:
            if staged.exists():
                folders.try_remove(staged, self.say, self.disk)
            raise
        return staged

    def _write(self, staged: Path) -> None:
        """Write shards, then the manifest, then the folder's entries."""
        shards, tensors = self.write_shards(staged, "shard")
        self.write_manifest(staged, shards, tensors)

    def write_shards(self, staged: Path, stem: str) -> tuple[list[Shard], dict[str, Stored]]:
        """Write the shards, and return what the manifest says of them and their tensors."""
        shards: list[Shard] = []
        found: dict[str, list[Slice]] = {}
        for number, group in enumerate(self.groups):
            path = staged / f"{stem}-{number:05d}.safetensors"
            shard, parts = write_shard(self.disk, path, group, CHUNK_BYTES, number)
            shards.append(shard)
            for piece, part in parts:
                found.setdefault(piece.name, []).append(part)
        tensors = {
            p.name: Stored(dtype=p.dtype, shape=p.global_shape, slices=tuple(found[p.name]))
            for group in self.groups
            for p in group
        }
        return shards, tensors

    def write_manifest(
        self, staged: Path, shards: Sequence[Shard], tensors: Mapping[str, Stored]
    ) -> None:
        """Write the manifest, and the folder's entries.

        Raises ``CheckpointError`` for boxes that do not make whole tensors: of ranks that were to
        write one, none did, or several.
        """
        record = Manifest(
            writer=manifest.writer(),
            step=self.step,
            shards=tuple(shards),
            tensors=dict(tensors),
            meta=self.meta,
        )
        for name, what in manifest.contradictions(record):
            raise CheckpointError(f"{self.final} is not published: {name or 'the manifest'} {what}")
        content = manifest.dump(record)
        if len(content) > manifest.MAX_BYTES:
            raise CheckpointError(
                f"the manifest of {self.final} would hold {len(content)} bytes, more than the "
                f"limit of {manifest.MAX_BYTES}; move large facts from meta into tensors"
            )
        write_whole(self.disk, staged / manifest.FILE, content)
        self.disk.sync_folder(staged)

    def refused(self, error: OSError, attempts: int) -> SaveError:
        """Return the error of a save that the storage refused."""
        before = "nothing of it is left, and the checkpoints before it still stand"
        if error.errno not in FULL:
            what = f"could not be written: {error}; {before}"
            return SaveError(self.final, what)
        try:
            free = self.disk.free(self.folder)
        except OSError:
            return SaveError(self.final, f"could not be written: {error}; {before}", self.needed)
        limit = " (a quota or a limit stands in the way)" if free >= self.needed else ""
        what = (
            f"needs {self.needed} bytes and {free} are free{limit}, tried {attempts} times; "
            f"{before}. Free some space, or keep fewer checkpoints"
        )
        return SaveError(self.final, what, self.needed, free)
