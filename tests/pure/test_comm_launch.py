"""What the launcher makes of ranks that say nothing, or are gone."""

import signal
import subprocess
import time
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from moefold.comm import launch
from moefold.comm.agree import FirstRankFailed
from moefold.comm.worker import PicklableError, RankProcess, WorkerResult


def test_a_first_rank_that_never_says_its_error_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the launcher looks for signs of life, ten times a second."""
    monkeypatch.setattr(launch, "CAUSE_WAIT_S", 0.3)
    (first, held), (second, says) = Pipe(duplex=False), Pipe(duplex=False)
    repeated = PicklableError(FirstRankFailed, ("the first rank failed: why",))
    says.send(WorkerResult(False, "why", time.monotonic(), repeated, blames_others=True))
    started = time.monotonic()

    def silent() -> list[int]:
        assert time.monotonic() - started < 5, "the launcher waits on"
        return []

    ranks: Any = [SimpleNamespace(result=end) for end in (first, second)]
    answers = launch._collect_results(ranks, None, silent)
    assert answers[0] is None and answers[1] is not None
    held.close()


def test_a_signal_to_a_rank_that_has_just_ended_is_nothing() -> None:
    """Its parent, the server that ranks fork from, has waited for it and not said so yet."""
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    rank = RankProcess.__new__(RankProcess)
    rank.process = SimpleNamespace(pid=gone.pid, is_alive=lambda: True)  # type: ignore[assignment]
    rank.signal(0)


def test_an_interrupt_lets_the_rank_that_is_being_started_start_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the server that ranks fork from is left with half a request, and says a traceback."""
    workers = launch.Workers(print, [(), (), ()], 1.0)
    started = []

    def start(context: Any, task: Any) -> Any:
        if task.info.rank == 1:
            workers.forward_signal(signal.SIGINT)
        started.append(task.info.rank)
        return SimpleNamespace(process=SimpleNamespace(kill=print), kill=print)

    monkeypatch.setattr(launch, "RankProcess", start)
    with pytest.raises(KeyboardInterrupt):
        workers.start()
    workers.kill()
    assert started == [0, 1]
