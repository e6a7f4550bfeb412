"""What a run makes again where its layout leaves that to the planner: settled for all ranks."""

import os

import torch

from moefold.comm.agree import on_first
from moefold.comm.world import World
from moefold.layers.config import Auto
from moefold.planner.from_run import keeping_within, settled
from moefold.planner.hardware import Cluster, device, processor, resized, sold_as
from moefold.planner.recompute import PRICED
from moefold.run import Run


def settle_recompute(run: Run, world: World) -> Run:
    """Return the run with the kinds that are made again, or leave, in place of ``auto``.

    Raises:
        ValueError: where nothing fits the limit, with what it would take.
    """
    if not isinstance(run.layout.recompute, Auto):
        return run
    keeping = on_first(lambda: keeping_within(run, cluster_of(world)), world.on_host)
    return settled(run, keeping)


def cluster_of(world: World) -> Cluster:
    """Return the ranks' devices as a plan takes them; processes of a CPU share its memory."""
    if world.device.type == "cuda":
        found = sold_as(torch.cuda.get_device_name(world.device)) or device(PRICED)
        memory = torch.cuda.get_device_properties(world.device).total_memory
        return Cluster(resized(found, memory), world.size, min(8, world.size), found.domain)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.size
    return Cluster(processor(1e11, 1e10, memory), world.size, 1, 1)
