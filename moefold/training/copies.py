"""What a run goes on from sooner than from its checkpoints: copies in memory and on local disks."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from moefold.checkpoint import manifest
from moefold.comm.world import World
from moefold.run import Run
from moefold.training.local import LocalCopies
from moefold.training.recover import Keeper, Past


class Copies:
    """The copies of a run's state that are kept besides its checkpoints, where any are.

    Args:
        run: the run.
        folder: where its checkpoints are.
        identity: digest of what it computes and of its layout.
        form: digest of what this rank's share of the state consists of.
        world: the ranks; all of them call each method alike.
        keeper: the copies in memory.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        identity: str,
        form: str,
        world: World,
        keeper: Keeper | None,
    ) -> None:
        self._keeper, self._world = keeper, world
        self._local: LocalCopies | None = None
        record = run.watch.checkpoint.local
        if record is not None:
            self._local = LocalCopies(record, folder, identity, form, world)

    def keep(self, past: Past, tensors: Callable[[], Sequence[Tensor]]) -> None:
        """Copy the state after a step."""
        if self._keeper is not None:
            self._keeper.keep(past, tensors(), self._world)
        if self._local is not None:
            self._local.keep(past, tensors())

    def take(
        self, tensors: Sequence[Tensor], newest: Callable[[], Path | None]
    ) -> tuple[Past, Path | None] | None:
        """Fill the state from memory, or from local disks unless the newest checkpoint is newer.

        Returns:
            How far that was, and where it was on a disk; None where there is nothing to go on from.
        """
        past = self._keeper and self._keeper.take(tensors, self._world)
        if past is not None:
            return past, None
        if self._local is None:
            return None
        stored = newest()
        return self._local.take(tensors, 0 if stored is None else manifest.read(stored).step)

    def wait(self) -> None:
        """Wait until what is under way is written."""
        if self._local is not None:
            self._local.wait()
