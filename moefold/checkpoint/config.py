"""The record of how checkpoints are kept. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.fields import OnDisk

Count = Annotated[int, Field(ge=1)]


class NodeLocal(Record):
    """Copies on the machines' own disks, which a restart in the same layout goes on from."""

    folder: Annotated[str, Field(min_length=1), OnDisk()]
    """Folder on each machine's own disk; ``$NAME`` is a variable of its environment."""
    every: Count = 50
    """Steps between copies, of which two are kept."""


class CheckpointPolicy(Record):
    """When a checkpoint is written, how many stay, and what a failed save means."""

    every: Count | None = 500
    """Steps between saves; None saves at the end only."""
    keep: Count = 3
    """How many of the newest are kept."""
    keep_every: Count | None = None
    """Besides the newest, each checkpoint whose step is a multiple of this is kept."""
    shard_bytes: Annotated[int, Field(ge=1024)] = 2**30
    """A shard file is closed before it grows past this; a larger tensor has a shard of its own."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """How often a save is tried when the storage fails for a moment."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Whether a run goes on without the checkpoint when a save has failed."""
    asynchronous: bool = False
    """Whether checkpoints are copied to host memory, and written from there while training goes
    on."""
    local: NodeLocal | None = None
    """Further copies on the machines' own disks, where these are faster than shared storage."""
