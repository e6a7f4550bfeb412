"""Writes a checkpoint such that a complete one exists at every moment.

Each rank writes its own boxes of tensors, the first rank does the rest. Each phase is on the medium
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
from moefold.checkpoint.disk import DISK, OUT_OF_SPACE, Disk, Result, Warn, retry, write_file
from moefold.checkpoint.errors import CheckpointError, SaveError
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.manifest import CHUNK_BYTES, Manifest, ShardFile, TensorMeta
from moefold.checkpoint.tensors import (
    DTYPE_NAMES,
    LazyTensor,
    NamedSlice,
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
"""Values to save by name: a full tensor, or this rank's boxes of one."""


def save(
    folder: str | Path,
    step: int,
    tensors: Contents,
    meta: dict[str, Any],
    policy: CheckpointPolicy = POLICY,
    *,
    lock: FolderLock | None = None,
    ranks: Group = SELF_GROUP,
    warn: Warn = _log.warning,
    disk: Disk = DISK,
) -> Path:
    """Write ``folder/step-…`` and return its path once it is on the medium and published.

    A collective call: each rank passes the boxes that it alone writes; together they tile each
    tensor. Tensors may be on any device and have any strides; at most 64 MiB of additional host
    memory is used. A ``LazyTensor`` is read only while it is written. ``meta`` is plain JSON. A
    checkpoint of the same step is replaced. ``lock`` is the folder's, held by the first rank; a
    single rank may omit it, and holds one during the call. ``warn`` receives messages about failed
    attempts and clean-up.

    Raises ``CheckpointError`` for values that cannot be stored, before anything is written;
    ``LockError`` if another run holds the folder; ``SaveError``, with the bytes needed and free, if
    storage fails on any rank: the partial checkpoint is then removed, and earlier ones remain.
    """
    folder_lock = lock or FolderLock(folder, f"a save of step {step}", warn=warn)
    writer = CheckpointWriter(
        folder, step, tensors, meta, policy, lock=folder_lock, ranks=ranks, warn=warn, disk=disk
    )
    if lock is None:
        assert ranks.size == 1, "several ranks acquire their lock before they save"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(Path(folder), f"the folder cannot be created: {error}") from error
    with folder_lock if lock is None else nullcontext():
        try:
            writer.begin()
            writer.write()
            writer.collect()
            writer.publish()
            return writer.conclude()
        finally:
            writer.clean_up()


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
        warn: Warn = _log.warning,
        disk: Disk = DISK,
    ) -> None:
        self._folder = Path(folder)
        self._step = step
        self._meta = meta
        self._policy = policy
        self._lock = lock
        self._ranks = ranks
        self._warn = warn
        self._disk = disk
        slices: list[NamedSlice] = []
        for name, content in tensors.items():
            if isinstance(content, Tensor | LazyTensor):
                content = (TensorSlice.of_full_tensor(content),)
            slices += [(name, part) for part in content]
        _check_contents(step, slices, meta)
        self._shards = pack(slices, policy.shard_bytes)
        self.path = self._folder / folders.step_name(step)
        """The checkpoint's folder once it is published."""
        self._staged: Path | None = None
        self._records: list[dict[str, Any]] = []
        """Records of what this rank wrote; later, on the first rank, those of all ranks."""
        self._error: Exception | None = None

    def begin(self) -> None:
        """Remove leftovers of interrupted saves, and create the folder for all ranks' shards."""

        def create_staged() -> str:
            self._lock.check()  # another run's unfinished checkpoint would look like a leftover
            remove = partial(folders.remove_leftovers, self._folder, self._warn, self._disk)
            self._try_cleanup("removing interrupted saves", remove)
            staged = folders.transition_path(self.path, "tmp")
            self._retry(lambda: self._disk.make_folder(staged))
            return str(staged)

        self._staged = Path(self._run_on_first(create_staged))

    def write(self) -> None:
        """Write this rank's shards."""
        try:
            shards, tensors = self._retry(self._write_shards)
        except Exception as error:
            self._error = error
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            self._records = [{"error": f"{kind}{error}"}]
        else:
            files = [shard.model_dump(mode="json") for shard in shards]
            metas = {name: stored.model_dump(mode="json") for name, stored in tensors.items()}
            self._records = [{"shards": files, "tensors": metas}]

    def collect(self) -> None:
        """Gather the records of all ranks' shards on the first rank."""
        self._records = list(gather_to_first(self._records[0], self._ranks))

    def publish(self) -> None:
        """On the first rank, write the manifest and rename the checkpoint to its final name."""
        if self._ranks.index:
            return
        try:
            records = enumerate(self._records)
            failures = [
                f"rank {n}: {record['error']}" for n, record in records if "error" in record
            ]
            if failures:  # A single rank raises its own error.
                single = self._ranks.size == 1 and self._error
                raise single or SaveError(self.path, "; ".join(failures))
            content = self._build_manifest()
            self._retry(lambda: self._write_manifest(content))
            self._lock.check()
            self._rename_staged()
        except Exception as error:
            self._error = error
            self.clean_up()
            return
        point = partial(folders.write_pointer, self._folder, self.path, self._disk)
        self._try_cleanup("writing the file latest", point)
        keep = self._folder, self._policy, self.path, self._warn, self._disk
        self._try_cleanup("removing old checkpoints", partial(folders.apply_retention, *keep))

    def conclude(self) -> Path:
        """Return the checkpoint's path, or raise the error of the save, on all ranks."""

        def raise_error() -> None:
            if self._error is not None:
                raise self._error

        self._run_on_first(raise_error)
        return self.path

    def clean_up(self) -> None:
        """On the first rank, remove a checkpoint that was not published."""
        if self._ranks.index == 0 and self._staged is not None and self._staged.exists():
            folders.try_remove(self._staged, self._warn, self._disk)

    def _run_on_first(self, function: Callable[[], Any]) -> Any:
        try:
            return run_on_first(function, self._ranks)
        except FirstRankFailed as error:
            raise SaveError(self.path, str(error)) from error

    def _retry(self, function: Callable[[], Result]) -> Result:
        """Call a function, and retry on transient storage errors.

        Raises:
            SaveError: if storage still fails.
        """
        rank = f", rank {self._ranks.index}" if self._ranks.size > 1 else ""
        try:
            return retry(
                function, self.path.name + rank, self._policy.attempts, self._warn, self._disk
            )
        except OSError as error:
            raise self._save_error(error) from error

    def _try_cleanup(self, what: str, function: Callable[[], None]) -> None:
        """Run an optional clean-up; a failure is reported and left to the next save."""
        try:
            function()
        except OSError as error:
            self._warn(f"{self._folder}: {what} failed: {error}")

    def _write_shards(self) -> tuple[list[ShardFile], dict[str, TensorMeta]]:
        """Write this rank's shards once; return their records for the manifest."""
        assert self._staged is not None, "begin comes first"
        index = self._ranks.index
        stem = "shard" if self._ranks.size == 1 else f"rank-{index:05d}"
        for leftover in self._staged.glob(f"{stem}-*"):  # of an earlier attempt
            self._disk.remove_file(leftover)
        if self._disk.free_bytes(self._folder) < self._needed_bytes:
            raise OSError(min(OUT_OF_SPACE), "not enough free space", str(self._staged))
        shards: list[ShardFile] = []
        tensors: dict[str, TensorMeta] = {}
        for number, slices in enumerate(self._shards):
            path = self._staged / f"{stem}-{number:05d}.safetensors"
            shard, written = write_shard(self._disk, path, slices, CHUNK_BYTES, number)
            shards.append(shard.model_copy(update={"rank": index}))
            for (name, part), stored in zip(slices, written, strict=True):
                meta = tensors.get(name) or _tensor_meta(part)
                tensors[name] = meta.model_copy(update={"slices": (*meta.slices, stored)})
        return shards, tensors

    def _build_manifest(self) -> bytes:
        """Return the manifest file's content.

        Raises:
            CheckpointError: if boxes do not tile their tensors, as when no rank or several wrote
                one; or if the manifest is too large.
        """
        own = {"writer": manifest.WRITER, "step": self._step, "meta": self._meta}
        record = Manifest.model_validate(own | _merge_records(self._records))
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
        write_file(self._disk, path, content)
        self._disk.sync_folder(self._staged)

    def _rename_staged(self) -> None:
        """Rename the staged checkpoint to its final name; first move one of the same step away."""
        assert self._staged is not None, "begin comes first"
        replaced = None
        try:
            if self.path.exists():
                replaced = folders.transition_path(self.path, "old")
                self._disk.rename(self.path, replaced)
            try:
                self._disk.rename(self._staged, self.path)
            except OSError:
                if replaced is not None:
                    self._disk.rename(replaced, self.path)
                raise
            sync = partial(self._disk.sync_folder, self._folder)
            retry(sync, self.path.name, 3, self._warn, self._disk)
        except OSError as error:
            raise SaveError(self.path, f"written, but could not be published: {error}") from error
        if replaced is not None:
            folders.remove_checkpoint(replaced, self._warn, self._disk)

    @property
    def _needed_bytes(self) -> int:
        """Bytes that this rank writes, with an estimate for headers and the manifest."""
        sizes = [part.num_bytes for slices in self._shards for _, part in slices]
        digests = sum(64 * (1 + size // CHUNK_BYTES) for size in sizes)
        return sum(sizes) + digests + 512 * (len(sizes) + 8)

    def _save_error(self, error: OSError) -> SaveError:
        """Return the error for a save that failed in storage."""
        state = "its files are removed, and earlier checkpoints are unchanged"
        if error.errno not in OUT_OF_SPACE:
            return SaveError(self.path, f"could not be written: {error}; {state}")
        needed = self._needed_bytes
        try:
            free = self._disk.free_bytes(self._folder)
        except OSError:
            return SaveError(self.path, f"could not be written: {error}; {state}", needed)
        limit = " (a quota or another limit applies)" if free >= needed else ""
        what = (
            f"needs {needed} bytes and {free} are free{limit}, "
            f"after {self._policy.attempts} attempts; {state}. "
            "Free some space, or lower watch.checkpoint.keep"
        )
        return SaveError(self.path, what, needed, free)


def _tensor_meta(part: TensorSlice) -> TensorMeta:
    """Return a tensor's manifest record without slices."""
    return TensorMeta(dtype=DTYPE_NAMES[part.tensor.dtype], shape=part.full_shape, slices=())


def _check_contents(step: int, slices: Sequence[NamedSlice], meta: dict[str, Any]) -> None:
    """Raise for boxes that cannot be written, and metadata that the manifest cannot represent."""
    for name, part in slices:
        check_storable(name, part.tensor)
    manifest.check_meta(meta)
    drafts = {name: _tensor_meta(part) for name, part in slices}
    try:
        Manifest(writer="", step=step, shards=(), tensors=drafts, meta=meta)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{at} cannot be stored: {first['msg']}") from None


def _merge_records(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest's shards, renumbered, and tensors, with slices sorted by position."""
    shards: list[dict[str, Any]] = []
    tensors: dict[str, dict[str, Any]] = {}
    for record in records:
        offset = len(shards)
        shards += record["shards"]
        for name, meta in record["tensors"].items():
            slices = tensors.setdefault(name, {**meta, "slices": []})["slices"]
            slices += [{**part, "shard": part["shard"] + offset} for part in meta["slices"]]
    for meta in tensors.values():
        meta["slices"].sort(key=lambda part: part["at"])
    return {"shards": shards, "tensors": tensors}
