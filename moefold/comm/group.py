"""Ranks that talk to each other, seen from one of them."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from moefold.comm.recorder import Recorder


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other.

    A group of one rank needs no process group: every collective over it is the identity and is
    not recorded.
    """

    name: str
    """What it is for: its kinds, joined with ``+`` where several have the same ranks."""
    ranks: tuple[int, ...]
    index: int
    """The place of this rank among them."""
    handle: ProcessGroup | None
    recorder: Recorder
    back: ProcessGroup | None = None
    """Carries messages to earlier ranks, so that the two directions never wait for each other;
    None where the backend lets them pass anyway."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def channel(self) -> str:
        """A name that no other ranks share: groups of one kind differ in their first rank."""
        return f"{self.kind}@{self.ranks[0]}"

    @property
    def kind(self) -> str:
        """The first of its kinds, which no other group of its ranks is called by."""
        return self.name.partition("+")[0]


ALONE = Group("alone", (0,), 0, None, Recorder())
"""One rank and nobody to talk to."""
