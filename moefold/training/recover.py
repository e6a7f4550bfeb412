"""In-memory checkpoints: the state that ranks go on from when some of them were lost.

After a step each rank copies its share of the state into memory that the launcher holds, over the
older one of two copies. Whoever makes one more copy has seen a sum over all ranks since the copy
before, so all ranks have finished that one: the newest copy that all have is never overwritten.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from mmap import PAGESIZE, mmap
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import gather_objects
from moefold.comm.config import Survive
from moefold.comm.worker import Attempt, RankMemory
from moefold.comm.world import World

KEPT = 2
ALIGNED = 16
HEAD = 16 * PAGESIZE
"""Bytes before a copy's tensors: whether it is whole, and what is known of it."""


class Copy:
    """One copy of a rank's state in the launcher's memory, whole or being written.

    Layout: a byte that is 1 where the copy is whole; at 8 the length of ``head`` as JSON; the JSON;
    from ``HEAD`` on the bytes of the tensors.

    Attributes:
        head: what is known of it; empty where it is not whole.
        values: the bytes of the tensors.
    """

    def __init__(self, memory: mmap, start: int, size: int) -> None:
        """Read what an earlier process wrote from ``start`` on, ``size`` bytes with the head."""
        self._memory, self._start = memory, start
        self.head: dict[str, Any] = {}
        self.values = torch.frombuffer(
            memory, dtype=torch.uint8, count=size - HEAD, offset=start + HEAD
        )
        if memory[start]:
            length = int.from_bytes(memory[start + 8 : start + 16], "little")
            self.head = json.loads(memory[start + 16 : start + 16 + length])

    def drop(self) -> None:
        """Say that it is not whole."""
        self._memory[self._start], self.head = 0, {}

    def write(self, tensors: Sequence[Tensor], head: dict[str, Any]) -> None:
        """Fill it; a process that is killed meanwhile leaves one that is not whole."""
        self.drop()
        pack(tensors, self.values)
        text, start = json.dumps(head).encode(), self._start
        assert 16 + len(text) <= HEAD, f"{len(text)} bytes do not fit before a copy"
        self._memory[start + 8 : start + 16] = len(text).to_bytes(8, "little")
        self._memory[start + 16 : start + 16 + len(text)] = text
        self._memory[start], self.head = 1, head


class MemoryCheckpoint:
    """The copies of this rank's state in the launcher's memory.

    Attributes:
        recovered: after a loss: which ranks were ``lost`` and ``why``, when that was ``noticed``
            and all had ``met`` again, the last step ``reached``, and how long the one that was
            lost had been ``under_way_s``. Empty in the first attempt.
        format: the number format that the copies are computed in, and the rates it was chosen by;
            empty where no copy is whole.
    """

    def __init__(self, attempt: Attempt, record: Survive) -> None:
        """Read what is whole of what an earlier process of this rank has written."""
        self._attempt, self._every, self._turn = attempt, record.every, 0
        there = attempt.memory.size
        self._copies = _copies(attempt.memory, there // KEPT) if there else []
        self.recovered: dict[str, Any] = {}
        formats = [copy.head["format"] for copy in self._copies if copy.head]
        self.format: dict[str, Any] = formats[0] if formats else {}

    def keep(
        self, progress: dict[str, Any], state: Callable[[], Sequence[Tensor]], anew: bool = False
    ) -> None:
        """Copy the state after a step, where it is due; every rank calls it.

        ``progress`` is what a run needs besides tensors to go on, alike on all ranks: its ``step``,
        and other small data. ``anew``: it went back, so that a copy is due.
        """
        if self._turn and not anew and progress["step"] % self._every:
            return
        tensors = state()
        if not self._copies:
            size = HEAD + math.ceil(packed(tensors) / PAGESIZE) * PAGESIZE
            self._copies = _copies(self._attempt.memory, size)
        self._turn += 1
        head = {
            "turn": [self._attempt.number, self._turn],
            "progress": progress,
            "format": self.format,
            "bytes": packed(tensors),
            "at": time.time(),
        }
        oldest = min(self._copies, key=lambda copy: copy.head["turn"] if copy.head else [])
        oldest.write(tensors, head)
        self._attempt.in_step(progress["step"])

    def take(self, tensors: Sequence[Tensor], world: World) -> dict[str, Any] | None:
        """Fill the state from the newest copy that all ranks have; every rank calls it.

        Returns:
            Its ``progress``; None where no copy is whole on all ranks, and all are dropped.
        """
        said = gather_objects([copy.head for copy in self._copies if copy.head], world.on_host)
        heads = {tuple(head["turn"]): head for each in said for head in each}
        loss = self._attempt.loss
        if loss is not None:
            now, newest = time.time(), heads[max(heads)] if heads else {}
            self.recovered = {
                "lost": list(loss.ranks),
                "why": loss.why,
                "noticed": loss.noticed,
                "met": now,
                "restart_s": now - loss.noticed,
                "under_way_s": max(loss.noticed - newest.get("at", loss.noticed), 0.0),
            }
            if newest:
                self.recovered["reached"] = newest["progress"]["step"]
        turn = last_whole([[tuple(head["turn"]) for head in each] for each in said])
        taken = None
        for copy in self._copies:
            # What is newer belongs to a past that the run does not go on from.
            if not copy.head or tuple(copy.head["turn"]) != turn:
                copy.drop()
            elif copy.head["bytes"] == packed(tensors):
                unpack(copy.values, tensors)
                taken = copy.head["progress"]
        assert turn is None or taken is not None, "all starts of a run have the same tensors"
        return taken


def _copies(memory: RankMemory, size: int) -> list[Copy]:
    """Return the copies that lie in a rank's memory, ``size`` bytes each."""
    mapped = memory.map(KEPT * size)
    return [Copy(mapped, number * size, size) for number in range(KEPT)]


def last_whole(said: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, int] | None:
    """Return the newest turn that every rank has: its attempt, and its number in that."""
    common = set(said[0]).intersection(*said[1:])
    return max(common, default=None)


def packed(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of some tensors' values, one behind the other."""
    return sum(_rooms(tensors))


@torch.no_grad()
def pack(tensors: Sequence[Tensor], into: Tensor) -> None:
    """Copy the values of tensors on any device into bytes in host memory."""
    for part, tensor in zip(_parts(tensors, into), tensors, strict=True):
        part.copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()


@torch.no_grad()
def unpack(packed_bytes: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy back what ``pack`` copied."""
    for part, tensor in zip(_parts(tensors, packed_bytes), tensors, strict=True):
        tensor.copy_(part)


def _parts(tensors: Sequence[Tensor], whole: Tensor) -> list[Tensor]:
    """Return the place of each tensor's values in ``whole``, in its type and shape."""
    rooms = whole[: packed(tensors)].split(_rooms(tensors))
    return [
        room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for room, tensor in zip(rooms, tensors, strict=True)
    ]


def _rooms(tensors: Sequence[Tensor]) -> list[int]:
    return [math.ceil(tensor.nbytes / ALIGNED) * ALIGNED for tensor in tensors]
