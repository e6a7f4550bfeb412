"""Ranks are started, told of signals, ended when one fails; torchrun and Slurm start them too."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import sample
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint.errors import DamagedError
from moefold.comm import launch as launching
from moefold.comm.agree import FirstRankFailed
from moefold.comm.environment import RankInfo
from moefold.comm.launch import ERROR_WAIT_S, RankError, launch
from moefold.comm.rendezvous import connect, join, serve_in_subprocess
from moefold.comm.store import StoreServer
from moefold.config.dump import dump_yaml
from tests.cpu.runs import raw_run

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "tests.gloo.ranks_from_outside"]


def test_ranks_that_died_in_one_way_are_told_in_one_sentence() -> None:
    workers = object.__new__(launching.Workers)
    ways = ("was killed by SIGKILL", "was killed by SIGTERM", "was killed by SIGKILL")
    workers._ranks = [SimpleNamespace(describe_exit=lambda way=way: way) for way in ways]  # type: ignore[misc]
    told = "ranks 0, 2 were killed by SIGKILL; rank 1 was killed by SIGTERM"
    assert workers._describe_deaths([0, 1, 2]) == told


def answer(info: RankInfo, factor: int) -> tuple[int, int, int]:
    total = torch.tensor([info.rank + 1])
    dist.all_reduce(total)
    return info.rank, factor * int(total), torch.get_num_threads()


def test_rank_zero_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(answer, 3, 10, time_out_s=20) == (0, 60, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launch(answer, 1, 10, time_out_s=20) == (0, 10, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # as a shell leaves it, which OpenMP ignores
    assert launch(answer, 1, 10, time_out_s=20) == (0, 10, 1)


def fail_on_one(info: RankInfo, folder: str) -> None:
    (Path(folder) / str(info.rank)).write_text(str(os.getpid()))
    if info.rank == 1:
        time.sleep(0.2)
        raise LookupError("rank one found nothing")
    dist.barrier()
    time.sleep(60)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


ERRORS = {
    "a text alone": ValueError("why"),
    "more than a text": DamagedError(Path("step-1"), "a.safetensors", "cut short", "layers.0"),
    "the system's": OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl"),
    "the system's, of two files": OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"),
    "a library's": OSError("the hub has no such model"),
    "no UTF-8": UnicodeEncodeError("utf-8", "caf\udce9", 3, 4, "surrogates not allowed"),
}


def fail_on_the_first(info: RankInfo, which: str) -> None:
    if info.rank:
        raise FirstRankFailed("the first rank failed: why")
    time.sleep(2 * ERROR_WAIT_S)  # its word comes last: it closes files before it says it
    raise ERRORS[which]


@pytest.mark.parametrize("which", ERRORS)
def test_an_error_for_people_is_that_of_one_process_whoever_speaks_first(which: str) -> None:
    with pytest.raises((ValueError, OSError)) as caught:
        launch(fail_on_the_first, 2, which, time_out_s=20)
    wanted = ERRORS[which]
    assert str(caught.value) == str(wanted)
    assert which == "no UTF-8" or type(caught.value) is type(wanted)
    assert "rank 0 failed first" in str(caught.value.__cause__)


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A command that trains on two ranks, below a temporary folder of a long name, and says what
    each of its processes imports.
    """
    folder = tmp_path_factory.mktemp("command")
    temporary = folder / ("n" * 100)
    temporary.mkdir()
    run, out = folder / "run.yaml", folder / "out"
    run.write_text(dump_yaml(raw_run(folder, train={"steps": 3})))
    words = [sys.executable, "-m", "moefold", "train", run, "--folder", out, "--nproc", "2"]
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1", "TMPDIR": str(temporary)}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)


def test_ranks_start_below_a_temporary_folder_of_a_long_name(
    by_command: subprocess.CompletedProcess[str],
) -> None:
    """A path of a socket holds 107 bytes."""
    assert by_command.returncode == 0, by_command.stderr[-3000:]


def test_ranks_import_nothing_that_they_could_share(
    by_command: subprocess.CompletedProcess[str],
) -> None:
    """Four would take seconds for it at each start: the launcher imports, and what they fork from.

    And the compiler, another second, is not there for a run that does not recompute.
    """
    times = Counter(re.findall(r"^import time: .*\| +(\S+)$", by_command.stderr, re.MULTILINE))
    ours = {name: count for name, count in times.items() if name.startswith("moefold.")}
    assert len(ours) > 200
    assert not {name for name, count in ours.items() if count > 2}
    assert times["sympy"] == 1 and not times["torch._dynamo"]


