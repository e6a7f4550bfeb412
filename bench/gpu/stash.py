"""Experts' rows to pages and back, beside copies of as many bytes: what moves is what counts.

Writes ``CHIP_stash.json``. Each row is one room, filled in part: seconds to pages and back by own
kernels and in plain torch, bytes of the rows that count, and the share of a copy's rate at which
these move; counted in the whole call, ring and all; and the same of pages to pinned memory of the
host and back. Then whole steps of one rank of ep8 with rows in pages, here and on the host, and
without, at a load of 4: seconds and the most that the allocator gave out.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu.device import Bench, drawn
from gpu.steps import ROWS, Trial, cut, small, stepping
from gpu.steps import drawn as parts_of
from no_values import apart

from moefold.kernels.fused import force_triton
from moefold.kernels.pages.ring import PageRing
from moefold.parallel.config import Layout

PAGE, EP, LOAD = 64, 8, 4
FILLED = (0.125, 0.5, 1.0)
"""Shares of a room that rows fill."""


@dataclass(frozen=True)
class PagedTrial(Trial):
    """A rank of ep8 with room for four times the mean."""

    spill: float | None = None
    """Share of layers whose pages go on to the host; None: no pages."""

    @property
    def layout(self) -> Layout:
        """Where its parts live."""
        room, pages = LOAD * self.copies // EP, {"page": PAGE, "load": 2.0}
        return Layout.model_validate({
            "sizes": f"ep{EP}",
            "dispatch": {"kind": "padded", "max_rows": room},
            "offload": None if self.spill is None else {"pages": pages | {"spill": self.spill}},
        })  # fmt: skip


def run(bench: Bench) -> int:
    """Measure copies, then steps; returns 1 where one failed."""
    for width in (2048, 7168):
        for share in FILLED:
            room, columns = bench.size(4 * 32768, 256), bench.size(width, width // 64)
            about = {"rows": round(room * share), "room": room, "width": columns}
            bench.tried(f"rows {width} {share}", partial(copying, bench, **about), **about)
    model = cut("qwen3_30b_a3b", 6)
    for name, spill in {"room": None, "pages": 0.0, "host": 1.0}.items():
        trial = PagedTrial("qwen3", model, rows=ROWS, spill=spill)
        trial = small(trial) if bench.smoke else trial
        bench.tried(f"step {name}", partial(stepped, bench, trial))
    return bench.end()


def copying(bench: Bench, rows: int, room: int, width: int) -> Mapping[str, Any]:
    """Return seconds and rates of rows to pages and back."""
    x_RD = drawn(room, width, device=bench.device)
    count = torch.tensor(rows, device=bench.device, dtype=torch.int32)
    ring = PageRing(-(-room // PAGE), PAGE, width, x_RD.dtype, bench.device)
    page_M = ring.put(x_RD, count)
    here_RD, there_RD = x_RD[:rows], torch.empty_like(x_RD[:rows])

    def there_and_back(own: bool) -> None:
        nonlocal page_M
        with nullcontext() if own else force_triton(False):
            ring.take(page_M, count, room)
            page_M = ring.put(x_RD, count)

    host = PageRing(-(-rows // PAGE), PAGE, width, x_RD.dtype, bench.device, on_host=True)
    host_M = host.allocate(count, room)
    pinned_RD = torch.empty_like(here_RD, device="cpu", pin_memory=bench.device.type == "cuda")

    def to_host_and_back() -> None:
        ring.copy(page_M, count, host, host_M)
        host.copy(host_M, count, ring, page_M)

    calls: dict[str, Callable[[], Any]] = {
        "copies": lambda: (there_RD.copy_(here_RD), here_RD.copy_(there_RD)),
        "own": partial(there_and_back, True),
        "plain": partial(there_and_back, False),
        "host copies": lambda: (pinned_RD.copy_(here_RD), there_RD.copy_(pinned_RD)),
        "host": to_host_and_back,
    }
    took = {name: one.median for name, one in bench.timed(calls).items()}
    back_RD = ring.take(page_M, count, room)
    assert torch.equal(back_RD[:rows], here_RD) and int(ring.refused) == 0
    moved = 4 * rows * x_RD[0].nbytes  # read and written, there and back
    shares = {"of_a_copy": took["copies"] / took["own"]}
    shares["of_a_host_copy"] = took["host copies"] / took["host"]
    return {"seconds": took, "bytes": moved, **shares}


def stepped(bench: Bench, trial: Trial) -> Mapping[str, Any]:
    """Return the figures of a rank's step."""
    on_device = bench.device.type == "cuda"
    with apart():
        data = parts_of(trial, EP, bench.device)
        step = stepping(trial, data)
        took = bench.timed({"step": step})["step"]
        if on_device:
            torch.cuda.reset_peak_memory_stats()
            step()
    stash = data.parts.offload and data.parts.offload.stash
    pages = (
        {} if not stash else {str(one.rows_SD.shape[1]): one.pages for one in stash.rings.values()}
    )
    peak = torch.cuda.max_memory_allocated() if on_device else None
    return {**took._asdict(), "peak_bytes": peak, "pages": pages}
