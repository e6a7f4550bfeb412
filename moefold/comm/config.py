"""Record of what happens when a rank dies."""

from typing import Annotated

from pydantic import Field

from moefold.config.base import Record

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Survive(Record):
    """In-memory checkpoints, from which ``--nproc`` starts all ranks anew when one was lost.

    The launcher holds two copies of each rank's state in host memory. Ranks that torchrun starts
    are restarted by it, and go on from checkpoints.
    """

    every: Count = 1
    """Steps between copies, and so the most that are lost."""
    limit: Count = 100
    """More losses than this within ``window_s`` end the run."""
    window_s: Positive = 3600.0
    same_step: Count = 5
    """This many losses in a row at one step end the run, since a restart would only repeat them."""
    stopped_s: Positive = 5.0
    """A rank without a sign of life for so long is sent SIGCONT, as it may only be stopped."""
