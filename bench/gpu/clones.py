"""Plans of clones on the device, and rows from which a clone pays.

Writes ``CHIP_clones.json``. Each row is a number of ranks and experts: seconds of a plan as a graph
and with the host's, and its launches. Then, by sizes of experts: seconds of the products of so many
rows, forward and backward, and the rows whose products take as long as a clone's weights take to
come (twice, forward and backward) and its gradients to leave, at a stated rate of links.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from gpu.device import Bench, drawn
from gpu.steps import profiled

from moefold.moe.clones import place_clones, quotas, send_counts
from moefold.moe.dispatch.config import Clones

LINK = 450e9
"""Bytes per second that a rank sends over links of a node: their datasheet's, no measurement."""
PLANS = ((8, 64), (8, 128), (32, 256), (64, 256))
"""Ranks and experts."""
EXPERTS = {"qwen3": (2048, 768), "deepseek": (7168, 2048)}
"""Hidden size and width."""
STEPS = (256, 1024, 4096)


def run(bench: Bench) -> int:
    """Measure plans, then experts; returns 1 where one failed."""
    for ranks, experts in PLANS[:1] if bench.smoke else PLANS:
        about = {"ranks": ranks, "experts": experts, "slots": 2}
        bench.tried(f"plan {ranks} {experts}", partial(planned, bench, ranks, experts), **about)
    for name, (hidden, width) in EXPERTS.items():
        sizes = bench.size(hidden, hidden // 64), bench.size(width, width // 64)
        bench.tried(f"expert {name}", partial(paid, bench, *sizes))
    return bench.end()


def planned(bench: Bench, ranks: int, experts: int) -> Mapping[str, Any]:
    """Return the seconds of a plan from the counts of all senders."""
    draw = torch.Generator().manual_seed(0)
    counts_XE = (torch.rand(ranks, experts, generator=draw) ** 8 * 1000).long().to(bench.device)

    def plan() -> None:
        quota_EP = quotas(counts_XE.sum(0), ranks, Clones(slots=2))
        place_clones(quota_EP, 2)
        send_counts(counts_XE, quota_EP, 0)

    took = bench.timed({"graph": plan, "host": plan}, graphed=("graph",))
    launches = profiled(plan, bench.device, 1)["kernels"]
    return {name: one.median for name, one in took.items()} | {"launches": launches}


def paid(bench: Bench, hidden: int, width: int) -> Mapping[str, Any]:
    """Return the seconds of an expert's products by rows, and the rows from which a clone pays."""
    w_in = drawn(2 * width, hidden, device=bench.device)
    w_out = drawn(hidden, width, device=bench.device)

    def products(x_RD: torch.Tensor, a_RF: torch.Tensor, h_RG: torch.Tensor) -> None:
        for _ in range(3):  # forward, gradients of rows, gradients of weights
            torch.mm(x_RD, w_in.t())
            torch.mm(a_RF, w_out.t())
        del h_RG

    calls = {}
    for rows in STEPS:
        rows = bench.size(rows, 8)
        given = (drawn(rows, n, device=bench.device) for n in (hidden, width, 2 * width))
        calls[str(rows)] = partial(products, *given)
    took = {int(rows): one.median for rows, one in bench.timed(calls, graphed=list(calls)).items()}
    each_s = min(seconds / rows for rows, seconds in took.items())
    # In bf16 forward and backward, and gradients in fp32.
    sent = 3 * hidden * width * (2 + 2 + 4)
    return {"seconds": took, "sent_bytes": sent, "break_even_rows": sent / LINK / each_s}
