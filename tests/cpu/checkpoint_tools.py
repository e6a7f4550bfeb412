"""Tools of the checkpoint tests: forks, storage that dies or refuses, checkpoints in slices."""

import errno
import os
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.checkpoint import manifest
from moefold.checkpoint.disk import DISK, Disk, Warn, write_file
from moefold.checkpoint.load import Reader
from moefold.checkpoint.manifest import CHUNK_BYTES, Manifest, TensorMeta
from moefold.checkpoint.tensors import DTYPE_NAMES, TensorSlice, write_shard


@contextmanager
def quick_folder(other: Path) -> Iterator[Path]:
    """Give a folder in memory where there is room for one, else ``other``: much is synced here."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 2**30:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            yield Path(folder)
    else:
        yield other


def run_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a fork and return its exit status, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(start_child(work), 0)[1])


def start_child(work: Callable[[], None]) -> int:
    """Start ``work`` in a fork and return its process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child starts no thread of torch
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    return pid


class Calls(Disk):
    """Storage that notes each operation that changes it, as ``(operation, file name)``."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.names: dict[int, Path] = {}
        self.read_bytes = 0

    def note(self, operation: str, path: Path) -> None:
        self.calls.append((operation, path.name))

    def make_folder(self, path: Path) -> None:
        self.note("make_folder", path)
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self.note("create", path)
        fd = super().create(path)
        self.names[fd] = path
        return fd

    def write(self, fd: int, data: memoryview) -> None:
        self.note("write", self.names[fd])
        super().write(fd, data)

    def sync(self, fd: int) -> None:
        self.note("sync", self.names[fd])
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self.note("sync_folder", path)
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self.note("rename", target)
        super().rename(source, target)

    def remove_file(self, path: Path) -> None:
        self.note("remove_file", path)
        super().remove_file(path)

    def remove_folder(self, path: Path) -> None:
        self.note("remove_folder", path)
        super().remove_folder(path)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        count = super().read(fd, into, offset)
        self.read_bytes += count
        return count

    def wait(self, seconds: float) -> None:
        """No test waits for storage to recover."""


class Deadly(Calls):
    """Storage on which the process dies, by SIGKILL, before the operation of number ``at``.

    A write is half done at that moment, and so is the removal of a folder. With ``power_loss``,
    files that were not synced lose the second half of their content as well.
    """

    def __init__(self, at: int, power_loss: bool = False) -> None:
        super().__init__()
        self.at = at
        self.power_loss = power_loss
        self.unsynced: set[Path] = set()

    def note(self, operation: str, path: Path) -> None:
        super().note(operation, path)
        if operation == "create":
            self.unsynced.add(path)
        if len(self.calls) - 1 < self.at:
            if operation == "sync":
                self.unsynced.discard(path)
            return
        if operation == "remove_folder":
            for inner in sorted(path.iterdir())[::2]:
                inner.unlink()
        if operation == "write" and not self.power_loss:
            return  # ``write`` does its half first
        self.die()

    def write(self, fd: int, data: memoryview) -> None:
        if len(self.calls) == self.at and not self.power_loss:
            Disk.write(self, fd, data[: len(data) // 2])
            self.die()
        super().write(fd, data)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        moved = {path: target / path.relative_to(source) for path in self.unsynced
                 if path.is_relative_to(source)}  # fmt: skip
        self.unsynced = {moved.get(path, path) for path in self.unsynced}

    def die(self) -> None:
        if self.power_loss:
            for path in self.unsynced:
                if path.exists():
                    os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


class Refusing(Calls):
    """Storage whose operations named in ``errors`` fail, each so often and with that error."""

    def __init__(self, errors: dict[str, tuple[int, int]], after: int = 0) -> None:
        super().__init__()
        self.left = {operation: times for operation, (times, _) in errors.items()}
        self.numbers = {operation: number for operation, (_, number) in errors.items()}
        self.after = after

    def refuse(self, operation: str) -> None:
        if self.left.get(operation, 0) > 0:
            if self.after:
                self.after -= 1
                return
            self.left[operation] -= 1
            number = self.numbers[operation]
            raise OSError(number, os.strerror(number))

    def note(self, operation: str, path: Path) -> None:
        super().note(operation, path)
        self.refuse(operation)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self.refuse("read")
        return super().read(fd, into, offset)

    def free_bytes(self, path: Path) -> int:
        """Claim plenty, as a quota does that the file system's figures do not show."""
        return 1 << 60


FULL = errno.ENOSPC


def write_sliced(
    path: Path,
    step: int,
    parts: dict[str, tuple[Tensor, list[tuple[slice, ...]]]],
    meta: dict[str, Any],
    chunk_bytes: int = CHUNK_BYTES,
) -> Path:
    """Write a checkpoint whose tensors lie in several slices, slice i of each in shard i."""
    path.mkdir(parents=True)
    count = max(len(boxes) for _, boxes in parts.values())
    shards, slices = [], {name: [] for name in parts}
    for number in range(count):
        held = []
        for name, (tensor, boxes) in parts.items():
            if number < len(boxes):
                box = boxes[number]
                at = tuple(s.indices(n)[0] for s, n in zip(box, tensor.shape, strict=True))
                held.append((name, TensorSlice(tensor[box], tuple(tensor.shape), at)))
        file = path / f"shard-{number:05d}.safetensors"
        shard, written = write_shard(Disk(), file, held, chunk_bytes, number)
        shards.append(shard.model_copy(update={"rank": number}))
        for (name, _), part in zip(held, written, strict=True):
            slices[name].append(part)
    tensors = {
        name: TensorMeta(
            dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), slices=tuple(slices[name])
        )
        for name, (tensor, _) in parts.items()
    }
    record = Manifest(
        writer="the tests",
        step=step,
        chunk_bytes=chunk_bytes,
        shards=tuple(shards),
        tensors=tensors,
        meta=meta,
    )
    write_file(Disk(), path / manifest.FILE, manifest.dump(record))
    return path


def load(
    path: Path,
    names: Iterable[str] | None = None,
    *,
    warn: Warn = pytest.fail,
    disk: Disk = DISK,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors of a checkpoint, all without ``names``, and its meta."""
    with Reader(path, warn=warn, disk=disk) as reader:
        wanted = reader.manifest.tensors if names is None else names
        return {name: reader.read(name) for name in wanted}, reader.manifest.meta


def bits(tensor: Tensor) -> bytes:
    """Return a tensor's bytes, in which NaN equals itself and -0.0 differs from 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two states have the same names, types, shapes and bits."""
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
        for a, b in ((one[name], other[name]) for name in one)
    )


def state(number: int) -> dict[str, Tensor]:
    """Return a small state, different for each number."""
    g = torch.Generator().manual_seed(number)
    return {
        "layers.0.w": torch.randn(6, 5, generator=g),
        "layers.0.bias": torch.randn(7, generator=g).bfloat16(),
        "steps": torch.tensor(number),
        "counts": torch.arange(number, number + 3),
    }
