"""What measurements on a device share: where they run, how calls are timed, what is written down.

Without a device everything runs on the CPU in a smoke size: it shows that a script runs to its end,
and its figures go to a temporary folder. Own kernels run there too with ``TRITON_INTERPRET=1``.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import moefold  # noqa: F401  (before torch: it says how threads wait)

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton  # noqa: F401  (before own kernels, which then run on a CPU, slowly)

# isort: split
import torch
from torch import Tensor

from moefold.planner.hardware import find_device
from moefold.training.machine import device_name

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
SMOKE = Path(tempfile.gettempdir()) / f"moefold_gpu_smoke_{os.getuid()}"
LIMIT_S = 540.0
"""A script begins nothing after so many seconds: what is left out is named."""
FLUSH_BYTES = 256 << 20
"""Written between calls, more than the cache of any device holds."""
ROUNDS = 20
SMOKE_ROUNDS = 1


class Timed(NamedTuple):
    """Seconds of a call over all rounds."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""


class Bench:
    """One script's measurements: where, until when, and the file that holds them.

    Args:
        name: of the script and of what it measures.
        folder: where files go, unless it is the usual place.
        smoke: whether a device runs small sizes too.
        compiled: whether forms of torch.compile are measured too.

    Attributes:
        device: CUDA where there is a device, else the CPU.
        smoke: whether sizes are small and figures mean nothing.
        folder: where files go.
        rows: what was measured so far, each by name.
    """

    def __init__(
        self, name: str, folder: Path | None = None, smoke: bool = False, compiled: bool = False
    ) -> None:
        self.compiled = compiled
        self.name, self.began = name, time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.smoke = smoke or self.device.type == "cpu"
        self.folder = folder or (SMOKE if self.smoke else RESULTS)
        if self.smoke and self.folder.resolve() == RESULTS.resolve():
            raise ValueError(f"a smoke run's figures mean nothing: none goes to {RESULTS}")
        self.rows: list[dict[str, Any]] = []
        self.about: dict[str, Any] = machine_facts(self.device) | {"smoke": self.smoke}

    @property
    def file(self) -> Path:
        """The script's file, named after the chip."""
        return self.folder / f"{chip(self.device)}_{self.name}.json"

    def read(self) -> None:
        """Continue with the rows that the script's file has."""
        if self.file.exists():
            self.rows = json.loads(self.file.read_text("utf-8"))["rows"]

    @property
    def rounds(self) -> int:
        """How often each call is timed."""
        return SMOKE_ROUNDS if self.smoke else ROUNDS

    def size(self, real: int, small: int) -> int:
        """Return a size for a device, or the one of a smoke run."""
        return small if self.smoke else real

    def add(self, name: str, **figures: Any) -> None:
        """Write a row down, at once: what was measured outlives what comes after it."""
        self.rows.append({"name": name, **figures})
        print(name, *(f"{key}={_short(value)}" for key, value in figures.items()), sep="  ")
        self.write()

    def tried(self, name: str, measure: Callable[[], Mapping[str, Any]], **about: Any) -> None:
        """Measure a row; an error, or that no time is left, is what the row says instead."""
        if time.monotonic() - self.began > LIMIT_S:
            self.add(name, **about, left_out=f"the {LIMIT_S:.0f} s of this script are over")
            return
        try:
            figures = measure()
        except Exception as error:
            figures = {"error": f"{type(error).__name__}: {error}"[:500]}
        self.add(name, **about, **figures)

    def timed(
        self, calls: Mapping[str, Callable[[], Any]], graphed: Collection[str] = ()
    ) -> dict[str, Timed]:
        """Time calls in turn on this bench's device; see :func:`timed`."""
        return timed(calls, self.device, self.rounds, graphed)

    def write(self, **more: Any) -> None:
        """Write the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.about |= {"seconds": round(time.monotonic() - self.began, 1), **more}
        text = json.dumps({**self.about, "rows": self.rows}, indent=1)
        self.file.write_text(text + "\n", "utf-8")

    def end(self) -> int:
        """Say where the figures are; returns 1 where any row is an error, in a smoke run too."""
        failed = [row["name"] for row in self.rows if "error" in row]
        print(f"{len(self.rows)} rows in {self.file}")
        if failed:
            print("failed:", *failed, sep="\n  ", file=sys.stderr)
        return int(bool(failed))


def chip(device: torch.device) -> str:
    """Return the short name of a device for files, such as ``h200``."""
    if device.type == "cpu":
        return "cpu"
    name = device_name(device)
    sold = find_device(name)
    return re.sub(r"\W+", "_", (sold.name if sold else name).lower()).strip("_")


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return what a figure depends on: chip, driver, versions, commit."""
    facts: dict[str, Any] = {
        "chip": device_name(device),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "python": sys.version.split()[0],
        "commit": _said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
    }
    for package in ("triton", "liger_kernel", "sonicmoe"):
        facts[package] = getattr(sys.modules.get(package), "__version__", None)
    if device.type == "cuda":
        held = torch.cuda.get_device_properties(device)
        facts["devices"] = torch.cuda.device_count()
        facts["memory_bytes"], facts["processors"] = held.total_memory, held.multi_processor_count
    return facts


def _said(*command: str) -> str | None:
    """Return the first line that a command prints, None where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def _short(value: Any) -> Any:
    """Return a figure, or several, with as many digits as a person reads."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_short(each)}" for key, each in value.items()) + "}"
    return f"{value:.3g}" if isinstance(value, float) else value


def timed(
    calls: Mapping[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    graphed: Collection[str] = (),
) -> dict[str, Timed]:
    """Time calls in turn, so that a device whose clock drifts is alike to all.

    On CUDA seconds are between two events, and its caches are overwritten before each call; on a
    CPU they are the process's own. ``graphed`` names calls of which the kernels alone are timed, as
    a CUDA graph without the host's time between them, where there can be one.
    """
    flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.int8).to(device)
    clock = _by_events if device.type == "cuda" else _by_process
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(min(3, rounds - 1)):  # compiles, takes memory, fills caches of plans
            call()
    if device.type == "cuda":
        calls = {n: captured(call) if n in graphed else call for n, call in calls.items()}
    for turn in range(rounds):
        names = list(calls)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            flush.zero_()
            found[name].append(clock(calls[name]))
    return {name: _spread(seconds) for name, seconds in found.items()}


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return what runs a call's kernels as one graph; the call itself where it waits for them."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        stream = torch.cuda.Stream()
    try:
        with torch.cuda.graph(graph, stream=stream):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        # A capture that is broken off leaves the generator in it, where nothing can be drawn.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        return call
    return graph.replay


def host_seconds(call: Callable[[], Any], device: torch.device, times: int = 50) -> float | None:
    """Return the host's seconds to issue a call, None on a CPU, where all are its own."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    ended = time.perf_counter()
    torch.cuda.synchronize()
    return (ended - began) / times


def _by_events(call: Callable[[], Any]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def _by_process(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return max(time.process_time() - began, 1e-9)


def _spread(seconds: list[float]) -> Timed:
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return Timed(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return normal values: zeros are multiplied faster."""
    return torch.randn(shape, device=device).to(dtype)
