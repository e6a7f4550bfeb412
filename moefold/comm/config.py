"""Record of what happens when a rank dies."""

from typing import Annotated

from pydantic import Field

from moefold.config.base import Record

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Survive(Record):
    """The launcher starts a rank that died anew, and the others go on with it from memory.

    Each rank keeps two copies of its state in host memory, and two of another rank's. It is for
    ranks that ``--nproc`` started on CPUs; torchrun restarts all of them.
    """

    limit: Count = 100
    """More losses than this within ``window_s`` end the run."""
    window_s: Positive = 3600.0
    same_step: Count = 5
    """So many losses in a row at one step end the run: one more start would only repeat them."""
    stopped_s: Positive = 1.0
    """A rank that was stopped (SIGSTOP) for so long is taken for dead."""
