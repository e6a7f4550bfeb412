"""A run's state in memory: where ranks go on from when some of them died.

At the end of each step a rank copies what it holds of the state, and gives the copy to the rank
half the world away, which is another machine where there are several. Two steps are kept: whoever
makes one more copy has seen a sum over all ranks in that step, so all have finished those before.
After a loss all ranks say what they have, and go back to the last step that is whole.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import gather_objects, receive, send
from moefold.comm.group import Group
from moefold.comm.plain import shift
from moefold.comm.respawn_rank import Line
from moefold.comm.world import World
from moefold.data.prepare import Prepared
from moefold.layers.config import Precision
from moefold.training.state import Progress

KEPT = 2
ALIGNED = 16


@dataclass
class Past:
    """What a run needs besides tensors to go on: alike on all ranks."""

    progress: Progress = field(default_factory=Progress)
    strikes: int = 0
    """Steps in a row that were not finite; see ``NonFinitePolicy``."""
    struck_at: int = 0

    def plain(self) -> dict[str, Any]:
        """Return it as small data."""
        done = self.progress
        return {
            "progress": [done.step, done.tokens, list(done.excluded)],
            "strikes": self.strikes,
            "struck_at": self.struck_at,
            "at": time.time(),
        }

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Past":
        """Read what ``plain`` gave."""
        step, tokens, excluded = said["progress"]
        return cls(Progress(step, tokens, tuple(excluded)), said["strikes"], said["struck_at"])


class Keeper:
    """The copies that this process holds, through all attempts of a run.

    Attributes:
        recovered: after a loss: which ranks were ``lost`` and ``why``, when that was ``noticed``
            and all had ``met`` again, the last step ``reached``, and how long the one that was
            lost had been ``under_way_s``. Empty in the first attempt.
        prepared: the run's data, once it has been opened here.
        precision: the format that the copies are computed in.
    """

    def __init__(self, line: Line) -> None:
        """Begin with nothing kept."""
        self._line = line
        self._own: dict[int, tuple[dict[str, Any], Tensor]] = {}
        self._held: dict[int, Tensor] = {}
        self._theirs: int | None = None
        self._ready = -1
        self.recovered: dict[str, Any] = {}
        self.prepared: Prepared | None = None
        self.precision: Precision | None = None

    @property
    def attempt(self) -> int:
        """How often the ranks have met before."""
        return self._line.meeting.spot.attempt

    def keep(self, past: Past, tensors: Sequence[Tensor], world: World) -> None:
        """Copy the state after a step, and exchange copies; every rank calls it."""
        step = past.progress.step
        copy = _room(self._own, step, packed(tensors), lambda kept: kept[1])
        pack(tensors, copy)
        self._own[step] = past.plain(), copy
        self._share(step, world)
        if self._ready != self.attempt:
            self._ready = self.attempt
            self._line.ready(step)

    def _share(self, step: int, world: World) -> None:
        """Give this rank's copy of a step to the one that keeps it, and take another's."""
        ranks = world.on_host
        own = self._own[step][1]
        if self._theirs is None:
            sizes = gather_objects(own.numel(), ranks)
            self._theirs = sizes[(ranks.index - half(ranks)) % ranks.size]
        assert self._theirs is not None
        theirs = _room(self._held, step, self._theirs, lambda kept: kept)
        with world.recorder.module("copies"):
            shift(own, theirs, half(ranks), ranks).wait()
        self._held[step] = theirs

    def take(self, tensors: Sequence[Tensor], world: World) -> Past | None:
        """Fill the state from the last step that all ranks have; every rank calls it.

        Returns:
            How far that was; None where no step is whole, and everything kept is dropped.
        """
        ranks, self._theirs = world.on_host, None
        self.recovered = self._what_happened()
        mine = {
            "own": {str(step): past for step, (past, _) in self._own.items()},
            "held": {str(step): copy.numel() for step, copy in self._held.items()},
            "needs": packed(tensors),
        }
        said = gather_objects(mine, ranks)
        pasts = {int(step): past for each in said for step, past in each["own"].items()}
        if self.recovered and pasts:
            reached = max(pasts)
            since = self.recovered["noticed"] - pasts[reached]["at"]
            self.recovered |= {"reached": reached, "under_way_s": max(since, 0.0)}
        step = last_whole(said, half(ranks))
        if step is None:
            self._own, self._held = {}, {}
            return None
        copy = self._fetched(step, said, ranks)
        unpack(copy, tensors)
        self._own = {k: v for k, v in self._own.items() if k < step} | {step: (pasts[step], copy)}
        self._held = {k: v for k, v in self._held.items() if k <= step}
        return Past.of(pasts[step])

    def _fetched(self, step: int, said: Sequence[Mapping[str, Any]], ranks: Group) -> Tensor:
        """Return this rank's copy of a step, from the rank that keeps it where it has none."""
        lacking = [at for at, each in enumerate(said) if str(step) not in each["own"]]
        sent = [
            send(self._held[step], ranks.ranks[at], ranks)
            for at in lacking
            if (at + half(ranks)) % ranks.size == ranks.index
        ]
        if ranks.index in lacking:
            copy = torch.empty(said[ranks.index]["needs"], dtype=torch.uint8)
            keeper = ranks.ranks[(ranks.index + half(ranks)) % ranks.size]
            receive(copy, keeper, ranks).wait()
        else:
            copy = self._own[step][1]
        for pending in sent:
            pending.wait()
        return copy

    def _what_happened(self) -> dict[str, Any]:
        loss = self._line.meeting.loss
        if loss is None:
            return {}
        now = time.time()
        return {
            "lost": list(loss.ranks),
            "why": loss.why,
            "noticed": loss.noticed,
            "met": now,
            "restart_s": now - loss.noticed,
        }


def half(ranks: Group) -> int:
    """Return how many places on the rank stands that keeps this one's copy."""
    return ranks.size // 2


def last_whole(said: Sequence[Mapping[str, Any]], by: int) -> int | None:
    """Return the last step of which every rank has its copy, or the rank ``by`` places on has it.

    Args:
        said: of each rank, the steps that it has (``own``), the bytes of the copies it keeps by
            step (``held``), and how many bytes its own copy has (``needs``).
        by: how far away copies are kept.
    """
    steps = {step for each in said for step in each["own"]}
    for step in sorted(map(int, steps), reverse=True):
        name = str(step)
        held = [said[(at + by) % len(said)]["held"].get(name) for at in range(len(said))]
        if all(name in each["own"] or held[at] == each["needs"] for at, each in enumerate(said)):
            return step
    return None


def packed(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of some tensors' values, one behind the other."""
    return sum(_room_of(tensor) for tensor in tensors)


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
    parts, at = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        parts.append(whole[at : at + size].view(tensor.dtype).view(tensor.shape))
        at += _room_of(tensor)
    return parts


def _room_of(tensor: Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.element_size() / ALIGNED) * ALIGNED


def _room(kept: dict[int, Any], step: int, size: int, bytes_of: Callable[[Any], Tensor]) -> Tensor:
    """Drop what ``step`` replaces, and return bytes for it: those of what goes, if they fit."""
    staying = sorted(old for old in kept if old < step)
    staying = staying[max(0, len(staying) - KEPT + 1) :]
    free = [bytes_of(kept.pop(old)) for old in list(kept) if old not in staying]
    fitting = [room for room in free if room.numel() == size]
    return fitting[0] if fitting else torch.empty(size, dtype=torch.uint8)
