"""In-memory checkpoints, from which ranks resume when some of them were lost.

After a step each rank copies its part of the state into memory that the launcher holds, over the
older of two copies. Between two copies every rank takes part in a sum over all ranks, so that all
have finished the earlier one: the newest copy that all ranks have is never overwritten.
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

NUM_COPIES = 2
ALIGNMENT = 16
HEAD_BYTES = 1 << 20
"""Bytes before a copy's tensors: whether it is complete, and its head."""


class StateCopy:
    """One copy of a rank's state in the launcher's memory, complete or being written.

    Layout: a byte that is 1 if the copy is complete; at 8 the length of ``head`` as JSON; the JSON;
    from ``HEAD_BYTES`` on the bytes of the tensors.

    Attributes:
        head: turn, progress, format, size and time of the copy; empty if it is not complete.
        values: the bytes of the tensors.
    """

    def __init__(self, memory: mmap, start: int, size: int) -> None:
        """Open the copy in ``size`` bytes from ``start`` on, with what an earlier process wrote."""
        self._memory = memory
        self._start = start
        self.head: dict[str, Any] = {}
        self.values = torch.frombuffer(
            memory, dtype=torch.uint8, count=size - HEAD_BYTES, offset=start + HEAD_BYTES
        )
        if memory[start]:
            text = start + 16
            length = int.from_bytes(memory[start + 8 : text], "little")
            self.head = json.loads(memory[text : text + length])

    def invalidate(self) -> None:
        """Mark the copy as not complete."""
        self._memory[self._start] = 0
        self.head = {}

    def write(self, tensors: Sequence[Tensor], head: dict[str, Any]) -> None:
        """Write the copy; if the process is killed meanwhile, it is not complete."""
        self.invalidate()
        pack(tensors, self.values)
        text = json.dumps(head).encode()
        start = self._start
        assert 16 + len(text) <= HEAD_BYTES, f"{len(text)} bytes do not fit before a copy"
        text_start = start + 16
        self._memory[start + 8 : text_start] = len(text).to_bytes(8, "little")
        self._memory[text_start : text_start + len(text)] = text
        self._memory[start] = 1
        self.head = head


class MemoryCheckpoint:
    """The copies of this rank's state in the launcher's memory.

    Attributes:
        recovered: after a loss: which ranks were ``lost`` and ``why``; when it was ``noticed`` and
            when all had ``met`` again; the last step ``reached``, and the seconds from its copy to
            the notice, ``under_way_s``. Empty in the first attempt.
        format: the run's compute format, and the rates by which it was chosen; empty if no copy is
            complete.
    """

    def __init__(self, attempt: Attempt, record: Survive) -> None:
        """Open the copies that an earlier process of this rank has written, if any."""
        self._attempt = attempt
        self._every = record.every
        self._turn = 0
        size = attempt.memory.size // NUM_COPIES
        self._copies = _map_copies(attempt.memory, size) if size else []
        self.recovered: dict[str, Any] = {}
        formats = [copy.head["format"] for copy in self._copies if copy.head]
        self.format: dict[str, Any] = formats[0] if formats else {}

    def save(
        self, progress: dict[str, Any], state: Callable[[], Sequence[Tensor]], rewound: bool = False
    ) -> None:
        """Copy the state after a step if it is due; all ranks call it.

        ``progress`` is what a run needs besides tensors to resume, equal on all ranks: its ``step``
        and other small data. ``rewound``: the run was rewound, so that a copy is due.
        """
        if self._turn and not rewound and progress["step"] % self._every:
            return
        tensors = state()
        if not self._copies:
            pages = math.ceil(packed_size(tensors) / PAGESIZE)
            self._copies = _map_copies(self._attempt.memory, HEAD_BYTES + pages * PAGESIZE)
        self._turn += 1
        head = {
            "turn": [self._attempt.number, self._turn],
            "progress": progress,
            "format": self.format,
            "bytes": packed_size(tensors),
            "at": time.time(),
        }
        oldest = min(self._copies, key=lambda copy: copy.head["turn"] if copy.head else [])
        oldest.write(tensors, head)
        self._attempt.report_stored(progress["step"])

    def restore(self, tensors: Sequence[Tensor], world: World) -> dict[str, Any] | None:
        """Fill the state from the newest copy that all ranks have; all ranks call it.

        Returns:
            The copy's ``progress``; None if no copy is complete on all ranks.
        """
        by_rank = gather_objects([copy.head for copy in self._copies if copy.head], world.on_host)
        heads = {tuple(head["turn"]): head for rank_heads in by_rank for head in rank_heads}
        loss = self._attempt.loss
        if loss is not None:
            now = time.time()
            newest = heads[max(heads)] if heads else {}
            detected = loss.detected_at
            under_way_s = detected - newest.get("at", detected)
            self.recovered = {
                "lost": list(loss.ranks),
                "why": loss.reason,
                "noticed": detected,
                "met": now,
                "restart_s": now - detected,
                "under_way_s": max(under_way_s, 0.0),
            }
            if newest:
                self.recovered["reached"] = newest["progress"]["step"]
        turns_by_rank = [[tuple(head["turn"]) for head in heads] for heads in by_rank]
        turn = newest_common(turns_by_rank)
        progress = None
        for copy in self._copies:
            # Newer copies belong to a history that the run does not continue.
            if not copy.head or tuple(copy.head["turn"]) != turn:
                copy.invalidate()
            elif copy.head["bytes"] == packed_size(tensors):
                unpack(copy.values, tensors)
                progress = copy.head["progress"]
        assert turn is None or progress is not None, "all starts of a run have the same tensors"
        return progress


def _map_copies(memory: RankMemory, size: int) -> list[StateCopy]:
    """Return the copies in a rank's memory, ``size`` bytes each."""
    mapped = memory.map(NUM_COPIES * size)
    return [StateCopy(mapped, number * size, size) for number in range(NUM_COPIES)]


def newest_common(turns_by_rank: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, int] | None:
    """Return the newest turn (attempt, number in the attempt) that every rank has."""
    common = set(turns_by_rank[0]).intersection(*turns_by_rank[1:])
    return max(common, default=None)


def packed_size(tensors: Sequence[Tensor]) -> int:
    """Return the number of bytes of the packed tensors, alignment included."""
    return sum(_padded_sizes(tensors))


@torch.no_grad()
def pack(tensors: Sequence[Tensor], into: Tensor) -> None:
    """Copy the values of tensors on any device into bytes in host memory."""
    for part, tensor in zip(_tensor_views(tensors, into), tensors, strict=True):
        part.copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()


@torch.no_grad()
def unpack(packed_bytes: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy bytes from ``pack`` back into tensors."""
    for part, tensor in zip(_tensor_views(tensors, packed_bytes), tensors, strict=True):
        tensor.copy_(part)


def _tensor_views(tensors: Sequence[Tensor], packed_bytes: Tensor) -> list[Tensor]:
    """Return views of ``packed_bytes`` for each tensor's values, in its dtype and shape."""
    pieces = packed_bytes[: packed_size(tensors)].split(_padded_sizes(tensors))
    views = []
    for piece, tensor in zip(pieces, tensors, strict=True):
        values = piece[: tensor.nbytes].view(tensor.dtype)
        views.append(values.view(tensor.shape))
    return views


def _padded_sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in tensors]
