"""Which checkpoint counts, which go, and what a storage that refuses leaves behind."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moefold.checkpoint import manifest
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.disk import Disk
from moefold.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    LockError,
    SaveError,
    VersionError,
)
from moefold.checkpoint.folder import find_newest, list_candidates, resolve_checkpoint
from moefold.checkpoint.lock import LOCK_FILE as LOCK
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.save import save
from moefold.checkpoint.verify import verify
from tests.cpu.checkpoint_tools import Refusing, load, quick_folder, run_child, same, state

SHARD = "shard-00000.safetensors"


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Return a folder where syncing takes no time."""
    with quick_folder(tmp_path) as folder:
        yield folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def steps(folder: Path) -> list[int]:
    return sorted(c.step for c in list_candidates(folder))


def fill(folder: Path, *numbers: int, policy: CheckpointPolicy | None = None) -> list[Path]:
    """Save a state of each number under its number as the step."""
    policy = policy or CheckpointPolicy(keep=99)
    return [save(folder, n, state(n), {"step": n}, policy) for n in numbers]


def break_shard(path: Path) -> None:
    os.truncate(path / SHARD, 100)


def test_nothing_yet(tmp_path: Path) -> None:
    assert find_newest(tmp_path) is None
    assert find_newest(tmp_path / "nowhere") is None
    (tmp_path / "step-00000009.tmp-00ff").mkdir()
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-00000009").touch()
    assert find_newest(tmp_path, warn=pytest.fail) is None


def test_order_is_the_steps_and_no_clocks(tmp_path: Path) -> None:
    """Files' times say the opposite, and the pointer says something else again."""
    paths = fill(tmp_path, 300, 20, 100_000_000)
    for age, path in enumerate(paths):
        for file in [path, *path.iterdir()]:
            os.utime(file, (10**9 * age, 10**9 * (3 - age)))
    (tmp_path / "latest").write_text("step-00000020\n")
    assert find_newest(tmp_path, warn=pytest.fail) == paths[2]
    assert find_newest(tmp_path, before=100_000_000) == paths[0]
    assert find_newest(tmp_path, before=300) == paths[1]
    assert find_newest(tmp_path, before=20) is None


@pytest.mark.parametrize("how", ["truncated", "missing", "manifest", "no manifest", "other step"])
def test_a_damaged_one_is_passed_over_and_told(tmp_path: Path, how: str) -> None:
    first, second = fill(tmp_path, 1, 2)
    if how == "truncated":
        break_shard(second)
    elif how == "missing":
        (second / SHARD).unlink()
    elif how == "manifest":
        (second / manifest.FILE).write_text((second / manifest.FILE).read_text()[:-20])
    elif how == "no manifest":
        (second / manifest.FILE).unlink()
    else:
        shutil.rmtree(second)
        shutil.copytree(first, second)
    told: list[str] = []
    assert find_newest(tmp_path, warn=told.append) == first
    assert len(told) == 1
    assert str(second) in told[0] and "Falling back to step-00000001" in told[0]


def test_the_pointer_counts_for_nothing(tmp_path: Path) -> None:
    """Killed between publishing and the pointer, or with the pointer at a folder that is gone."""
    first, second = fill(tmp_path, 1, 2)
    (tmp_path / "latest").write_text(f"{first.name}\n")
    assert find_newest(tmp_path, warn=pytest.fail) == second
    (tmp_path / "latest").write_text("../../etc\n")
    assert find_newest(tmp_path, warn=pytest.fail) == second
    (tmp_path / "latest").unlink()
    assert find_newest(tmp_path, warn=pytest.fail) == second


def test_when_none_is_whole_the_run_does_not_silently_start_anew(tmp_path: Path) -> None:
    for path in fill(tmp_path, 1, 2):
        break_shard(path)
    with pytest.raises(CheckpointError, match="no checkpoint is usable") as caught:
        find_newest(tmp_path)
    assert "step-00000001" in str(caught.value) and "step-00000002" in str(caught.value)


def test_a_checkpoint_without_its_manifest_is_said_to_be_damaged(tmp_path: Path) -> None:
    """Who names ``step-…`` is not told to name ``step-…``."""
    (path,) = fill(tmp_path, 1)
    assert resolve_checkpoint(path) == resolve_checkpoint(tmp_path) == path
    (path / manifest.FILE).unlink()
    with pytest.raises(DamagedError, match=r"manifest\.json: is missing"):
        resolve_checkpoint(path)


def test_a_newer_version_stops_instead_of_falling_back(tmp_path: Path) -> None:
    _, second = fill(tmp_path, 1, 2)
    text = (second / manifest.FILE).read_text().replace('"version": 1', '"version": 2')
    (second / manifest.FILE).write_bytes(manifest.with_digest(text.encode()))
    with pytest.raises(VersionError, match="moefold-checkpoint version 2") as caught:
        find_newest(tmp_path)
    assert "reads moefold-checkpoint version 1" in str(caught.value)
    save(tmp_path, 3, state(3), {}, CheckpointPolicy(keep=1), warn=lambda text: None)
    assert steps(tmp_path) == [2, 3], "what cannot be read is not ours to remove"


