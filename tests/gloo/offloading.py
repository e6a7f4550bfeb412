"""Runs whose masters and moments lie elsewhere: saved in one layout, resumed in another."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.save import save
from moefold.comm.collectives import gather_objects
from moefold.optim.base import Optimizer
from moefold.parallel.config import StatePlacement
from moefold.parallel.data.sharding import ShardedState
from moefold.training.state import assigned_state, iter_state, restore
from moefold.training.step import gradients
from tests.cpu.checkpoint_tools import quick_folder
from tests.gloo.harness import run_ranks
from tests.gloo.resharding import SMALL_SHARDS
from tests.gloo.shares import CHUNK, OPTIMIZERS, Case, opened, own, update

STEPS = 3
RANKS = 4
DISK = "./disk"
AWAY: dict[str, Any] = {
    "offload": {
        "host": {"modules": ["norms", "attention"]},
        "disk": {"modules": ["experts"], "folder": "/tmp"},
    }
}
ELSEWHERE: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("gqa", "tp2 etp2", 2, AWAY),
    ("gqa", "cp2 ep2", 2, AWAY | {"zero": 1, "state": {"at": "host", "step": "host"}}),
    ("mla", "ep2", 2, AWAY | {"zero": 3, "state": {"at": "disk", "folder": "/tmp"}}),
    ("deep", "pp2 vpp2 ep2", 4, AWAY | {"zero": 2, "state": {"at": "host"}}),
)
"""Model, axes, ranks and layout of which rows kept for backward and state lie elsewhere."""


def placement(at: str, step: str = "device", share: float = 1.0) -> StatePlacement:
    """Return a record of where state lies; a disk's folder is a name that :func:`put` replaces."""
    folder = DISK if at == "disk" else None
    return StatePlacement.model_validate({"at": at, "step": step, "share": share, "folder": folder})


HOME = placement("device")
PLACES = (placement("host"), placement("disk"))
BY_HOST = (placement("host", "host"), placement("disk", "host"), placement("host", "host", 0.5))


@dataclass(frozen=True)
class Trip:
    """Two layouts: the first trains and saves, the second goes on."""

    first: Case
    second: Case
    precision: str = "bf16"

    def put(self, state: StatePlacement, folder: Path) -> "Trip":
        """Return the trip with its state somewhere."""
        if state.folder:
            state = state.model_copy(update={"folder": str(folder / DISK)})
        cases = (self.first, self.second)
        first, second = (replace(c, more=(*c.more, ("state", state))) for c in cases)
        return Trip(first, second, self.precision)


def steps(data: ShardedState, optimizer: Optimizer, case: Case) -> list[float]:
    """Make three steps; return their losses and norms."""
    figures = []
    for _ in range(STEPS):
        found = gradients(data, own(case, data), CHUNK)
        update(data, optimizer, found.grad_norm)
        figures += [found.lm_loss, found.grad_norm]
    return figures


def travel(trip: Trip, state: StatePlacement, folder: Path) -> dict[str, torch.Tensor]:
    """Train, save, resume, train; return the whole state here by name and place, and figures."""
    trip = trip.put(state, folder)
    data = opened(trip.first, RANKS, trip.precision)
    optimizer = data.optimizer(OPTIMIZERS[trip.first.optim])
    figures = steps(data, optimizer, trip.first)
    ranks = data.parts.world.group("world")
    where = folder / f"run-{gather_objects(len(list(folder.iterdir())), ranks)[0]}"
    lock = FolderLock(where, "the test")
    if ranks.index == 0:
        where.mkdir()
        lock.acquire()
    meta = {"progress": {"step": STEPS, "tokens": 7, "excluded": []}}
    state_slices = assigned_state(data, optimizer)
    path = save(where, STEPS, state_slices, meta, SMALL_SHARDS, lock=lock, ranks=ranks)
    if ranks.index == 0:
        lock.release()
    data = opened(trip.second, RANKS, trip.precision)
    optimizer = data.optimizer(OPTIMIZERS[trip.second.optim])
    restore(path, data, optimizer)
    data.refresh_weights()
    figures += steps(data, optimizer, trip.second)
    found = {
        f"{name} {held.box}": held.tensor.clone() for name, held in iter_state(data, optimizer)
    }
    return found | {"figures": torch.tensor(figures, dtype=torch.float64)}


def digest(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return a SHA-256 of each tensor's bits."""
    return {
        name: hashlib.sha256(held.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, held in state.items()
    }


def compared(
    rank: int, trips: Sequence[Trip], places: Sequence[StatePlacement], folder: str
) -> dict[Trip, list[tuple[int, list[str], float]]]:
    """Return, of each trip and place, how many tensors there are, those whose bits differ from the
    state's on the device, and the largest difference of one.
    """
    answer = {}
    for trip in trips:
        want = travel(trip, HOME, Path(folder))
        wanted, rows = digest(want), []
        for place in places:
            have = travel(trip, place, Path(folder))
            assert have.keys() == want.keys()
            found = digest(have)
            differ = [name for name in wanted if found[name] != wanted[name]]
            far = max(float((have[n].double() - want[n].double()).abs().max()) for n in wanted)
            rows.append((len(wanted), differ, far))
        answer[trip] = rows
    return answer


@cache
def comparisons(
    trips: tuple[Trip, ...], places: tuple[StatePlacement, ...]
) -> list[dict[Trip, list[tuple[int, list[str], float]]]]:
    """Return what each rank compared."""
    with quick_folder(Path("/tmp")) as folder:
        return run_ranks(compared, RANKS, trips, places, str(folder), time_out_s=240)
