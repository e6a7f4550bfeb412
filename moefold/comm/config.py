"""Record of restarts after a lost rank."""

from typing import Annotated

from pydantic import Field

from moefold.config.base import Record

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Survive(Record):
    """In-memory checkpoints, from which ``--nproc`` restarts all ranks when one is lost.

    The launcher holds two copies of each rank's state in host memory. torchrun restarts its ranks
    itself, from checkpoints on disk.
    """

    every: Count = 1
    """Steps between copies, hence the most steps that are repeated after a loss."""
    limit: Count = 100
    """More losses than this within ``window_s`` end the run."""
    window_s: Positive = 3600.0
    same_step: Count = 5
    """This many consecutive losses at one step end the run: a restart would only repeat them."""
    stopped_s: Positive = 5.0
    """A rank without heartbeat for this long is sent SIGCONT: it may only be stopped."""
