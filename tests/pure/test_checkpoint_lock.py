"""One writer per folder: living holders are respected, dead ones explained and replaced."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.checkpoint.errors import LockError
from moefold.checkpoint.lock import HOLDER_FILE, LOCK_FILE, FolderLock

HOLD = """
import sys, time
from moefold.checkpoint.lock import FolderLock
with FolderLock(sys.argv[1], "the other run"):
    print("held", flush=True)
    time.sleep(60)
"""


def holder_process(folder: Path) -> subprocess.Popen[str]:
    """Start a process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def leave_behind(folder: Path) -> None:
    """Leave in a folder what a killed holder leaves."""
    process = holder_process(folder)
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_told_whom_it_meets(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with FolderLock(folder, "run one") as lock:
        lock.check()
        with pytest.raises(LockError, match="in use by 'run one'") as caught:
            FolderLock(folder, "run two").acquire()
        assert f"process {os.getpid()} on " in str(caught.value)
        assert f"since {lock.holder.since}" in str(caught.value)
        lock.check()
    assert not folder.exists()
    with FolderLock(folder, "run two", warn=pytest.fail):
        pass


def test_a_killed_holder_is_replaced_at_once(tmp_path: Path) -> None:
    process = holder_process(tmp_path)
    process.send_signal(signal.SIGSTOP)  # silent, but it may go on: not ours to take
    with pytest.raises(LockError, match="the other run"):
        FolderLock(tmp_path, "me").acquire()
    process.kill()
    told: list[str] = []
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie until waited for
    with FolderLock(tmp_path, "me", warn=told.append):
        assert len(told) == 1
        assert f"process {process.pid} on " in told[0] and "no longer runs. Taking over" in told[0]
    process.communicate()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [LOCK_FILE, HOLDER_FILE])
def test_a_holder_whose_files_are_removed_writes_no_more(tmp_path: Path, name: str) -> None:
    """Whoever removes them lets another run in, and the first one notices."""
    first = FolderLock(tmp_path, "run one")
    first.acquire()
    (tmp_path / name).unlink()
    if name == HOLDER_FILE:
        with pytest.raises(LockError, match="is gone or unreadable"):
            first.check()
        first.release()
        return
    with FolderLock(tmp_path, "run two", warn=lambda text: None) as mine:
        with pytest.raises(LockError, match="'run one' no longer holds this lock; 'run two'"):
            first.check()
        first.release()  # gives back nothing that is another's
        mine.check()


def test_a_lock_that_was_released_does_not_name_its_own_run_as_the_holder(tmp_path: Path) -> None:
    """Its record stays where the folder can no longer be written."""
    lock = FolderLock(tmp_path, "run one")
    lock.acquire()
    text = (tmp_path / HOLDER_FILE).read_text()
    lock.release()
    (tmp_path / HOLDER_FILE).write_text(text)
    with pytest.raises(LockError, match="no longer holds this lock; it was released"):
        lock.check()


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04garbage", b'{"run": "x"}', b"[" * 4000])
def test_an_unreadable_record_is_replaced(tmp_path: Path, content: bytes) -> None:
    """Its writer was killed in the middle, or it is something else."""
    (tmp_path / LOCK_FILE).write_bytes(content)
    (tmp_path / HOLDER_FILE).write_bytes(content)
    with FolderLock(tmp_path, "me", warn=pytest.fail) as lock:
        lock.check()


def test_a_lock_that_is_just_given_back_is_waited_for(tmp_path: Path) -> None:
    script = HOLD.replace("time.sleep(60)", "time.sleep(0.3)")
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with FolderLock(tmp_path, "me", warn=pytest.fail) as lock:
            lock.check()


def test_a_fork_of_the_holder_neither_holds_nor_gives_back(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "me") as lock:
        pid = os.fork()
        if pid == 0:
            lock.release()
            os._exit(0)
        os.waitpid(pid, 0)
        lock.check()
        with pytest.raises(LockError, match="in use by 'me'"):
            FolderLock(tmp_path, "other").acquire()


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        FolderLock(tmp_path / "file", "me").acquire()
    with pytest.raises(LockError, match="cannot be locked"):
        FolderLock("/proc", "me").acquire()


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_has_a_marker_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first one holds; the second is told that it may have to remove the marker by hand.

    Lustre without its option answers ENOSYS, NFS whose lock daemon is off ENOLCK.
    """
    number = getattr(errno, name)

    def missing(fd: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", missing)
    with FolderLock(tmp_path, "run one") as lock:
        lock.check()
        with pytest.raises(LockError, match=r"'run one' .* has no locks: if .* remove .*\.lock"):
            FolderLock(tmp_path, "run two").acquire()
    assert not list(tmp_path.iterdir())


def test_a_folder_made_for_a_lock_goes_with_it_unless_something_is_in_it(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "a" / "b", "me"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]


RACE = """
import sys
from moefold.checkpoint.errors import LockError
from moefold.checkpoint.lock import FolderLock
print("ready", flush=True)
sys.stdin.readline()
try:
    with FolderLock(sys.argv[1], "racer", warn=lambda text: None):
        print("won", flush=True)
        sys.stdin.readline()
except LockError:
    print("lost", flush=True)
"""


def test_of_many_that_find_a_dead_ones_lock_one_wins(tmp_path: Path) -> None:
    leave_behind(tmp_path)
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


CHURN = """
import sys, time
from pathlib import Path
from moefold.checkpoint.errors import LockError
from moefold.checkpoint.lock import FolderLock
end = time.monotonic() + 1.5
taken = 0
while time.monotonic() < end:
    try:
        with FolderLock(sys.argv[1], "churner", warn=lambda text: None) as lock:
            inside = Path(sys.argv[1]) / "inside"
            inside.touch(exist_ok=False)  # fails where two are in
            lock.check()
            inside.unlink()
            taken += 1
    except LockError:
        pass
assert taken
"""


def test_locks_that_come_and_go_never_let_two_in(tmp_path: Path) -> None:
    """Each release removes the file that others may be waiting for."""
    (tmp_path / "kept").touch()
    command = [sys.executable, "-c", CHURN, str(tmp_path)]
    churners = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for churner in churners:
        _, errors = churner.communicate()
        assert churner.returncode == 0, errors
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
