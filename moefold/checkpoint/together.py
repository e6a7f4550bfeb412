"""Saving by several ranks: each writes its own boxes, the first rank does the rest.

The order is that of one process: every rank's shards on the medium, then the manifest, then the
rename. A rank that cannot write keeps the checkpoint from being published, and all ranks raise.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint import folder as folders
from moefold.checkpoint.config import Policy
from moefold.checkpoint.disk import DISK, Disk, Say
from moefold.checkpoint.errors import CheckpointError, SaveError
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.manifest import Shard, Stored
from moefold.checkpoint.save import Contents, Work
from moefold.comm.agree import on_first
from moefold.comm.collectives import gather_objects
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
    device: torch.device,
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

    def begin() -> str:
        work.make_folder()
        work.clear()
        staged = folders.on_its_way(work.final, "tmp")
        disk.make_folder(staged)
        return str(staged)

    staged = Path(on_first(begin, ranks, device))
    said = gather_objects(_written(work, staged, ranks.index), ranks)

    def end() -> None:
        refused = [
            f"rank {rank}: {one['error']}" for rank, one in enumerate(said) if "error" in one
        ]
        if refused:
            folders.try_remove(staged, say, disk)
            raise SaveError(work.final, "; ".join(refused))
        try:
            work.write_manifest(staged, *_merged(said))
        except OSError as error:
            folders.try_remove(staged, say, disk)
            raise work.refused(error, 1) from error
        work.conclude(staged, policy, lock)

    on_first(end, ranks, device)
    return work.final


def _written(work: Work, staged: Path, rank: int) -> dict[str, Any]:
    """Write this rank's shards; return its lines of the manifest, or why it could not."""
    try:
        shards, tensors = work.write_shards(staged, f"rank-{rank:05d}")
    except OSError as error:
        return {"error": str(work.refused(error, 1))}
    except CheckpointError as error:
        return {"error": str(error)}
    return {
        "shards": [
            shard.model_copy(update={"rank": rank}).model_dump(mode="json") for shard in shards
        ],
        "tensors": {name: stored.model_dump(mode="json") for name, stored in tensors.items()},
    }


def _merged(said: list[dict[str, Any]]) -> tuple[list[Shard], dict[str, Stored]]:
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
