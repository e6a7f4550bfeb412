"""Records of when and where checkpoints are written, and which are kept. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.fields import OnDisk

Count = Annotated[int, Field(ge=1)]


class NodeLocal(Record):
    """Copies on the machines' local disks, from which a restart in the same layout resumes."""

    folder: Annotated[str, Field(min_length=1), OnDisk()]
    """Folder on each machine's local disk; ``$NAME`` is an environment variable of the machine."""
    every: Count = 50
    """Steps between copies, of which the last two are kept."""


class CheckpointPolicy(Record):
    """When a checkpoint is written, how many are kept, and what happens when a save fails."""

    every: Count | None = 500
    """Steps between saves; None saves only at the end."""
    keep: Count = 3
    """Number of newest checkpoints that are kept."""
    keep_every: Count | None = None
    """Also keep each checkpoint whose step is a multiple of this."""
    shard_bytes: Annotated[int, Field(ge=1024, le=2**50)] = 2**30
    """Most bytes of tensors in a shard file; a larger tensor has its own shard."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Number of attempts at a save when storage has a transient error."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Whether a run continues or stops after a failed save."""
    asynchronous: bool = False
    """Whether checkpoints are copied to host memory and written during further training."""
    local: NodeLocal | None = None
    """Additional copies on the machines' local disks, if these are faster than shared storage."""
