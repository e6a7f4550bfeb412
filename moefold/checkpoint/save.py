"""Writing a checkpoint so that at every moment there is a complete newest one.

Each rank writes its own boxes of tensors, the first rank does the rest. Each step is on the medium
before the next: all shards in a temporary folder; the manifest; the folder's entries; the rename
that publishes it; the parent's entries; the pointer; only then retention. If a rank cannot write,
the checkpoint is not published, and all ranks raise.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from moefold.checkpoint import folder as folders
from moefold.checkpoint import manifest
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.disk import DISK, FULL, Disk, Result, Say, retried, write_whole
from moefold.checkpoint.errors import CheckpointError, SaveError
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.manifest import CHUNK_BYTES, Manifest, ShardFile, TensorMeta
from moefold.checkpoint.tensors import (
    NAMES,
    LazyTensor,
    Named,
    TensorSlice,
    check_storable,
    pack,
    write_shard,
)
from moefold.comm.agree import FirstRankFailed, gather_to_first, run_on_first
from moefold.comm.group import SELF_GROUP, Group

POLICY = CheckpointPolicy()
_log = logging.getLogger("moefold.checkpoint")

Contents = Mapping[str, Tensor | LazyTensor | Sequence[TensorSlice]]
"""The values to save by name: a whole tensor, or this rank's boxes of one."""


def save(
    folder: str | Path,
    step: int,
    tensors: Contents,
    meta: dict[str, Any],
    policy: CheckpointPolicy = POLICY,
    *,
    lock: FolderLock | None = None,
    ranks: Group = SELF_GROUP,
    say: Say = _log.warning,
    disk: Disk = DISK,
) -> Path:
    """Write ``folder/step-…`` and return its path once it is on the medium and published.

    A collective call: each rank passes the boxes that it alone writes; together they tile each
    tensor. Tensors may be on any device and have any strides; at most 64 MiB of additional host
    memory is used. A ``LazyTensor`` is read only while it is written. ``meta`` is plain JSON. A
    checkpoint of the same step is replaced. ``lock`` is the folder's, held by the first rank; a
    single rank may omit it, and holds one during the call. ``say`` receives messages about failed
    attempts and clean-up.

    Raises ``CheckpointError`` for values that cannot be stored, before anything is written;
    ``LockError`` if another run holds the folder; ``SaveError``, with the bytes needed and free, if
    storage fails on any rank: the partial checkpoint is then removed, and earlier ones remain.
    """
    own = FolderLock(folder, f"a save of step {step}", say=say)
    saving = CheckpointWriter(
        folder, step, tensors, meta, policy, lock=lock or own, ranks=ranks, say=say, disk=disk
    )
    if lock is None:
        assert ranks.size == 1, "the ranks' lock is taken before they save together"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(Path(folder), f"the folder cannot be created: {error}") from error
    with own if lock is None else nullcontext():
        try:
            saving.begin()
            saving.write()
            saving.collect()
            saving.publish()
            return saving.conclude()
        finally:
            saving.clean_up()


