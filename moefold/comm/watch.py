"""Hang detection: a thread on each rank, which reports the ranks that cause a hang.

Each rank's thread writes heartbeats to the store, which runs outside all ranks. A rank that has
waited half of the time-out raises an alarm; then each rank writes its last operations and stacks,
one rank reads all heartbeats and publishes a verdict, and all append it to their files.
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
from moefold.comm.rendezvous import PrefixStore, latest_meeting
from moefold.comm.store import Store
from moefold.comm.verdict import Heartbeat, WaitingCall, diagnose

PREFIX = "moefold watch"
HOST = "host"
"""Name of the group in which a wait is not a hang while the first rank sends heartbeats."""
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

        ``store`` is a separate connection to the store of all ranks. Reports are written into
        ``folder``, if given.
        """
        self.recorder = recorder
        self.rank = rank
        self.world = world
        self.folder = folder
        self.time_out_s = time_out_s
        self.beat_s = min(SLOWEST_BEAT_S, time_out_s / BEATS_PER_TIME_OUT)
        self.silence_s = min(SILENCE_S, time_out_s / 4)
        self._store = PrefixStore(PREFIX, store)
        # Ranks that open groups again see the alarms of the earlier ones.
        self._last_alarm = self._store.add("alarm", 0)
        self._beat_count = 0
        self._last_alarm_at = float("-inf")
        self._open_alarm: int | None = None
        self._first_rank_beat = b"", 0.0
        self._stopped = threading.Event()
        self._verdict_known = threading.Event()
        self._alarm_requested = threading.Event()
        self._send_heartbeat()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        # A thread inside the store's code at interpreter exit would abort the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the thread."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(self.time_out_s)

    def await_verdict(self) -> None:
        """Wait for a verdict on an operation that failed on this rank; raise an alarm if needed."""
        if not self.recorder.waiting():
            return
        if time.monotonic() - self._last_alarm_at > self.time_out_s:
            self._verdict_known.clear()
            self._alarm_requested.set()
        self._verdict_known.wait(2 * self.silence_s + 4 * self.beat_s)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self.beat_s):
                self._poll()
        except RuntimeError:
            # The store is down, so the run has ended.
            self._verdict_known.set()

    def _poll(self) -> None:
        self._send_heartbeat()
        now = time.monotonic()
        alarm = self._store.add("alarm", 0)
        if alarm == self._last_alarm and (self._alarm_requested.is_set() or self._is_hanging(now)):
            # If several ranks raise it at once, only one increments the counter.
            alarm = int(self._store.compare_set("alarm", str(alarm), str(alarm + 1)))
        self._alarm_requested.clear()
        if alarm > self._last_alarm:
            self._last_alarm = alarm
            self._last_alarm_at = now
            self._open_alarm = alarm
            self._verdict_known.clear()
            self._report_state(alarm)
            if self._store.add(f"judge/{alarm}", 1) == 1:
                self._store.set(f"verdict/{alarm}", self._diagnose(alarm))
        if self._open_alarm is not None:
            self._take_verdict(self._open_alarm, now)

    def _is_hanging(self, now: float) -> bool:
        """Return whether an operation has taken half the time-out and no alarm is recent."""
        # A hung operation times out before it could raise a second alarm.
        if now - self._last_alarm_at <= 0.75 * self.time_out_s:
            return False
        long = [call for call in self.recorder.waiting() if now - call.since > self.time_out_s / 2]
        if not long or any(call.record.site.group != HOST for call in long):
            return bool(long)
        # The first rank may take long, unless its heartbeat has stopped.
        beat = self._store.get("beat/0")
        if beat != self._first_rank_beat[0]:
            self._first_rank_beat = beat, now
        return now - self._first_rank_beat[1] > self.silence_s

    def _send_heartbeat(self) -> None:
        self._beat_count += 1
        now = time.monotonic()
        waiting = tuple(
            WaitingCall(*call.key, call.record.description, call.ranks, now - call.since)
            for call in self.recorder.waiting()
        )
        last = self.recorder.last(1)
        beat = Heartbeat(
            self._beat_count,
            self.recorder.begun_counts(),
            waiting,
            last[0].description if last else "",
        )
        self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _report_state(self, alarm: int) -> None:
        """Write this rank's last operations to the store, and with its stacks to its file."""
        records = self.recorder.last()
        calls = [(r.channel, r.number, r.site.op, r.description) for r in records]
        self._store.set(f"ring/{alarm}/{self.rank}", json.dumps(calls))
        if self.folder is None:
            return
        with suppress(OSError), self._report_file().open("a", encoding="utf-8") as file:
            file.write(f"rank {self.rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n\n")
            file.write("last operations, oldest first:\n")
            file.writelines(f"  {record.description}\n" for record in records)
            file.write("\nstacks:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _report_file(self) -> Path:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"rank-{self.rank:05d}.txt"

    def _take_verdict(self, alarm: int, now: float) -> None:
        """Append the verdict to this rank's file; publish one if no rank does so in time."""
        key = f"verdict/{alarm}"
        if not self._store.check([key]):
            if now - self._last_alarm_at < 2 * self.silence_s:
                return
            self._store.set(key, self._diagnose(alarm))
        self._open_alarm = None
        if self.folder is not None:
            text = self._store.get(key).decode()
            with suppress(OSError), self._report_file().open("a", encoding="utf-8") as file:
                file.write(f"\nverdict:\n{text}\n")
        self._verdict_known.set()

    def _diagnose(self, alarm: int) -> str:
        """Read all ranks' heartbeats; publish and return the verdict."""
        before = self._read_heartbeats()
        until = time.monotonic() + self.silence_s
        while True:
            time.sleep(self.beat_s)
            self._send_heartbeat()
            heartbeats = self._read_heartbeats()
            silent = [
                rank
                for rank in range(self.world)
                if rank not in heartbeats
                or heartbeats[rank].number == before.get(rank, heartbeats[rank]).number
            ]
            if not silent or time.monotonic() > until:
                break
        recent_calls = {
            rank: {(channel, number): (op, text) for channel, number, op, text in calls}
            for rank, calls in self._read_from_ranks(f"ring/{alarm}").items()
        }
        verdict = diagnose(heartbeats, silent, recent_calls)
        self._store.set("report", json.dumps([time.time(), verdict]))
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / "report.txt").write_text(verdict + "\n", encoding="utf-8")
        print(f"ranks hang:\n{verdict}", file=sys.stderr, flush=True)
        return verdict

    def _read_heartbeats(self) -> dict[int, Heartbeat]:
        return {
            rank: Heartbeat(number, begun, tuple(WaitingCall(*call) for call in waiting), last)
            for rank, (number, begun, waiting, last) in self._read_from_ranks("beat").items()
        }

    def _read_from_ranks(self, key: str) -> dict[int, Any]:
        """Return the values that ranks have written under a key."""
        keys = {rank: f"{key}/{rank}" for rank in range(self.world)}
        present = {rank: name for rank, name in keys.items() if self._store.check([name])}
        return {rank: json.loads(self._store.get(name)) for rank, name in present.items()}


def recent_report(store: Store, within_s: float) -> str:
    """Return a store's last verdict, to append to an error; empty if there is no recent one."""
    met = latest_meeting(store)
    if met is None:
        return ""
    watch = PrefixStore(PREFIX, met)
    if not watch.check(["report"]):
        return ""
    at, text = json.loads(watch.get("report"))
    return f"\n{text}" if time.time() - at < within_s else ""
