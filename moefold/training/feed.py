"""Which micro-batches a data rank runs: every rank as many, so that all keep step."""

from collections.abc import Iterator
from itertools import chain, islice, repeat

from moefold.comm.world import World
from moefold.data.batch import MicroBatch, pack
from moefold.data.loader import Loader


class Feed:
    """A data rank's share of a loader.

    Micro-batch j of a step runs at round ``j // dp`` on data rank ``j % dp``. Where the last round
    has too few, the others run one of padding alone.
    """

    def __init__(self, loader: Loader, world: World) -> None:
        self._loader = loader
        self._rank, self._ranks = world.attention.dp, world.folding.dp

    def step(self, place: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step of the data's order."""
        count, first, by = self._loader.micro_batches, self._rank, self._ranks
        mine = [self._loader.step_part(place, j) for j in range(first, count, by)]
        return list(self._evened(iter(mine), count))

    def held_out(self, name: str, tokens: int | None) -> Iterator[MicroBatch]:
        """Yield this rank's part of a held-out set; see :meth:`Loader.evaluation`."""
        found = self._loader.evaluation(name, tokens, self._rank, self._ranks)
        return self._evened(found, self._loader.evaluation_size(name, tokens))

    def _evened(self, found: Iterator[MicroBatch], count: int) -> Iterator[MicroBatch]:
        nothing = pack([], rows=self._loader.rows)
        return islice(chain(found, repeat(nothing)), -(-count // self._ranks))
