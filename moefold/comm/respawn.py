"""Ranks that survive each other: what dies is started anew, and all meet again.

The launcher hears of a death by the end of the rank's pipe, at once, and of a stop by the state
of its process. It then cuts the others loose, starts the lost ones, and lets all meet at a new
store. What the ranks go on from is theirs to say.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from moefold.comm.config import Survive
from moefold.comm.environment import Spot
from moefold.comm.interrupt import SILENT, Words
from moefold.comm.launch import (
    SETTLE_S,
    TIME_OUT_S,
    Answer,
    Rank,
    RankError,
    as_one_process,
    fork_server,
    forwarding,
    threads_each,
)
from moefold.comm.respawn_rank import Cut, Loss, Meet, Out, Ready, run_rank
from moefold.comm.store import TCPStore, serve
from moefold.comm.world import IN_OPERATION

POLL_S = 0.2
START_S = 300.0
"""Longest start of a rank, the server that it forks from included."""
COMING, OUT, IN, DONE = "coming", "out", "in", "done"


def survive(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    record: Survive,
    time_out_s: float = TIME_OUT_S,
    words: Words = SILENT,
) -> Any:
    """Call ``function(line, *args)`` on ``nproc`` ranks of this machine; return its result.

    A rank that dies or is stopped is started anew. The function hands what is to be done in an
    attempt to ``line.through``, which all ranks then call again. Otherwise as ``launch``.

    Raises:
        ValueError, OSError: what a rank raised that failed by itself, where it is one of these.
        RankError: with its error where it is another, or once too many were lost.
        KeyboardInterrupt: where the ranks ended after an interrupt.
    """
    context = fork_server(function.__module__)
    task = (time_out_s, threads_each(), function, tuple(args))
    crew = Crew(lambda: Rank(context, run_rank, task), nproc, record, time_out_s)
    try:
        with as_one_process(), forwarding(crew.hand_on, words) as received:
            try:
                return crew.run()
            except RankError:
                if signal.SIGINT in received:
                    raise KeyboardInterrupt from None
                raise
    finally:
        for rank in crew.ranks:
            rank.end()


class Crew:
    """The ranks, seen from the launcher, through all attempts."""

    def __init__(
        self, start: Callable[[], Rank], nproc: int, record: Survive, time_out_s: float
    ) -> None:
        """Start every rank.

        Args:
            start: starts one.
            nproc: how many there are.
            record: when to give up.
            time_out_s: how long a rank may take to leave an attempt.
        """
        self._start, self._record, self._time_out_s = start, record, time_out_s
        self.ranks = [start() for _ in range(nproc)]
        self._where = [COMING] * nproc
        self._answer: Answer | None = None
        self._attempt = 0
        self._store: TCPStore | None = None
        self._loss: Loss | None = None
        self._cut_at = time.monotonic()
        self._failed: dict[int, Out] = {}
        self._failed_at = 0.0
        self._stopped: dict[int, float] = {}
        self._losses: deque[float] = deque()
        self._step: int | None = None
        self._at_step: tuple[int | None, int] = None, 0
        self._held: list[int] = []
        self._signals: list[int] = []

    def hand_on(self, number: int) -> None:
        """Hand a signal on to the ranks; while they are about to meet, once they do."""
        self._signals.append(number)
        together = all(where in (IN, DONE) for where in self._where)
        if (together and self._loss is None) or self._signals.count(number) > 1:
            self._send(number)
        else:
            self._held.append(number)

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def run(self) -> Any:
        """Carry the ranks through until all have answered; return what rank 0 does."""
        while not all(where == DONE for where in self._where):
            if all(where == OUT for where in self._where) and self._may_meet():
                self._meet()
            self._hear()
            self._look_for_stopped()
            if self._loss is not None and self._answer is not None:
                break  # The work is done: who died since has nothing left to do.
            self._judge()
            self._end_absent()
        for rank, where in zip(self.ranks, self._where, strict=True):
            if where == DONE:
                rank.leave()
        assert self._answer is not None
        return self._answer.value

    def _may_meet(self) -> bool:
        """Whether it is known why ranks are out: at the start, or after what is not their fault."""
        return self._loss is not None or not self._failed

    def _meet(self) -> None:
        """Let all ranks meet, at a store that nothing of an earlier attempt is in."""
        store = self._store = serve(0, self._time_out_s)
        held, self._held = self._held, []
        for number in held:
            self._send(number)
        nproc = len(self.ranks)
        for at, rank in enumerate(self.ranks):
            spot = Spot(at, nproc, at, "127.0.0.1", store.port, True, self._attempt, True)
            self._tell(rank, Meet(spot, self._loss))
        self._where = [IN] * nproc
        self._attempt += 1
        self._loss = self._step = None
        self._failed = {}

    def _tell(self, rank: Rank, word: Meet | Cut) -> None:
        with suppress(OSError):  # It is gone, and will be missed.
            rank.life.send(word)

    def _hear(self) -> None:
        ends = {rank.answer: at for at, rank in enumerate(self.ranks) if self._where[at] != DONE}
        for end in wait(list(ends), timeout=POLL_S):
            at = ends[end]  # type: ignore[index]
            try:
                said = self.ranks[at].answer.recv()
            except (EOFError, OSError):
                self._lost(at, "the process died" + self.ranks[at].cause())
                continue
            if isinstance(said, Ready):
                self._step = said.step
            elif isinstance(said, Out):
                self._where[at] = OUT
                if said.error:
                    self._failed_at = self._failed_at if self._failed else time.monotonic()
                    self._failed[at] = said
            elif said.ok:
                self._where[at] = DONE
                if self._answer is None or at == 0:
                    self._answer = said
            else:
                raise RankError(f"rank {at} failed first:\n{said.value}", said.error)

    def _look_for_stopped(self) -> None:
        """End ranks that were stopped: they hold the others up and will not say so."""
        now = time.monotonic()
        for at, rank in enumerate(self.ranks):
            if self._where[at] == DONE or _state(rank.process.pid) != "T":
                self._stopped.pop(at, None)
            elif now - self._stopped.setdefault(at, now) >= self._record.stopped_s:
                del self._stopped[at]
                self._lost(at, "the process was stopped")

    def _lost(self, at: int, why: str) -> None:
        """Cut the others loose, and start a lost rank anew."""
        if any(self._signals.count(number) > 1 for number in self._signals):
            raise RankError(f"rank {at}: {why}, after a second signal")
        before = self._loss.ranks if self._loss is not None else ()
        self._cut(Loss((*before, at), f"rank {at}: {why}", time.time()))
        if self._answer is None:
            self._count(f"rank {at}: {why}")
            self.ranks[at].end()
            self.ranks[at] = self._start()
            self._where[at] = COMING
            # Where the server had to be started too, the others' words have waited meanwhile.
            self._cut_at = time.monotonic()
        else:
            self._where[at] = DONE

    def _cut(self, loss: Loss) -> None:
        if self._loss is not None:
            why = f"{self._loss.why}; {loss.why}"
            self._loss = Loss(loss.ranks, why, self._loss.noticed)
            return
        # The store stays until the next meeting: who is only now on the way to it must find it.
        self._loss, self._cut_at = loss, time.monotonic()
        for at, rank in enumerate(self.ranks):
            if self._where[at] == IN and at not in loss.ranks:
                self._tell(rank, Cut())

    def _count(self, why: str) -> None:
        """Give up where losses come too often, or again and again at one step."""
        now, record = time.monotonic(), self._record
        self._losses.append(now)
        while now - self._losses[0] > record.window_s:
            self._losses.popleft()
        step, times = self._at_step
        self._at_step = (self._step, times + 1 if step == self._step else 1)
        what = ""
        if self._at_step[1] >= record.same_step:
            done = "before any step" if self._step is None else f"after step {self._step}"
            what = f"the loss number {self._at_step[1]} in a row {done}"
        elif len(self._losses) > record.limit:
            what = f"the loss number {len(self._losses)} within {record.window_s:g} s"
        if what:
            raise RankError(
                f"{why}; {what}. Starting it once more would only repeat that: look for its "
                "cause (memory, the device, the data of this step), then give the same command "
                "with --folder, which goes on from the newest checkpoint. Limits: watch.survive"
            )

    def _judge(self) -> None:
        """Decide on failures without a death, once a moment has passed for one to be seen."""
        lost = self._loss is not None and self._loss.ranks
        if not self._failed or lost or time.monotonic() - self._failed_at < SETTLE_S:
            return
        for at, out in self._failed.items():
            if not out.blames_others:
                error = None if out.raised is None else out.raised.again()
                raise RankError(f"rank {at} failed first:\n{out.error}", error)
        if self._loss is None:
            at, out = next(iter(self._failed.items()))
            said = [line for line in out.error.splitlines() if line not in ("", IN_OPERATION)]
            why = f"rank {at}: an operation failed: {said[-1]}"
            self._count(why)
            self._cut(Loss((), why, time.time()))

    def _end_absent(self) -> None:
        """End ranks that do not leave an attempt, or do not come to one: they hang."""
        since = time.monotonic() - self._cut_at
        limits = {COMING: START_S}
        if self._loss is not None:
            limits[IN] = self._time_out_s
        for at, where in enumerate(self._where):
            if since > limits.get(where, math.inf):
                self._lost(at, "the process hung")
                return


def _state(pid: int | None) -> str:
    """Return the letter of a process's state, empty where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