class CheckpointWriter:
    """One save by all ranks in its phases, which are called in the order of their definition.

    ``begin``, ``collect`` and ``conclude`` are collective calls. ``write`` and ``publish`` do not
    communicate and raise nothing, so that a separate thread may run them. The arguments are those
    of :func:`save`.
    """

    def __init__(
        self,
        folder: str | Path,
        step: int,
        tensors: Contents,
        meta: dict[str, Any],
        policy: CheckpointPolicy,
        *,
        lock: FolderLock,
        ranks: Group,
        say: Say = _log.warning,
        disk: Disk = DISK,
    ) -> None:
        self._folder, self._step, self._meta, self._policy = Path(folder), step, meta, policy
        self._lock, self._ranks, self._say, self._disk = lock, ranks, say, disk
        slices: list[Named] = []
        for name, content in tensors.items():
            if isinstance(content, Tensor | LazyTensor):
                content = (TensorSlice.whole(content),)
            slices += [(name, part) for part in content]
        _check(step, slices, meta)
        self._shards = pack(slices, policy.shard_bytes)
        self.path = self._folder / folders.step_name(step)
        """The checkpoint's folder once it is published."""
        self._staged: Path | None = None
        self._told: list[dict[str, Any]] = []
        """Records of what this rank wrote; later, on the first rank, those of all ranks."""
        self._error: Exception | None = None

    def begin(self) -> None:
        """Remove leftovers of interrupted saves, and create the folder for all ranks' shards."""

        def begin() -> str:
            self._lock.check()  # another run's unfinished checkpoint would look like a leftover
            sweep = partial(folders.sweep, self._folder, self._say, self._disk)
            self._tidy("removing interrupted saves", sweep)
            staged = folders.on_its_way(self.path, "tmp")
            self._attempts(lambda: self._disk.make_folder(staged))
            return str(staged)

        self._staged = Path(self._run_on_first(begin))

    def write(self) -> None:
        """Write this rank's shards."""
        try:
            shards, tensors = self._attempts(self._write_shards)
        except Exception as error:
            self._error = error
            named = isinstance(error, CheckpointError)
            said = str(error) if named else f"{type(error).__name__}: {error}"
            self._told = [{"error": said}]
        else:
            said = {name: stored.model_dump(mode="json") for name, stored in tensors.items()}
            self._told = [{"shards": [s.model_dump(mode="json") for s in shards], "tensors": said}]

    def collect(self) -> None:
        """Gather the records of all ranks' shards on the first rank."""
        self._told = list(gather_to_first(self._told[0], self._ranks))

    def publish(self) -> None:
        """On the first rank, write the manifest and rename the checkpoint to its final name."""
        if self._ranks.index:
            return
        try:
            refused = [f"rank {n}: {s['error']}" for n, s in enumerate(self._told) if "error" in s]
            if refused:  # A single rank raises its own error.
                alone = self._ranks.size == 1 and self._error
                raise alone or SaveError(self.path, "; ".join(refused))
            content = self._manifest(*_merged(self._told))
            self._attempts(lambda: self._write_manifest(content))
            self._lock.check()
            self._give_name()
        except Exception as error:
            self._error = error
            self.clean_up()
            return
        point = partial(folders.point, self._folder, self.path, self._disk)
        self._tidy("writing the file latest", point)
        keep = self._folder, self._policy, self.path, self._say, self._disk
        self._tidy("removing old checkpoints", partial(folders.retain, *keep))

    def conclude(self) -> Path:
        """Return the checkpoint's path, or raise the error of the save, on all ranks."""

        def told() -> None:
            if self._error is not None:
                raise self._error

        self._run_on_first(told)
        return self.path

    def clean_up(self) -> None:
        """On the first rank, remove a checkpoint that was not published."""
        if self._ranks.index == 0 and self._staged is not None and self._staged.exists():
            folders.try_remove(self._staged, self._say, self._disk)

    def _run_on_first(self, function: Callable[[], Any]) -> Any:
        try:
            return run_on_first(function, self._ranks)
        except FirstRankFailed as error:
            raise SaveError(self.path, str(error)) from error

    def _attempts(self, function: Callable[[], Result]) -> Result:
        """Call a function, and retry on transient storage errors.

        Raises:
            SaveError: if storage still fails.
        """
        rank = f", rank {self._ranks.index}" if self._ranks.size > 1 else ""
        try:
            return retried(
                function, self.path.name + rank, self._policy.attempts, self._say, self._disk
            )
        except OSError as error:
            raise self._refused(error) from error

    def _tidy(self, what: str, function: Callable[[], None]) -> None:
        """Run an optional clean-up; a failure is reported and left to the next save."""
        try:
            function()
        except OSError as error:
            self._say(f"{self._folder}: {what} failed: {error}")

    def _write_shards(self) -> tuple[list[ShardFile], dict[str, TensorMeta]]:
        """Write this rank's shards once; return their records for the manifest."""
        assert self._staged is not None, "begin comes first"
        index = self._ranks.index
        stem = "shard" if self._ranks.size == 1 else f"rank-{index:05d}"
        for left in self._staged.glob(f"{stem}-*"):
            self._disk.remove_file(left)
        if self._disk.free(self._folder) < self._needed:
            raise OSError(min(FULL), "not enough free space", str(self._staged))
        shards: list[ShardFile] = []
        tensors: dict[str, TensorMeta] = {}
        for number, slices in enumerate(self._shards):
            path = self._staged / f"{stem}-{number:05d}.safetensors"
            shard, written = write_shard(self._disk, path, slices, CHUNK_BYTES, number)
            shards.append(shard.model_copy(update={"rank": index}))
            for (name, part), stored in zip(slices, written, strict=True):
                meta = tensors.get(name) or _meta(part)
                tensors[name] = meta.model_copy(update={"slices": (*meta.slices, stored)})
        return shards, tensors

    def _manifest(self, shards: Sequence[ShardFile], tensors: dict[str, TensorMeta]) -> bytes:
        """Return the manifest file's content.

        Raises:
            CheckpointError: if boxes do not tile their tensors, as when no rank or several wrote
                one; or if the manifest is too large.
        """
        record = Manifest(
            writer=manifest.WRITER,
            step=self._step,
            shards=tuple(shards),
            tensors=tensors,
            meta=self._meta,
        )
        for name, what in manifest.contradictions(record):
            raise CheckpointError(f"{self.path} is not published: {name or 'the manifest'} {what}")
        content = manifest.dump(record)
        if len(content) > manifest.MAX_BYTES:
            raise CheckpointError(
                f"the manifest of {self.path} would have {len(content)} bytes, more than the "
                f"limit of {manifest.MAX_BYTES}; store large values of meta as tensors"
            )
        return content

    def _write_manifest(self, content: bytes) -> None:
        """Write the manifest, then sync the folder's entries, once."""
        assert self._staged is not None, "begin comes first"
        path = self._staged / manifest.FILE
        if path.exists():
            self._disk.remove_file(path)
        write_whole(self._disk, path, content)
        self._disk.sync_folder(self._staged)

    def _give_name(self) -> None:
        """Rename the staged checkpoint to its final name; first move one of the same step away."""
        assert self._staged is not None, "begin comes first"
        aside = None
        try:
            if self.path.exists():
                aside = folders.on_its_way(self.path, "old")
                self._disk.rename(self.path, aside)
            try:
                self._disk.rename(self._staged, self.path)
            except OSError:
                if aside is not None:
                    self._disk.rename(aside, self.path)
                raise
            sync = partial(self._disk.sync_folder, self._folder)
            retried(sync, self.path.name, 3, self._say, self._disk)
        except OSError as error:
            raise SaveError(self.path, f"written, but could not be published: {error}") from error
        if aside is not None:
            folders.discard(aside, self._say, self._disk)

    @property
    def _needed(self) -> int:
        """Bytes that this rank writes, with an estimate for headers and the manifest."""
        sizes = [part.size for slices in self._shards for _, part in slices]
        digests = sum(64 * (1 + size // CHUNK_BYTES) for size in sizes)
        return sum(sizes) + digests + 512 * (len(sizes) + 8)

    def _refused(self, error: OSError) -> SaveError:
        """Return the error for a save that failed in storage."""
        before = "its files are removed, and earlier checkpoints are unchanged"
        if error.errno not in FULL:
            return SaveError(self.path, f"could not be written: {error}; {before}")
        needed = self._needed
        try:
            free = self._disk.free(self._folder)
        except OSError:
            return SaveError(self.path, f"could not be written: {error}; {before}", needed)
        limit = " (a quota or another limit applies)" if free >= needed else ""
        tried = f"after {self._policy.attempts} attempts"
        what = (
            f"needs {needed} bytes and {free} are free{limit}, {tried}; {before}. "
            "Free some space, or lower watch.checkpoint.keep"
        )
        return SaveError(self.path, what, needed, free)


def _meta(part: TensorSlice) -> TensorMeta:
    """Return a tensor's manifest record without slices."""
    return TensorMeta(dtype=NAMES[part.tensor.dtype], shape=part.shape, slices=())


def _check(step: int, slices: Sequence[Named], meta: dict[str, Any]) -> None:
    """Raise for boxes that cannot be written, and metadata that the manifest cannot represent."""
    for name, part in slices:
        check_storable(name, part.tensor)
    manifest.check_meta(meta)
    drafts = {name: _meta(part) for name, part in slices}
    try:
        Manifest(writer="", step=step, shards=(), tensors=drafts, meta=meta)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{at} cannot be stored: {first['msg']}") from None


def _merged(said: Iterable[dict[str, Any]]) -> tuple[list[ShardFile], dict[str, TensorMeta]]:
    """Merge the ranks' records; shards are renumbered, and slices sorted by position."""
    shards: list[ShardFile] = []
    tensors: dict[str, dict[str, Any]] = {}
    for one in said:
        before = len(shards)
        shards += [ShardFile.model_validate(shard) for shard in one["shards"]]
        for name, stored in one["tensors"].items():
            whole = tensors.setdefault(name, {**stored, "slices": []})
            whole["slices"] += [
                {**part, "shard": part["shard"] + before} for part in stored["slices"]
            ]
    for whole in tensors.values():
        whole["slices"].sort(key=lambda part: part["at"])
    return shards, {name: TensorMeta.model_validate(whole) for name, whole in tensors.items()}