def test_retention_keeps_the_newest_and_every_kth(tmp_path: Path) -> None:
    fill(tmp_path, *range(1, 13), policy=CheckpointPolicy(keep=3, keep_every=5))
    assert steps(tmp_path) == [5, 10, 11, 12]
    fill(tmp_path, 13, policy=CheckpointPolicy(keep=1))
    assert steps(tmp_path) == [13]
    assert names(tmp_path) == ["latest", "step-00000013"]


def test_retention_counts_whole_ones_only(tmp_path: Path) -> None:
    """Damaged newer ones do not push the last good ones out."""
    paths = fill(tmp_path, 1, 2, 3, 4)
    break_shard(paths[2])
    break_shard(paths[3])
    policy = CheckpointPolicy(keep=2)
    fill(tmp_path, 5, policy=policy)
    assert steps(tmp_path) == [2, 3, 4, 5]  # 3 and 4 stay to be looked at while 2 does
    fill(tmp_path, 6, policy=policy)
    assert steps(tmp_path) == [5, 6]


def test_what_was_just_saved_stays_whatever_its_step(tmp_path: Path) -> None:
    fill(tmp_path, 10, 11, 12)
    fill(tmp_path, 5, policy=CheckpointPolicy(keep=2))
    assert steps(tmp_path) == [5, 11, 12]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    path = save(tmp_path, 2, state(7), {"again": True}, CheckpointPolicy(keep=5))
    assert same(load(path)[0], state(7)) and load(path)[1] == {"again": True}
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]


def test_a_replacement_cut_short_is_undone_or_finished(tmp_path: Path) -> None:
    one, two = fill(tmp_path, 1, 2)
    aside = two.with_name(f"{two.name}.old-0123abcd")
    two.rename(aside)
    assert find_newest(tmp_path, warn=pytest.fail) == aside
    fill(tmp_path, 3)
    assert steps(tmp_path) == [1, 2, 3] and two.exists() and not aside.exists()
    shutil.copytree(two, aside)
    assert find_newest(tmp_path, before=3, warn=pytest.fail) == two
    fill(tmp_path, 4)
    assert names(tmp_path) == ["latest", one.name, two.name, "step-00000003", "step-00000004"]


