"""Saving of a run's checkpoints, synchronous or asynchronous (from copies, during later steps).

In an asynchronous save a thread of each rank writes the copies. It communicates with no other rank:
at the beginning of each step the ranks check whether all threads are done, and start the next part.
"""

import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.errors import SaveError
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.save import CheckpointWriter, save
from moefold.checkpoint.tensors import TensorSlice
from moefold.comm.agree import run_on_first
from moefold.comm.collectives import gather_objects, sum_
from moefold.comm.group import Group
from moefold.comm.world import World

REACH_S = 10.0
"""Time within which a new file is seen through a network file system."""
PROBE = ".reached-"
"""Prefix of files that show whether all ranks reach a folder."""
NICE = 10
"""Nice value of the writing thread: weight 110 of 1024 (Linux, ``sched_prio_to_weight``)."""
SlicesByName = Mapping[str, Sequence[TensorSlice]]
_log = logging.getLogger("moefold.training")


class Saver:
    """Writes checkpoints by a policy; at most one ``asynchronous`` save is in progress.

    All ranks must call every method except ``abandon``. Rank 0 holds the folder's lock.
    """

    def __init__(
        self, folder: Path, policy: CheckpointPolicy, lock: FolderLock, world: World
    ) -> None:
        self._folder = folder
        self._policy = policy
        self._lock = lock
        self._world = world
        self._ranks = world.on_host
        require_shared(folder, self._ranks)
        # The save in progress, this rank's thread for it, and whether that is in the last part.
        self._saving: CheckpointWriter | None = None
        self._thread: threading.Thread | None = None
        self._publishing = False
        self._copies: dict[tuple[str, int], Tensor] = {}

    def allocate_copies(self, tensors: Callable[[], SlicesByName]) -> None:
        """Allocate the memory for copies of the state, so that no step waits for it."""
        if self._policy.asynchronous:
            self._copy_to_host(tensors())

    def save(self, step: int, tensors: SlicesByName, meta: dict[str, Any]) -> Path:
        """Write a checkpoint, or start an asynchronous save; return the checkpoint's path.

        An asynchronous save is complete only after a later call of ``poll`` or ``wait``.

        Raises:
            SaveError: on all ranks, if writing this checkpoint or the one before failed.
        """
        self.wait()
        options: dict[str, Any] = {"lock": self._lock, "ranks": self._ranks}
        if not self._policy.asynchronous:
            return save(self._folder, step, tensors, meta, self._policy, **options)
        copied = self._copy_to_host(tensors)
        saving = CheckpointWriter(self._folder, step, copied, meta, self._policy, **options)
        saving.begin()
        self._saving = saving
        self._thread = start_background(saving.write)
        return saving.path

    def poll(self, wait: bool = False) -> None:
        """Advance the save in progress if all ranks are ready; called at the start of a step.

        With ``wait``, finish it.

        Raises:
            SaveError: on all ranks, if it failed and the policy is to stop.
        """
        if self._saving is None:
            return
        idle = self._thread is not None and not self._thread.is_alive()
        if not wait and int(sum_(torch.tensor([int(idle)]), self._ranks)) < self._ranks.size:
            return
        try:
            self.wait() if wait else self._advance()
        except SaveError as error:
            if self._policy.on_failure == "stop":
                raise
            if self._ranks.index == 0:
                _log.warning("checkpoint failed: %s; training continues", error)

    def wait(self) -> None:
        """Finish the save in progress, if any; raises ``SaveError`` on all ranks if it failed."""
        while self._thread is not None and self._saving is not None:
            self._thread.join()
            self._advance()

    def abandon(self) -> None:
        """Wait for this rank's thread and abandon the save; for a run that failed."""
        if self._thread is not None:
            self._thread.join()
        self._saving = None
        self._publishing = False

    def _advance(self) -> None:
        """Start the next part of a save, once the current one is done on all ranks."""
        saving = self._saving
        assert saving is not None
        if self._publishing:
            self._saving = None
            self._publishing = False
            saving.conclude()
        else:
            saving.collect()
            self._publishing = True
            self._thread = start_background(saving.publish)

    def _copy_to_host(self, tensors: SlicesByName) -> dict[str, list[TensorSlice]]:
        """Copy the state to the host, into the buffers of the previous copies."""
        copied: dict[str, list[TensorSlice]] = {name: [] for name in tensors}
        for name, parts in tensors.items():
            for number, part in enumerate(parts):
                tensor = part.tensor
                buffer = self._copies.get((name, number))
                if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                    pinned = tensor.device.type == "cuda"
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                    self._copies[name, number] = buffer
                buffer.copy_(tensor, non_blocking=True)
                copied[name].append(replace(part, tensor=buffer))
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        return copied


def require_shared(folder: Path, ranks: Group) -> None:
    """Check that all ranks reach the first rank's folder, if it exists; all ranks call it.

    Raises:
        ValueError: on all ranks, if some do not see a file that the first rank writes there.
    """
    if ranks.size == 1:
        return

    def write() -> str:
        if not folder.is_dir():
            return ""
        for left in folder.glob(f"{PROBE}*"):  # by a first rank that was killed
            left.unlink(missing_ok=True)
        probe = folder / f"{PROBE}{uuid.uuid4().hex}"
        probe.write_bytes(b"")
        return probe.name

    name = run_on_first(write, ranks)
    if not name:
        return
    deadline = time.monotonic() + REACH_S
    while not (seen := (folder / name).is_file()) and time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(folder)  # network file systems then look again
        time.sleep(0.1)
    reached = gather_objects([seen, f"{socket.gethostname()}:{folder.absolute()}"], ranks)
    if ranks.index == 0:
        (folder / name).unlink(missing_ok=True)
    missing = [str(rank) for rank, (seen, _) in enumerate(reached) if not seen]
    if missing:
        places = ", ".join(dict.fromkeys(place for _, place in reached))
        raise ValueError(
            f"rank {', '.join(missing[:8])}{' …' * (len(missing) > 8)} of {ranks.size} cannot "
            f"reach the run's folder of rank 0 ({places}): --folder must be one folder that all "
            "machines share, or no checkpoint could be published"
        )


def start_background(function: Callable[..., None], *args: Any) -> threading.Thread:
    """Run a function in a low-priority thread, which leaves the cores to training.

    If all cores are busy, it gets about a tenth of one.
    """

    def run_with_low_priority() -> None:
        if sys.platform == "linux":  # Elsewhere threads have no separate priority.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        function(*args)

    thread = threading.Thread(target=run_with_low_priority, name="moefold checkpoint", daemon=True)
    thread.start()
    return thread
