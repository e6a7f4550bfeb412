"""A group of ranks, from the view of one member."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from moefold.comm.recorder import Recorder


@dataclass(frozen=True)
class Group:
    """A process group with this rank's index in it.

    A group of one rank needs no process group: every collective over it is the identity and is
    not recorded.
    """

    name: str
    """The group's kinds, joined with ``+`` where several have the same ranks."""
    ranks: tuple[int, ...]
    index: int
    """Index of this rank in ``ranks``."""
    handle: ProcessGroup | None
    recorder: Recorder
    reverse_handle: ProcessGroup | None = None
    """Process group for messages to earlier ranks, so that the two directions never wait for each
    other; None where the backend does not serialise them."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def channel(self) -> str:
        """A name unique to these ranks: groups of one kind differ in their first rank."""
        return f"{self.kind}@{self.ranks[0]}"

    @property
    def kind(self) -> str:
        """The first of the group's kinds; no other group of this rank has it."""
        return self.name.partition("+")[0]


SELF_GROUP = Group("alone", (0,), 0, None, Recorder())
"""A group of this rank alone."""
