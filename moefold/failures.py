"""Failures of a run that are neither wrong input nor bugs: lost ranks, and memory that is used up.

The command line prints them as one sentence and exits with their status. Standard library only.
"""

import errno
import math
import mmap
import re
import resource
from pathlib import Path
from typing import ClassVar

GIB = 2**30
WORKING_BYTES = 320 * 2**20
"""Address space that a run takes for threads and libraries, besides the memory that is planned."""
COMMAND_BYTES = 150 * 2**20
"""Address space that importing a command takes, with NumPy, of which OpenBLAS would end the
process in words of its own; measured on two cores, and a little more on many."""
IMPORT_BYTES = 700 * 2**20
"""Address space that importing PyTorch for CPUs takes."""
SIZE = re.compile(r"(?:tried to allocate|allocate) (\d+(?:\.\d+)? ?\w+)")
"""The size in the text of an error of PyTorch's or NumPy's allocator."""
NO_MEMORY = re.compile(
    r"failed to map segment|can't allocate memory|not enough memory|out of memory|std::bad_alloc|"
    r"Cannot allocate memory|can't start new thread"
)
"""What libraries say, in a ``RuntimeError`` or ``ImportError``, when memory is used up."""


class Failure(RuntimeError):
    """A failure that its text explains to users; ``status`` is the command's exit status."""

    status: ClassVar[int] = 1


class OutOfMemory(Failure):
    """A process or its device has no memory left; the text says what it held and what to change."""

    status = 2


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, the host's or a device's, is used up."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, OutOfMemory):
        return False
    told = (
        isinstance(error, RuntimeError | ImportError) and NO_MEMORY.search(str(error)) is not None
    )
    return isinstance(error, MemoryError) or told


def require_address_space(size: int, purpose: str) -> None:
    """Check that this process may map ``size`` more bytes, where that is limited (ulimit -v).

    Libraries that cannot start a thread or allocate end the process, some without a word.

    Raises:
        OutOfMemory: if it may not; says what the bytes are for.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError, OverflowError):
        text = f"{purpose} takes {size / GIB:.2f} GiB more; {describe_host_memory()}"
        raise OutOfMemory(f"no memory left: {text}; raise the limit or use less") from None


def describe_shortage(error: BaseException) -> str:
    """Return one line about an allocation that failed: its size, and the memory of this process."""
    found = SIZE.search(str(error))
    what = f"an allocation of {found[1]} failed" if found else "an allocation failed"
    return f"{what}; {describe_host_memory()}"


def describe_host_memory() -> str:
    """Return how much memory this process has, and what limits it."""
    status = _read_fields("/proc/self/status")
    parts = [f"this process has {status['VmRSS'] / GIB:.2f} GiB"] if "VmRSS" in status else []
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        mapped = f", of which {status['VmSize'] / GIB:.2f} are mapped" if "VmSize" in status else ""
        parts.append(f"may map {limit / GIB:.2f} GiB (ulimit -v){mapped}")
    machine = _read_fields("/proc/meminfo")
    if "MemAvailable" in machine:
        free = machine["MemAvailable"] / GIB
        total = machine["MemTotal"] / GIB
        parts.append(f"{free:.2f} of the machine's {total:.2f} GiB are available")
    return ", ".join(parts) or "its memory is unknown"


def host_capacity() -> float:
    """Return the bytes of this machine's memory and swap; infinite where they are unknown."""
    machine = _read_fields("/proc/meminfo")
    return machine["MemTotal"] + machine.get("SwapTotal", 0) if "MemTotal" in machine else math.inf


def _read_fields(path: str) -> dict[str, int]:
    """Return the sizes in bytes in a file of Linux's ``/proc``; empty where there is none."""
    try:
        text = Path(path).read_text()
    except OSError:
        return {}
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}
