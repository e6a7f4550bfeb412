"""Saving by several ranks: each writes its own boxes, the first rank does the rest.

The order is that of one process: every rank's shards on the medium, then the manifest, then the
rename. A rank that cannot write keeps the checkpoint from being published, and all ranks raise.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moefold.checkpoint import folder as folders
from moefold.checkpoint.config import Policy
from moefold.checkpoint.disk import DISK, Disk, Say, retried
from moefold.checkpoint.errors import CheckpointError, SaveError
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.manifest import Shard, Stored
from moefold.checkpoint.save import Contents, Work
from moefold.comm.agree import FirstFailed, on_first, tell_first
from moefold.comm.group import Group

_log = logging.getLogger("moefold.checkpoint")


def save_together(
    folder: str | Path,
    step: int,
    tensors: Contents,
    meta: dict[str, Any],
    policy: Policy,
    *,
    lock: FolderLock,
    ranks: Group,
    say: Say = _log.warning,
    disk: Disk = DISK,
) -> Path:
    """Write ``folder/step-…`` from all ranks' boxes; return its path on each once it is published.

    Every rank calls it with the boxes that it alone writes; all boxes of a tensor tile it.
    ``lock`` is the folder's, held by the first rank. Otherwise as ``checkpoint.save.save``.

    Raises:
        SaveError: on all ranks, where the storage refused one of them.
    """
    work = Work.of(folder, step, tensors, meta, policy, say, disk)
    saving = Together(work, policy, lock, ranks)
    saving.begin()
    saving.write()
    saving.collect()
    saving.publish()
    return saving.conclude()


class Together:
    """One save by all ranks, in its parts, to be called in the order in which they stand.

    ``begin``, ``collect`` and ``conclude`` are called by all ranks together. ``write`` and
    ``publish`` speak to no other rank and raise nothing: a thread of their own may run them.
    """

    def __init__(self, work: Work, policy: Policy, lock: FolderLock, ranks: Group) -> None:
        self._work, self._policy, self._lock = work, policy, lock
        self._ranks = ranks
        self._staged = Path()
        self._said: dict[str, Any] = {}
        self._told: list[dict[str, Any]] = []
        self._error: Exception | None = None

    def begin(self) -> None:
        """Make the folder that all write into."""
        work = self._work

        def begin() -> str:
            work.make_folder()
            work.clear()
            staged = folders.on_its_way(work.final, "tmp")
            work.disk.make_folder(staged)
            return str(staged)

        self._staged = Path(self._on_first(begin))

    def write(self) -> None:
        """Write this rank's shards."""
        work, rank, attempts = self._work, self._ranks.index, self._policy.attempts
        what = f"{work.final.name}, rank {rank}"
        try:
            shards, tensors = retried(self._attempt, what, attempts, work.say, work.disk)
        except OSError as error:
            self._said = {"error": str(work.refused(error, attempts))}
        except Exception as error:
            named = isinstance(error, CheckpointError)
            self._said = {"error": str(error) if named else f"{type(error).__name__}: {error}"}
        else:
            owned = [shard.model_copy(update={"rank": rank}) for shard in shards]
            self._said = {
                "shards": [shard.model_dump(mode="json") for shard in owned],
                "tensors": {n: stored.model_dump(mode="json") for n, stored in tensors.items()},
            }

    def _attempt(self) -> tuple[list[Shard], dict[str, Stored]]:
        """Write this rank's shards once."""
        stem = f"rank-{self._ranks.index:05d}"
        for left in self._staged.glob(f"{stem}-*"):
            self._work.disk.remove_file(left)
        return self._work.write_shards(self._staged, stem)

    def collect(self) -> None:
        """Bring what all ranks wrote to the first one; the others hold nobody's."""
        self._told = list(tell_first(self._said, self._ranks))
        self._said = {}

    def publish(self) -> None:
        """On the first rank: write the manifest and give the checkpoint its name."""
        if self._ranks.index:
            return
        work, staged = self._work, self._staged
        try:
            refused = [
                f"rank {rank}: {one['error']}"
                for rank, one in enumerate(self._told)
                if "error" in one
            ]
            if refused:
                raise SaveError(work.final, "; ".join(refused))
            try:
                work.write_manifest(staged, *_merged(self._told))
            except OSError as error:
                raise work.refused(error, 1) from error
            work.conclude(staged, self._policy, self._lock)
        except Exception as error:
            self._error = error
            if staged.exists():
                folders.try_remove(staged, work.say, work.disk)

    def conclude(self) -> Path:
        """Return the checkpoint's path on all ranks, or raise on all what went wrong."""

        def told() -> None:
            if self._error is not None:
                raise self._error

        self._on_first(told)
        return self._work.final

    def _on_first(self, function: Any) -> Any:
        try:
            return on_first(function, self._ranks)
        except FirstFailed as error:
            raise SaveError(self._work.final, str(error)) from error


def _merged(said: Iterable[dict[str, Any]]) -> tuple[list[Shard], dict[str, Stored]]:
    """Join what the ranks wrote; shards are numbered anew, slices stand in the order of places."""
    shards: list[Shard] = []
    tensors: dict[str, dict[str, Any]] = {}
    for one in said:
        before = len(shards)
        shards += [Shard.model_validate_json(_json(shard)) for shard in one["shards"]]
        for name, stored in one["tensors"].items():
            whole = tensors.setdefault(name, {**stored, "slices": []})
            whole["slices"] += [
                {**part, "shard": part["shard"] + before} for part in stored["slices"]
            ]
    for whole in tensors.values():
        whole["slices"].sort(key=lambda part: part["at"])
    return shards, {name: Stored.model_validate_json(_json(t)) for name, t in tensors.items()}


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
