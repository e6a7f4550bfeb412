"""Eight faults in one run, each in the run that resumes after the one before."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fault_command import Command, listening, listening_here, shared_memory, strike, unused
from fault_trials import (
    LAUNCHER,
    RANK,
    SERVER,
    SIGNALS,
    WRITER,
    Bench,
    Fault,
    differences,
    names,
    victim_of,
)

from moefold.cli.main import main as moefold
from tests.gloo.harness import one_at_a_time

PROGRAM = """
import json, sys, threading
from moefold.cli.main import main
from moefold.comm.fork_server import fork_server

if __name__ == "__main__":
    # In a thread that ends soon, as some callers start it.
    thread = threading.Thread(target=fork_server, args=("moefold.cli._training",))
    thread.start()
    thread.join()
    for line in sys.stdin:
        print("status", main(json.loads(line)), flush=True)
"""
"""Runs one command after another, with one server for all ranks."""
FAULTS = {
    Fault("first step", RANK, "SIGKILL", 1): 76,
    Fault("save", WRITER, "SIGSTOP, SIGKILL", 1): 76,
    Fault("publish", RANK, "SIGTERM", 1): 75,
    Fault("evaluate", RANK, "SIGSTOP, SIGKILL"): 76,
    Fault("prune", WRITER, "SIGTERM"): 75,
    Fault("resume", LAUNCHER, "SIGTERM"): 76,
    Fault("sample", SERVER, "SIGSTOP, SIGKILL"): 76,
    Fault("end", LAUNCHER, "SIGKILL"): -signal.SIGKILL,
}
"""Faults and the exit statuses that they lead to."""
KILLED = "rank 1 was killed by SIGKILL (the kernel does that when memory is used up); to resume"
SILENT = "rank 1 ended, and the process that ranks fork from does not answer; to resume"
LIMIT_S = 240.0


def test_a_run_that_is_broken_eight_times_is_the_unbroken_one(tmp_path: Path) -> None:
    """And of each broken one no process, socket, shared memory or temporary file stays."""
    bench = Bench(tmp_path / "bench")
    folder = tmp_path / "broken"
    out = folder / "out"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    shared = shared_memory()
    with one_at_a_time():
        bench.begin("nothing", out)
        command = Command([str(script)], folder)
        try:
            for number, (fault, status) in enumerate(FAULTS.items()):
                words = bench.words("nothing", out, in_step=fault.victim == RANK)
                bench.halt(fault)
                command.tell(json.dumps(words))
                break_off(command, bench, fault)
                assert status_of(command, number) == status, (fault, command.said())
            wait_until(lambda: not command.processes())
        finally:
            command.end()
        bench.plan.forget()
        assert moefold(bench.words("nothing", out)) == 0
    assert differences(out, bench.reference("nothing")) == []
    assert not unused(shared_memory() - shared)
    assert not names(command.temporary)
    assert "Traceback" not in command.said()
    assert KILLED in command.said() and SILENT in command.said()


def break_off(command: Command, bench: Bench, fault: Fault) -> None:
    """Strike at a fault's moment, and wait until ranks and their sockets are gone.

    A server that is stopped does not report that a rank has ended, and the launcher kills it. When
    the launcher is killed, other processes are stopped.
    """
    bench.plan.wait(command.has_ended)
    ranks = command.ranks(2)
    doors = listening(ranks)
    assert len(ranks) == 2 and doors
    victim = victim_of(fault, command)
    if fault.victim == SERVER:
        os.kill(victim, signal.SIGSTOP)
        strike(ranks[1], [signal.SIGKILL], bench.plan)
    else:
        if fault.signal == "SIGKILL" and fault.victim == LAUNCHER:
            for pid in set(command.processes()) - {victim, command.server(), ranks[0]}:
                os.kill(pid, signal.SIGSTOP)
        strike(victim, SIGNALS[fault.signal], bench.plan)
    wait_until(lambda: not set(ranks) & set(command.processes()))
    wait_until(lambda: not doors & listening_here())


def status_of(command: Command, number: int) -> int:
    """Return the exit status of a command by its number, or that of their launcher."""

    def statuses() -> list[int]:
        return [int(found) for found in re.findall(r"^status (\d+)$", command.said(), re.MULTILINE)]

    wait_until(lambda: len(statuses()) > number or command.has_ended())
    return statuses()[number] if len(statuses()) > number else command.wait(LIMIT_S)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
