"""From a run and a process's place among others to the world that trains it."""

from pathlib import Path

import torch

from moefold.comm.environment import Spot
from moefold.comm.world import World
from moefold.mesh.folding import Folding
from moefold.run import Run, demand_fit

REPORTS = "hangs"
"""Folder, in the run's, of what ranks write when they wait in vain for each other."""


def device_kind(ranks_here: int = 1) -> str:
    """Return ``cuda`` where there is one, else ``cpu``.

    Raises:
        ValueError: where ranks of this machine would have to share a device.
    """
    if not torch.cuda.is_available():
        return "cpu"
    devices = torch.cuda.device_count()
    if ranks_here > devices:
        raise ValueError(
            f"{ranks_here} ranks and {devices} CUDA devices here: start {devices} at most, or run "
            "on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
        )
    return "cuda"


def device_of(spot: Spot) -> torch.device:
    """Return the device of a rank that has joined the others."""
    if device_kind() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", spot.local_rank)


def world_of(run: Run, spot: Spot, folder: Path) -> World:
    """Open the run's layout over all ranks; each of them has joined.

    Raises:
        RunError: where the layout does not fit so many ranks, with the nearest that does.
    """
    demand_fit(run, spot.world)
    folding = Folding(run.layout.split, spot.world, run.layout.order)
    return World.open(
        folding, device_of(spot), run.watch.time_out_s, folder / REPORTS, survives=spot.survives
    )
