"""What a device can do at most: products by shape, attention by length, memory, launches, links.

Writes ``CHIP_ceilings.json``. Its ``machine`` holds the planner's constants as these kernels tell
them; whole steps adjust them (``gpu/steps.py``). T rows, D hidden, F expert width, E experts.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from gpu.device import Bench, drawn
from torch import Tensor

from moefold.comm.collectives import all_gather_into, all_reduce_, exchange
from moefold.comm.launch import launch_all
from moefold.comm.world import World
from moefold.kernels.attention.sdpa import attention
from moefold.kernels.grouped.choose import choose_kernel
from moefold.mesh.config import Sizes
from moefold.mesh.folding import Folding
from moefold.planner.hardware import Machine
from moefold.training.calibrate import FORMATS, fit_gemm, fit_length

SQUARES = (512, 1024, 2048, 4096, 8192)
SHAPES = ((4096, 2048, 2048), (8192, 5120, 2048), (8192, 1536, 768), (16384, 512, 7168))
"""Rows, outputs and inputs of products as layers have them."""
GROUPED = ((32768, 128, 1536, 2048), (32768, 16, 1536, 2048), (16384, 32, 4096, 7168))
"""Rows, experts, outputs and inputs."""
LENGTHS, HEADS, HEAD_DIM = (512, 1024, 2048, 4096, 8192), 16, 128
TOKENS = 16384
"""Of the attention that is timed, in sequences of each length."""
CALLS = 200
"""Small kernels in a row: fewer than a device's queue holds."""
EXCHANGE_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
TIME_OUT_S = 120.0


def run(bench: Bench) -> int:
    """Measure all ceilings; returns 1 where one failed."""
    bandwidth = _memory(bench)
    kernel_s = _launches(bench)
    peaks, rates, tables = dict[str, float](), dict[str, dict[str, float]](), dict[str, Any]()
    for form, dtype in FORMATS.items():
        products = list(_products(bench, form, dtype))
        peaks[form] = max(rate for *_, rate in products)
        share, half = fit_gemm(products, peaks[form])
        rates[form] = {
            "gemm": share, "half": half, "memory": 1.0, "device": 1.0, "kernel_s": kernel_s,
            "step_s": 0.0,
        }  # fmt: skip
        tables[form] = {"products": products}
    passes = tables["bf16"]["attention"] = _attention(bench, peaks["bf16"])
    for way, found in passes.items():
        law = fit_length(found, HEAD_DIM)
        for known in rates.values():
            known[f"{way}_rate"], known[f"{way}_half"] = law
    _grouped(bench)
    _exchanges(bench)
    facts = bench.about
    machine = Machine(
        facts["chip"], 1, f"torch {facts['torch']}", peaks["fp32"], peaks["bf16"], bandwidth,
        facts.get("memory_bytes", 1 << 33), rates, tables, gpu=True,
    )  # fmt: skip
    bench.write(machine=asdict(machine))
    return bench.end()


def _memory(bench: Bench) -> float:
    """Return bytes/s of large sums: two rows read and one written."""
    count = bench.size(1 << 28, 1 << 16)
    a, b, out = (drawn(count, device=bench.device, dtype=torch.float32) for _ in range(3))
    forms = {
        "copy": (partial(out.copy_, a), 2),
        "sum of two": (partial(torch.add, a, b, out=out), 3),
        "read": (a.sum, 1),
    }
    found = bench.timed({name: call for name, (call, _) in forms.items()})
    for name, (_, rows) in forms.items():
        took = found[name]
        bench.add(f"memory {name}", **took._asdict(), bytes_per_s=rows * 4 * count / took.median)
    return 3 * 4 * count / found["sum of two"].median


def _launches(bench: Bench) -> float:
    """Return device seconds of a kernel that does next to nothing, one behind the other."""
    x = torch.zeros(16, device=bench.device)

    def calls() -> None:
        for _ in range(CALLS):
            x.add_(1.0)

    again = calls
    if bench.device.type == "cuda":
        calls()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        again = graph.replay
    device_s = bench.timed({"kernels": again})["kernels"].median / CALLS
    began = time.perf_counter()
    calls()
    host_s = (time.perf_counter() - began) / CALLS
    bench.add("a small kernel", device_s=device_s, host_s=host_s)
    return device_s