def test_the_first_error_is_reported_and_the_others_end(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 failed first.*LookupError: rank one found"):
        launch(fail_on_one, 3, str(tmp_path), time_out_s=20)
    assert time.monotonic() - started < 15
    assert not any(lives(int((tmp_path / str(rank)).read_text())) for rank in range(3))


def leave(info: RankInfo) -> None:
    if info.rank == 1:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_leaves_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit status 7 and no"):
        launch(leave, 2, time_out_s=20)


def wait_for_signal(info: RankInfo, folder: str) -> int:
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: heard.append(number))
    (Path(folder) / f"ready {info.rank}").touch()
    until = time.monotonic() + 20
    while len(heard) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    both = torch.tensor([int(sorted(heard) == sorted([signal.SIGTERM, signal.SIGUSR1]))])
    dist.all_reduce(both)
    return int(both)


def when_ready(folder: Path, ranks: int, *signals: int) -> threading.Thread:
    def send() -> None:
        while len(list(folder.glob("ready *"))) < ranks:
            time.sleep(0.02)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_signals_reach_every_rank(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    sender = when_ready(tmp_path, 2, signal.SIGTERM, signal.SIGUSR1)
    assert launch(wait_for_signal, 2, str(tmp_path), time_out_s=20) == 2
    sender.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    when_ready(tmp_path, 2, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch(wait_for_signal, 2, str(tmp_path), time_out_s=20)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                text = (entry / "stat").read_text().rpartition(")")[2]
                parents[int(entry.name)] = int(text.split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


def environ(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def free_port() -> int:
    """Return a free port of those that the system gives to nobody who asks for any."""
    for port in sample(range(20_000, 32_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("localhost", port))
            return port
    pytest.fail("no port is free")


SRUN = """#!/bin/bash
# Starts tasks as srun does with --kill-on-bad-exit: options first, then the command.
while [[ $1 == --* ]]; do options+="$1 "; shift; done
[[ $options == *--kill-on-bad-exit=1* ]] || exit 99
export SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & tasks+=($!)
done
wait "${tasks[1]}" && wait "${tasks[0]}"
status=$?
kill -9 "${tasks[@]}" 2> /dev/null
exit $status
"""


@pytest.mark.slow
def test_the_slurm_script_starts_ranks_and_rank_zero_may_be_stopped(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "MASTER_PORT": str(free_port())}
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "docs" / "slurm.sh"), *map(str, PROGRAM), str(tmp_path)]
    env = environ(PATH=path, **slurm)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"no end: {(late.stderr or b'').decode()}")
    ranks = re.findall(r"rank \d of 2 has 11", done.stdout)
    assert sorted(ranks) == ["rank 0 of 2 has 11", "rank 1 of 2 has 11"], done.stderr
    assert done.returncode == 1 and "Timed out" in done.stderr
    report = (tmp_path / "rank-00001.txt").read_text()
    assert "rank 0 is absent: it sends no heartbeat" in report


def test_a_port_that_is_taken_is_said_at_once() -> None:
    """Ranks that Slurm started would wait two minutes for a store that nobody can serve."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"at port {port}: .* set MASTER_PORT to a free"):
            join(RankInfo(0, 2, 0, "localhost", port), 4.0)


def test_a_store_whose_words_are_logged_goes_on_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for a hang asks torch for its log, and nobody reads that of the store's process."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    serve_in_subprocess("localhost", port, 5.0)
    store = connect("localhost", port, 5.0)
    for turn in range(1000):
        store.set("beat", str(turn))
    assert store.get("beat") == b"999"


@pytest.mark.matrix
def test_ranks_started_by_torchrun_meet() -> None:
    """As those do, in the tests' own selection, that it starts again (``test_faults_torchrun``)."""
    port = f"--master-port={free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", port, "-m"]
    done = subprocess.run(
        [*command, PROGRAM[-1]], env=environ(), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d of 2 has 11", done.stdout)) == [
        "rank 0 of 2 has 11",
        "rank 1 of 2 has 11",
    ]


def refuse(info: RankInfo) -> None:
    raise ValueError("refused")


def test_an_error_keeps_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What raised holds the launcher's frames; a store's thread and port do not wait for those."""
    ports = []

    def noted(secret: bytes, host: str) -> StoreServer:
        store = StoreServer(secret, host)
        ports.append(store.port)
        return store

    monkeypatch.setattr(launching, "StoreServer", noted)
    with pytest.raises(ValueError, match="refused") as caught:
        launch(refuse, 1, time_out_s=20)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", ports[0]), 5).close()
    assert caught.tb is not None
