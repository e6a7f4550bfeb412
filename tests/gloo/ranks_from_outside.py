"""What a rank started by torchrun or Slurm does: joins, opens its groups, and sums.

``python -m tests.gloo.ranks_from_outside [FOLDER]``; with a folder, rank 0 then stops itself.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from moefold.comm import collectives as comm
from moefold.comm.environment import rank_info_from_env
from moefold.comm.rendezvous import join
from moefold.comm.world import World
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding

TIME_OUT_S = 4.0


def main(folder: str | None) -> None:
    """Print what all ranks sum to."""
    torch.set_num_threads(1)
    spot = rank_info_from_env()
    assert spot is not None, "nobody started several ranks"
    time_out_s = 30.0 if folder is None else TIME_OUT_S
    device = join(spot, time_out_s)
    laid = Folding(Sizes(), spot.world_size)
    with World.open(laid, device, time_out_s, Path(folder) if folder else None) as world:
        everybody = world.group("world")
        total = comm.sum_(torch.tensor([10.0**spot.rank]), everybody)
        print(f"rank {spot.rank} of {spot.world_size} has {total.item():g}", flush=True)
        if folder is not None:
            if spot.rank == 0:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGSTOP)
            comm.sum_(total, everybody)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