def _products(bench: Bench, form: str, dtype: torch.dtype) -> Iterator[tuple[int, int, int, float]]:
    """Yield rows, outputs, inputs and FLOP/s of matrix products."""
    squares = [(side, side, side) for side in SQUARES]
    for m, n, k in [*squares, *SHAPES]:
        m, n, k = (bench.size(side, side // 64) for side in (m, n, k))
        a, b = (drawn(rows, k, device=bench.device, dtype=dtype) for rows in (m, n))
        took = bench.timed({"product": partial(torch.mm, a, b.t())})["product"]
        rate = 2 * m * n * k / took.median
        bench.add(f"product {form} {m} {n} {k}", **took._asdict(), flops_per_s=rate)
        yield m, n, k, rate


def _grouped(bench: Bench) -> None:
    """Time grouped products of evenly filled experts, all three ways, by each kernel there is."""
    for shape in GROUPED:
        rows, experts, out, width = (bench.size(side, max(8, side // 64)) for side in shape)
        of = partial(drawn, device=bench.device)
        x, dy, w = of(rows, width), of(rows, out), of(experts, out, width)
        into = torch.zeros(experts, out, width, device=bench.device)
        ends = torch.arange(1, experts + 1, device=bench.device) * (rows // experts)
        offs, name = ends.to(torch.int32), f"grouped {rows} {experts} {out} {width}"

        def measure(
            x: Tensor = x, dy: Tensor = dy, w: Tensor = w, into: Tensor = into, offs: Tensor = offs
        ) -> dict[str, Any]:
            calls: dict[str, Callable[[], Any]] = {}
            for asked in ("grouped", "triton", "loop"):
                try:
                    kernel = choose_kernel(asked, x.dtype, *w.shape[1:], device=x.device)
                except ValueError:
                    continue
                calls |= {
                    f"{asked} forward": partial(kernel.product, x, w, offs),
                    f"{asked} inputs": partial(kernel.input_gradient, dy, w, offs),
                    f"{asked} weights": partial(kernel.weight_gradient, dy, x, offs, into),
                }
            flops = 2 * int(offs[-1]) * w.shape[1] * w.shape[2]
            return {n: flops / took.median for n, took in bench.timed(calls).items()}

        bench.tried(name, measure, unit="FLOP/s")


def _attention(bench: Bench, peak: float) -> dict[str, list[tuple[int, float]]]:
    """Return length and share of the peak of causal attention, forward and backward."""
    found: dict[str, list[tuple[int, float]]] = {"forward": [], "backward": []}
    for real in LENGTHS:
        length, tokens = bench.size(real, real // 64), bench.size(TOKENS, LENGTHS[-1] // 64)
        qkv = [
            drawn(tokens, HEADS, HEAD_DIM, device=bench.device).requires_grad_() for _ in range(3)
        ]
        lengths = (length,) * (tokens // length)
        forward = partial(attention, *qkv, lengths, HEAD_DIM**-0.5)
        out = forward()
        backward = partial(torch.autograd.grad, out, qkv, torch.randn_like(out), retain_graph=True)
        took = bench.timed({"forward": forward, "backward": backward})
        flops = 2 * tokens * length * HEADS * HEAD_DIM
        for way, work in (("forward", flops), ("backward", 2.5 * flops)):
            rate = work / took[way].median
            found[way].append((length, rate / peak))
            bench.add(f"attention {way} {length}", **took[way]._asdict(), flops_per_s=rate)
    return found


def _exchanges(bench: Bench) -> None:
    """Time sums, gathers and exchanges of rows over all devices here; two processes on a CPU."""
    ranks = 2 if bench.device.type == "cpu" else torch.cuda.device_count()
    if ranks == 1:
        bench.add("exchanges", left_out="one device has no links to others")
        return
    sizes = [bench.size(each, 1 << 12) for each in EXCHANGE_BYTES]
    given = (bench.device.type, ranks, sizes, bench.rounds)

    def measure() -> Mapping[str, Any]:
        answers = launch_all(_one_rank, ranks, given, TIME_OUT_S, bench.device.type)
        slowest = {name: max(answer[name] for answer in answers) for name in answers[0]}
        return {"ranks": ranks, "bytes_per_s": slowest}

    bench.tried("exchanges", measure)


def _one_rank(
    spot: Any, device: str, ranks: int, sizes: list[int], rounds: int
) -> dict[str, float]:
    """Return bytes/s that one rank sends in each collective, by its name and size."""
    here = torch.device(f"cuda:{spot.local_rank}" if device == "cuda" else device)
    found = dict[str, float]()
    with World.open(Folding(Sizes(ep=ranks), ranks), here, TIME_OUT_S) as world:
        group = world.group("ep")
        for size in sizes:
            rows = size // 4 // ranks * ranks
            x = torch.randn(rows, device=here)
            out = x.new_empty(rows * ranks)
            even = [rows // ranks] * ranks
            forms: dict[str, tuple[Callable[[], Any], float]] = {
                "all_to_all": (partial(exchange, x, group, even, even), (ranks - 1) / ranks),
                "all_gather": (partial(all_gather_into, out, x, group), ranks - 1),
                "all_reduce": (partial(all_reduce_, x, group), 2 * (ranks - 1) / ranks),
            }
            for name, (call, share) in forms.items():
                took = _between_ranks(call, here, rounds)
                found[f"{name} {4 * rows}"] = share * 4 * rows / took
    return found


def _between_ranks(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Return the seconds of a collective, many in a row: no rank starts one alone."""
    for _ in range(3):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds
