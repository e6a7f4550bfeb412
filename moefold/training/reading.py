"""Micro-batches of a run's steps, read one step ahead.

A rank whose read fails learns of it while all ranks still have a step to compute, and asks them to
stop after it, as for a signal. So all save the same step and report the same error, and no rank
waits in an exchange for one that has gone.
"""

from moefold.comm.collectives import gather_objects
from moefold.comm.world import World
from moefold.data.batch import MicroBatch
from moefold.data.config import DataError
from moefold.data.loader import Loader


class ReadError(DataError):
    """A step's data could not be read on some rank; raised by all ranks after the same step."""


class StepReader:
    """Reads this rank's micro-batches of a step before the step before it is computed.

    All ranks call every method in the same order, with the same arguments.
    """

    def __init__(self, loader: Loader, world: World) -> None:
        self._loader = loader
        self._world = world
        self._ahead: tuple[int, list[MicroBatch]] | None = None
        self._failure: DataError | None = None

    def read(self, index: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of place ``index`` of the data order.

        Raises:
            ReadError: if the place was not read ahead and some rank cannot read it.
        """
        if self._ahead is None or self._ahead[0] != index:
            # The first step of a process, or the one after a rewind: ranks have no step in which
            # a failure could travel, and exchange it.
            self.read_ahead(index)
            self.raise_failure()
        assert self._ahead is not None
        batches = self._ahead[1]
        self._ahead = None
        return batches

    def read_ahead(self, index: int) -> str:
        """Read a place for a later ``read``; return why this rank cannot, or an empty text."""
        self._ahead = None
        try:
            self._ahead = index, self._loader.load_step(index)
        except DataError as error:
            self._failure = error
            return str(error)
        return ""

    def raise_failure(self) -> None:
        """Raise the failure that some rank's reads had since the last call, if any.

        Raises:
            ReadError: with the message of the lowest rank that failed.
        """
        failure = self._failure
        self._failure = None
        by_rank = gather_objects(str(failure) if failure else None, self._world.on_host)
        for rank, message in enumerate(by_rank):
            if message is not None:
                where = f"rank {rank}: " if self._world.size > 1 else ""
                raise ReadError(f"{where}{message}") from failure
