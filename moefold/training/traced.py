"""Time of a trainer's steps on all ranks, and traces that all ranks start and stop together."""

from pathlib import Path
from typing import Any

import torch

from moefold.comm.collectives import gather_objects
from moefold.comm.world import World
from moefold.parallel.apply import ModelParts
from moefold.run import Run
from moefold.training.distributed import RankZeroRunner, on_all_ranks
from moefold.training.trace import Interval, StepTrace
from moefold.training.walls_bench import describe_walls


class Traced:
    """Base of a trainer whose steps are timed and can be traced.

    ``_window`` is when the last one ran, ``_busy_s`` the seconds without waits since last asked.
    """

    run: Run
    world: World
    device: torch.device
    parts: ModelParts
    rank_zero: RankZeroRunner
    _window: Interval = (0.0, 0.0)
    _busy_s: float = 0.0
    _trace: StepTrace | None = None

    @on_all_ranks
    def pace(self) -> list[float]:
        """Return each rank's busy seconds in steps since the last call, waits excluded."""
        busy = self._busy_s
        self._busy_s = 0.0
        return gather_objects(busy, self.world.on_host)

    @on_all_ranks
    def start_trace(self) -> None:
        """Trace what follows on every rank, until :meth:`stop_trace`."""
        self._trace = StepTrace(self.world)
        self._trace.start()

    @on_all_ranks
    def stop_trace(self, file: str | None, failed: bool = False) -> dict[str, Any]:
        """Write rank 0's trace and return the walls of the last step, beside its plan.

        Without a file the trace is discarded; ``failed``: whether other ranks may be gone.
        """
        trace = self._trace
        self._trace = None
        if trace is None:
            return {}
        trace.stop(failed)
        if file is None:
            return {}
        walls = trace.measure(self._window, self.parts)
        if not self.rank_zero.is_leader:
            return {}
        trace.write(Path(file))
        return describe_walls(walls, self.run, self.device.type)
