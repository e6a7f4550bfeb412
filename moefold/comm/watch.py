"""Hang detection: a thread on each rank that reports which ranks are to blame for a hang.

Each rank's thread writes heartbeats to the store, which runs outside all ranks. A rank that has
waited half of the time-out raises an alarm; then each rank writes its last operations and stacks,
one of them reads all heartbeats and publishes the verdict, and all append it to their files.
"""

import atexit
import faulthandler
import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from moefold.comm.recorder import Recorder
from moefold.comm.rendezvous import PrefixStore, Store
from moefold.comm.verdict import Beat, Waiting, judge

PREFIX = "moefold watch"
HOST = "host"
"""Name of the group in which waiting is no hang while the first rank's heartbeat continues."""
BEATS_PER_TIME_OUT = 40
SLOWEST_BEAT_S = 1.0
SILENCE_S = 5.0


class HangWatch:
    """One rank's hang detection; ``stop`` ends it."""

    def __init__(
        self,
        recorder: Recorder,
        store: Store,
        rank: int,
        world: int,
        time_out_s: float,
        folder: Path | None = None,
    ) -> None:
        """Start to watch this rank, whose operations are in ``recorder``.

        ``store`` is a separate connection to the store of all ranks; reports are written into
        ``folder``, if any.
        """
        self.recorder, self.rank, self.world, self.folder = recorder, rank, world, folder
        self.time_out_s = time_out_s
        self.beat_s = min(SLOWEST_BEAT_S, time_out_s / BEATS_PER_TIME_OUT)
        self.silence_s = min(SILENCE_S, time_out_s / 4)
        self._store = PrefixStore(PREFIX, store)
        # Restarted ranks find the alarms of earlier attempts.
        self._seen = self._store.add("alarm", 0)
        self._turns, self._answered_at = 0, float("-inf")
        self._without_verdict: int | None = None
        self._first = b"", 0.0
        self._over, self._told, self._alarm = (threading.Event() for _ in range(3))
        self._beat()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        # A thread inside the store's code at interpreter exit would abort the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the watch."""
        atexit.unregister(self.stop)
        self._over.set()
        self._thread.join(self.time_out_s)

    def explain(self) -> None:
        """Wait for a verdict on an operation that failed on this rank; raise an alarm if needed."""
        if not self.recorder.waiting():
            return
        if time.monotonic() - self._answered_at > self.time_out_s:
            self._told.clear()
            self._alarm.set()
        self._told.wait(2 * self.silence_s + 4 * self.beat_s)

    def _run(self) -> None:
        try:
            while not self._over.wait(self.beat_s):
                self._turn()
        except RuntimeError:
            # The store is gone, and with it the run.
            self._told.set()

    def _turn(self) -> None:
        self._beat()
        now = time.monotonic()
        alarm = self._store.add("alarm", 0)
        if alarm == self._seen and (self._alarm.is_set() or self._waits_in_vain(now)):
            # If several ranks raise it at once, only one increments the counter.
            alarm = int(self._store.compare_set("alarm", str(alarm), str(alarm + 1)))
        self._alarm.clear()
        if alarm > self._seen:
            self._seen, self._answered_at = alarm, now
            self._without_verdict = alarm
            self._told.clear()
            self._write_down(alarm)
            if self._store.add(f"judge/{alarm}", 1) == 1:
                self._store.set(f"verdict/{alarm}", self._judge(alarm))
        if self._without_verdict is not None:
            self._take_verdict(self._without_verdict, now)

    def _waits_in_vain(self, now: float) -> bool:
        """Return whether an operation has taken half the time-out, without a recent alarm."""
        # A hung operation times out before it could raise a second alarm.
        if now - self._answered_at <= 0.75 * self.time_out_s:
            return False
        long = [held for held in self.recorder.waiting() if now - held.since > self.time_out_s / 2]
        if not long or any(held.record.site.group != HOST for held in long):
            return bool(long)
        # The first rank may take long, unless its heartbeat has stopped.
        beat = self._store.get("beat/0")
        if beat != self._first[0]:
            self._first = beat, now
        return now - self._first[1] > self.silence_s

    def _beat(self) -> None:
        self._turns += 1
        now = time.monotonic()
        waiting = tuple(
            Waiting(call.channel, call.number, call.words, ranks, now - since)
            for call, ranks, since, _ in self.recorder.waiting()
        )
        last = self.recorder.last(1)
        beat = Beat(self._turns, self.recorder.begun(), waiting, last[0].words if last else "")
        self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _write_down(self, alarm: int) -> None:
        """Write this rank's last operations to the store; to its file also its stacks."""
        records = self.recorder.last()
        ring = [(r.channel, r.number, r.site.op, r.words) for r in records]
        self._store.set(f"ring/{alarm}/{self.rank}", json.dumps(ring))
        if self.folder is None:
            return
        with suppress(OSError), self._file().open("a", encoding="utf-8") as file:
            file.write(f"rank {self.rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n\n")
            file.write("last operations, oldest first:\n")
            file.writelines(f"  {record.words}\n" for record in records)
            file.write("\nstacks:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _file(self) -> Path:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"rank-{self.rank:05d}.txt"

    def _take_verdict(self, alarm: int, now: float) -> None:
        """Append the verdict to this rank's file; if no rank publishes one in time, do it here."""
        key = f"verdict/{alarm}"
        if not self._store.check([key]):
            if now - self._answered_at < 2 * self.silence_s:
                return
            self._store.set(key, self._judge(alarm))
        self._without_verdict = None
        if self.folder is not None:
            text = self._store.get(key).decode()
            with suppress(OSError), self._file().open("a", encoding="utf-8") as file:
                file.write(f"\nverdict:\n{text}\n")
        self._told.set()

    def _judge(self, alarm: int) -> str:
        """Read all ranks' heartbeats; publish and return the verdict."""
        before = self._beats()
        until = time.monotonic() + self.silence_s
        while True:
            time.sleep(self.beat_s)
            self._beat()
            beats = self._beats()
            silent = [
                rank
                for rank in range(self.world)
                if rank not in beats or beats[rank].turn == before.get(rank, beats[rank]).turn
            ]
            if not silent or time.monotonic() > until:
                break
        rings = {
            rank: {(channel, number): (op, words) for channel, number, op, words in ring}
            for rank, ring in self._told_by_ranks(f"ring/{alarm}").items()
        }
        verdict = judge(beats, silent, rings)
        self._store.set("report", json.dumps([time.time(), verdict]))
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / "report.txt").write_text(verdict + "\n", encoding="utf-8")
        print(f"ranks hang:\n{verdict}", file=sys.stderr, flush=True)
        return verdict

    def _beats(self) -> dict[int, Beat]:
        return {
            rank: Beat(turn, begun, tuple(Waiting(*one) for one in waiting), last)
            for rank, (turn, begun, waiting, last) in self._told_by_ranks("beat").items()
        }

    def _told_by_ranks(self, key: str) -> dict[int, Any]:
        """Return the values that ranks have written under a key, by rank."""
        keys = {rank: f"{key}/{rank}" for rank in range(self.world)}
        there = {rank: name for rank, name in keys.items() if self._store.check([name])}
        return {rank: json.loads(self._store.get(name)) for rank, name in there.items()}


def report_in(store: Store, within_s: float) -> str:
    """Return the last verdict in a store if it is recent, to append to an error; else empty."""
    watch = PrefixStore(PREFIX, store)
    if not watch.check(["report"]):
        return ""
    at, text = json.loads(watch.get("report"))
    return f"\n{text}" if time.time() - at < within_s else ""
