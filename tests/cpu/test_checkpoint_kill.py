"""Killed at any moment of a save, by a real SIGKILL, a folder keeps a whole newest checkpoint."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.folder import find_newest
from moefold.checkpoint.save import save
from moefold.checkpoint.verify import verify
from tests.cpu.checkpoint_tools import Calls, Deadly, load, quick_folder, run_child, same, state

ONE = CheckpointPolicy(keep=1, shard_bytes=1024)
MOST = 200
"""More operations than any save here takes."""


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """Return a folder where syncing takes no time."""
    with quick_folder(tmp_path) as folder:
        yield folder


def big_state(number: int) -> dict[str, torch.Tensor]:
    """Return a state of two shards."""
    return state(number) | {"large": torch.full((300,), float(number))}


def nothing(text: str) -> None:
    """Take a line and drop it."""


def check_folder(folder: Path, allowed: set[int], content: dict[int, list[int]]) -> int:
    """Check that the newest checkpoint is whole, of an allowed step, and return that step.

    ``content`` maps a step to the states that it may hold.
    """
    found = find_newest(folder, warn=nothing)
    step = 0 if found is None else load(found)[1]["step"]
    assert step in allowed
    if found is not None:
        assert verify(found) == []
        tensors = load(found)[0]
        assert any(same(tensors, big_state(number)) for number in content[step])
    return step


def check_next_save(folder: Path, step: int) -> None:
    """Check that the next process takes the folder over, saves, and leaves nothing lying about."""
    told: list[str] = []
    path = save(folder, step, big_state(step), {"step": step}, ONE, warn=told.append)
    assert find_newest(folder, warn=pytest.fail) == path
    assert sorted(p.name for p in folder.iterdir()) == ["latest", path.name]
    assert (folder / "latest").read_text() == f"{path.name}\n"
    assert all("Taking over" in text for text in told)


@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("case", ["first", "next", "again"])
def test_killed_at_every_write_boundary(quick: Path, case: str, power_loss: bool) -> None:
    """Before, in the middle of, and between all operations that change the disk.

    ``first`` saves into an empty folder, ``next`` a later step with the older one to be removed,
    ``again`` another state of a step that there is already.
    """
    before, after = {"first": (0, 7), "next": (5, 7), "again": (7, 7)}[case]
    content = {5: [5], 7: [70] if case == "again" else [7]}
    seen = []
    for at in range(MOST):
        folder = quick / str(at)
        if before:
            save(folder, before, big_state(content[before][0]), {"step": before}, ONE)

        def work(folder: Path = folder, at: int = at) -> None:
            disk = Deadly(at, power_loss)
            save(folder, after, big_state(7), {"step": after}, ONE, disk=disk, warn=nothing)

        status = run_child(work)
        allowed = content | {7: [*content[7], 7]}
        seen.append(check_folder(folder, {before, after}, allowed))
        check_next_save(folder, 9)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0, "the loop reached the end of a save"
    assert len(seen) > 15
    assert seen == sorted(seen), "once the new one counts it goes on counting"
    assert seen[-1] == after


def test_order_on_the_medium(tmp_path: Path) -> None:
    """Data before manifest, manifest before folder, folder before name, name before pointer."""
    save(tmp_path, 1, big_state(1), {}, ONE)
    disk = Calls()
    save(tmp_path, 2, big_state(2), {}, ONE, disk=disk)
    calls = [(op, name.split(".tmp-")[0].split(".gone-")[0]) for op, name in disk.calls]
    kept = [call for call in calls if call[0] != "write"]
    name = "step-00000002"
    shards = [
        row
        for i in range(2)
        for row in (
            ("create", f"shard-0000{i}.safetensors"),
            ("sync", f"shard-0000{i}.safetensors"),
        )
    ]
    assert kept == [
        ("make_folder", name),
        *shards,
        ("create", "manifest.json"),
        ("sync", "manifest.json"),
        ("sync_folder", name),
        ("rename", name),
        ("sync_folder", tmp_path.name),
        ("create", "latest"),
        ("sync", "latest"),
        ("rename", "latest"),
        ("sync_folder", tmp_path.name),
        ("rename", "step-00000001"),
        ("remove_folder", "step-00000001"),
    ]


SAVER = """
import os, sys
import torch
from pathlib import Path
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.lock import FolderLock
from moefold.checkpoint.folder import find_newest
from tests.cpu.checkpoint_tools import load
from moefold.checkpoint.save import save

folder = Path(sys.argv[1])
policy = CheckpointPolicy(keep=2, shard_bytes=300_000)

def run():
    with FolderLock(folder, "saver", warn=lambda text: None) as lock:
        found = find_newest(folder)
        step = load(found)[1]["step"] if found else 0
        while True:
            step += 1
            tensors = {f"t{i}": torch.full((20000 + i,), step) for i in range(6)}
            save(folder, step, tensors, {"step": step}, policy, lock=lock)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        run()
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


def test_killed_at_random_moments(quick: Path) -> None:
    """A process that does nothing but save is killed again and again, and always goes on."""
    command = [sys.executable, "-c", SAVER, str(quick)]
    steps = [0]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        for attempt in range(100):
            if attempt >= 8 and steps[-1] > 8:
                break
            print(flush=True, file=parent.stdin)
            pid = int(parent.stdout.readline())
            time.sleep(random.uniform(0.02, 0.25))
            os.kill(pid, signal.SIGKILL)
            assert parent.stdout.readline() == "ended\n"
            found = find_newest(quick, warn=pytest.fail)
            if found is not None:
                assert verify(found) == []
                tensors, meta = load(found)
                steps.append(meta["step"])
                assert all((tensor == meta["step"]).all() for tensor in tensors.values())
        parent.stdin.close()
    assert steps == sorted(steps) and steps[-1] > 8
