"""One writer per folder: living holders are respected, dead ones explained and replaced."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moefold.checkpoint.errors import LockError
from moefold.checkpoint.lock import FILE, FolderLock

HOLD = """
import sys, time
from moefold.checkpoint.lock import FolderLock
with FolderLock(sys.argv[1], "the other run", beat_s=0.05):
    print("held", flush=True)
    time.sleep(60)
"""


def holder_process(folder: Path) -> subprocess.Popen[str]:
    """Start a process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def rewrite(folder: Path, **fields: object) -> None:
    """Make a lock look as if it were written elsewhere."""
    found = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(found | fields))


def test_a_second_run_is_refused_and_told_whom_it_meets(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "new" / "folder", "run one") as lock:
        assert lock.is_mine()
        with pytest.raises(LockError, match="in use by 'run one'") as caught:
            FolderLock(tmp_path / "new" / "folder", "run two").acquire()
        assert f"process {os.getpid()} on " in str(caught.value)
        lock.check()
    assert not (tmp_path / "new" / "folder" / FILE).exists()
    with FolderLock(tmp_path / "new" / "folder", "run two", say=pytest.fail):
        pass


def test_a_killed_holder_is_replaced_at_once(tmp_path: Path) -> None:
    process = holder_process(tmp_path)
    with pytest.raises(LockError, match="that process runs on this machine"):
        FolderLock(tmp_path, "me").acquire()
    process.send_signal(signal.SIGSTOP)  # silent, but it may go on: not ours to take
    time.sleep(0.2)
    with pytest.raises(LockError, match="the other run"):
        FolderLock(tmp_path, "me", patience_s=0.1).acquire()
    process.kill()
    told: list[str] = []
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie until waited for
    with FolderLock(tmp_path, "me", say=told.append, patience_s=1000):
        assert len(told) == 1
        assert f"process {process.pid} on " in told[0] and "no longer runs. Taking over" in told[0]
    process.communicate()


def test_a_reused_pid_is_no_living_holder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "run one")
    lock.acquire()
    rewrite(tmp_path, born="1", token="another")
    told: list[str] = []
    if lock.me.born == "alive":
        pytest.skip("this system does not tell when a process started")
    with FolderLock(tmp_path, "run two", say=told.append, patience_s=1000):
        assert "no longer runs" in told[0]
    lock.release()


def test_a_beating_heart_elsewhere_is_respected(tmp_path: Path) -> None:
    """Nothing is known of another machine's processes; the counter that rises is."""
    with FolderLock(tmp_path, "run one", beat_s=0.05) as lock:
        away = lock.me.model_copy(update={"place": "elsewhere"})
        lock.me = away
        time.sleep(0.2)
        with pytest.raises(LockError, match="its heartbeat goes on"):
            FolderLock(tmp_path, "run two", patience_s=5).acquire()


def test_a_silent_holder_elsewhere_is_replaced_after_a_while(tmp_path: Path) -> None:
    lost = FolderLock(tmp_path, "run one", beat_s=1000)
    lost.acquire()
    rewrite(tmp_path, place="elsewhere")
    told: list[str] = []
    started = time.monotonic()
    with FolderLock(tmp_path, "run two", patience_s=0.3, say=told.append) as mine:
        assert time.monotonic() - started >= 0.3
        assert "'run one'" in told[0] and "stood still for 0.3 s. Taking over" in told[0]
        with pytest.raises(LockError, match="'run one' no longer holds this folder, now 'run two'"):
            lost.check()
        lost.release()  # gives back nothing that is another's
        assert mine.is_mine()


def test_a_holder_that_wakes_up_does_not_write_over_its_successor(tmp_path: Path) -> None:
    lost = FolderLock(tmp_path, "run one", beat_s=0.05)
    lost.acquire()
    (tmp_path / FILE).unlink()
    with FolderLock(tmp_path, "run two") as mine:
        time.sleep(0.3)  # several heartbeats of the first
        assert mine.is_mine()
        lost.release()
        assert mine.is_mine()


def test_a_removed_file_is_noticed(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "run one") as lock:
        (tmp_path / FILE).unlink()
        with pytest.raises(LockError, match="the file is gone"):
            lock.check()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\x80\x04garbage", b'{"beat_s": "x"}', b"[" * 4000]
)
def test_an_unreadable_lock_is_waited_for_and_replaced(tmp_path: Path, content: bytes) -> None:
    """Its writer was killed in the middle, or it is something else."""
    (tmp_path / FILE).write_bytes(content)
    told: list[str] = []
    with FolderLock(tmp_path, "me", patience_s=0.1, say=told.append) as lock:
        lock.check()
    assert "unreadable for 0.1 s. Taking over" in told[0]


def test_a_lock_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / FILE).touch()
    script = (
        "import sys, time; from pathlib import Path; time.sleep(0.3);"
        "Path(sys.argv[1]).write_text(sys.argv[2])"
    )
    with FolderLock(tmp_path / "other", "run one") as lock:
        text = lock.me.model_dump_json()
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / FILE), text])
        with pytest.raises(LockError, match="'run one'"):
            FolderLock(tmp_path, "me", patience_s=30).acquire()
        writer.wait()


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        FolderLock(tmp_path / "file", "me").acquire()
    with pytest.raises(LockError, match="cannot be locked"):
        FolderLock("/proc", "me").acquire()


def test_a_folder_made_for_a_lock_goes_with_it_unless_something_is_in_it(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "a" / "b", "me"):
        pass
    assert not list(tmp_path.iterdir())
    with FolderLock(tmp_path / "a" / "b", "me"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]


def test_one_that_judges_too_late_leaves_the_winner_alone(tmp_path: Path) -> None:
    """Two find a dead holder's lock; the second acts on what it saw before the first took over."""
    dead = FolderLock(tmp_path, "dead").me.model_copy(update={"pid": 2**22 + 1, "born": "1"})
    (tmp_path / FILE).write_text(dead.model_dump_json())
    winner = FolderLock(tmp_path, "winner", say=lambda text: None)

    class Late(FolderLock):
        def _judge(self) -> tuple[bytes | None, str]:
            judged = super()._judge()
            winner.acquire()
            return judged

    with pytest.raises(LockError, match="in use by 'winner'"):
        Late(tmp_path, "late", say=pytest.fail).acquire()
    winner.check()
    winner.release()


RACE = """
import sys, time
from pathlib import Path
from moefold.checkpoint.errors import LockError
from moefold.checkpoint.lock import FolderLock
print("ready", flush=True)
sys.stdin.readline()
try:
    with FolderLock(sys.argv[1], "racer", say=lambda text: None):
        print("won", flush=True)
        sys.stdin.readline()
except LockError:
    print("lost", flush=True)
"""


def test_of_many_that_find_a_dead_ones_lock_one_wins(tmp_path: Path) -> None:
    dead = FolderLock(tmp_path, "dead").me.model_copy(update={"pid": 2**22 + 1, "born": "1"})
    (tmp_path / FILE).write_text(dead.model_dump_json())
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    pipe = subprocess.PIPE
    racers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        print(flush=True, file=racer.stdin)
    answers = [racer.stdout.readline() for racer in racers if racer.stdout]
    for racer in racers:
        racer.communicate()
    assert sorted(answers) == ["lost\n"] * 3 + ["won\n"]