def test_leftovers_are_removed_and_others_files_are_not(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    for name in ("step-00000001.tmp-12ab", "step-00000007.gone-9f", "step-00000003.tmp-00"):
        (tmp_path / name).mkdir()
        (tmp_path / name / SHARD).touch()
    (tmp_path / "latest.tmp-0a").touch()
    for name in ("notes.tmp-1", "step-7", "step-00000001.tmp", "latest.txt"):
        (tmp_path / name).touch()
    fill(tmp_path, 2)
    others = ["latest.txt", "notes.tmp-1", "step-00000001.tmp", "step-7"]
    assert names(tmp_path) == sorted(["latest", "step-00000001", "step-00000002", *others])


OPERATIONS = ["make_folder", "create", "write", "sync", "sync_folder", "rename"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_storage_that_fails_once_is_tried_again(
    tmp_path: Path, operation: str, number: int
) -> None:
    """Each operation fails once, and the save succeeds, or is refused as a whole."""
    fill(tmp_path, 1)
    told: list[str] = []
    disk = Refusing({operation: (1, number)})
    if operation == "rename":  # it may have happened, so it is not simply done again
        with pytest.raises(SaveError, match="could not be published"):
            save(tmp_path, 2, state(2), {}, disk=disk, warn=told.append)
        assert find_newest(tmp_path, warn=pytest.fail) == tmp_path / "step-00000001"
    else:
        path = save(tmp_path, 2, state(2), {}, disk=disk, warn=told.append)
        assert same(load(path)[0], state(2)) and verify(path) == []
        assert len(told) == 1 and "attempt 1 of 3" in told[0] and os.strerror(number) in told[0]
    assert not any(c.suffix for c in list_candidates(tmp_path))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("after", [0, 2])
def test_storage_that_stays_full(tmp_path: Path, operation: str, after: int) -> None:
    """The error tells path, needed and free; nothing partial is left; older ones stand."""
    fill(tmp_path, 1, 2)
    disk = Refusing({operation: (99, errno.ENOSPC)}, after)
    told: list[str] = []
    try:
        save(tmp_path, 3, state(3), {}, CheckpointPolicy(keep=1), disk=disk, warn=told.append)
    except SaveError as error:
        assert error.path == tmp_path / "step-00000003" and str(error.path) in str(error)
        if operation not in ("rename", "sync_folder"):
            assert error.needed is not None and error.needed > 200
            assert f"needs {error.needed} bytes and {error.free} are free" in str(error)
            assert "quota" in str(error)
            assert steps(tmp_path) == [1, 2], "nothing is removed to make room"
    else:
        # only what comes after the publication was refused, which is told
        assert after and operation in ("create", "make_folder", "sync", "rename", "sync_folder")
    assert not any(c.suffix == "tmp" for c in list_candidates(tmp_path))
    found = find_newest(tmp_path, warn=pytest.fail)
    assert found is not None and verify(found) == []
    save(tmp_path, 4, state(4), {}, CheckpointPolicy(keep=1))
    assert names(tmp_path) == ["latest", "step-00000004"]


def test_errors_that_do_not_pass_are_not_tried_again(tmp_path: Path) -> None:
    disk = Refusing({"create": (9, errno.EROFS)})
    with pytest.raises(SaveError, match="Read-only file system"):
        save(tmp_path, 1, state(1), {}, disk=disk, warn=pytest.fail)
    assert names(tmp_path) == []


def test_no_write_starts_where_room_is_short(tmp_path: Path) -> None:
    class Small(Refusing):
        def free_bytes(self, path: Path) -> int:
            return 1000

    disk = Small({})
    told: list[str] = []
    with pytest.raises(SaveError) as caught:
        save(tmp_path, 1, {"x": torch.zeros(1000)}, {}, disk=disk, warn=told.append)
    assert caught.value.free == 1000 and caught.value.needed is not None
    assert 4000 < caught.value.needed < 12_000
    assert not {"create", "write"} & {operation for operation, _ in disk.calls}
    assert names(tmp_path) == []
    assert len(told) == 2, "room may be made meanwhile, so it waits and looks again"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="cannot be created"):
        save(tmp_path / "file" / "folder", 1, state(1), {})


def test_failed_tidying_does_not_fail_the_save(tmp_path: Path) -> None:
    """The checkpoint counts once it is published; the rest is told and done by the next save."""
    fill(tmp_path, 1, 2)
    told: list[str] = []
    disk = Refusing({"remove_folder": (9, errno.EBUSY)})
    path = save(tmp_path, 3, state(3), {}, CheckpointPolicy(keep=1), disk=disk, warn=told.append)
    assert find_newest(tmp_path, warn=pytest.fail) == path
    assert len(told) == 2 and all("could not be removed" in text for text in told)
    fill(tmp_path, 4, policy=CheckpointPolicy(keep=1))
    assert names(tmp_path) == ["latest", "step-00000004"]


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(Refusing):
        def sync(self, fd: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, state(1), {}, disk=Interrupted({}))
    assert names(tmp_path) == []


def mount_small(folder: Path) -> bool:
    """Mount a file system of 1 MiB, seen by this process only; return whether that worked."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    try:
        if libc.unshare(0x10000000 | 0x00020000):  # CLONE_NEWUSER | CLONE_NEWNS
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except (OSError, AttributeError):
        return False
    return libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=1m") == 0


def fill_small(folder: Path) -> None:
    """Save on a file system of 1 MiB until it is full, and check what is left each time."""
    first = save(folder, 1, {"x": torch.ones(100_000)}, {})
    for disk in (Refusing({}), Patient()):  # the first does not see it coming
        with pytest.raises(SaveError) as caught:
            save(
                folder,
                2,
                {"x": torch.ones(200_000)},
                {},
                CheckpointPolicy(keep=1),
                disk=disk,
                warn=str,
            )
        assert caught.value.needed is not None and caught.value.needed > 800_000
        assert str(folder) in str(caught.value)
        assert names(folder) == ["latest", first.name]
        assert find_newest(folder, warn=pytest.fail) == first and verify(first) == []
    assert caught.value.free is not None and 0 < caught.value.free < 700_000
    save(folder, 2, {"x": torch.ones(100_000)}, {}, CheckpointPolicy(keep=1))
    assert names(folder) == ["latest", "step-00000002"]


class Patient(Disk):
    """Plain storage with no pause between attempts."""

    def wait(self, seconds: float) -> None:
        """Return at once."""


def test_a_really_full_disk(tmp_path: Path) -> None:
    """A save on a file system that is full, mounted where only a fork sees it."""
    cannot = 77

    def work() -> None:
        if not mount_small(tmp_path):
            os._exit(cannot)
        fill_small(tmp_path)

    status = run_child(work)
    if status == cannot:
        pytest.skip("nothing can be mounted here; refused operations are tested without it")
    assert status == 0
    assert names(tmp_path) == [], "the mount was the fork's own"


def test_a_damaged_newest_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    """Fall back, train on, save the same step: the folder is whole again."""
    _, second = fill(tmp_path, 1, 2)
    break_shard(second)
    fill(tmp_path, 2)
    assert find_newest(tmp_path, warn=pytest.fail) == second
    assert same(load(second)[0], state(2))


def test_who_has_lost_the_folder_sweeps_nothing_away(tmp_path: Path) -> None:
    """What looks like left behind is being written by the run that has taken over."""
    with FolderLock(tmp_path, "run one") as first:
        (tmp_path / LOCK).unlink()
        with FolderLock(tmp_path, "run two", warn=lambda text: None):
            (tmp_path / "step-00000007.tmp-00ff").mkdir()
            with pytest.raises(LockError, match="'run one' no longer holds this lock"):
                save(tmp_path, 1, state(1), {}, lock=first)
            assert steps(tmp_path) == [7]


def test_saving_releases_the_lock(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    assert not (tmp_path / LOCK).exists()
    with pytest.raises(DamagedError):
        load(tmp_path)
