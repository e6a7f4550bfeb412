"""Measures this machine for the planner: products, attention, memory, calls, and whole small steps.

Everything runs on one thread, and times are the process's own: on a machine that others use, a wall
clock tells how busy they are. What a step spends beside its products is read off small models that
are not the recipes which are then predicted.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log
from statistics import median
from typing import Any

import torch

from moefold.config.slot import build
from moefold.data.batch import from_ids
from moefold.kernels.attention.sdpa import attention
from moefold.kernels.grouped import choose
from moefold.layers.kinds.gqa import Gqa
from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.model.config import Block, Decoder, Stack
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise
from moefold.moe.config import Moe, Router
from moefold.optim.config import AdamW, Muon, Optim
from moefold.parallel.apply import alone
from moefold.parallel.data.sharding import Data
from moefold.planner.case import Case, Numbers
from moefold.planner.curves import Constants
from moefold.planner.machine import NAME, Machine
from moefold.planner.time import StepTime, estimate
from moefold.planner.time_optimizer import orthogonal_seconds
from moefold.schedule.config import OneFOneB
from moefold.training.step import gradients

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = (
    (64, 64, 64), (256, 64, 64), (512, 128, 192), (2048, 192, 192), (1024, 512, 128),
    (2048, 1024, 256), (512, 2048, 192), (1024, 1024, 1024), (2048, 2048, 512),
)  # fmt: skip
"""Rows, outputs and inputs of the products that are timed."""
GROUPS = ((4, 64), (8, 64), (8, 512), (16, 256))
"""Experts and rows of each, of the grouped products that are timed."""
LENGTHS, HEAD = (64, 256, 512, 1024), 64
MIB = 2**20
LOSS_CHUNK = 1024
PARTS = ("compute", "memory", "launch", "optimizer", "step")


def seconds(call: Callable[[], Any], least: float = 0.05) -> float:
    """Return the process's own seconds for a call: the median of calls that take ``least``."""
    call()
    taken = [_own(call)]
    while sum(taken) < least or len(taken) < 5:
        taken.append(_own(call))
    return median(taken)


def _own(call: Callable[[], Any]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


@dataclass(frozen=True)
class Small:
    """One small model whose step is timed."""

    hidden: int
    layers: int
    experts: int
    width: int
    vocab: int
    seq: int
    sequences: int
    micro_batches: int = 1
    optim: Optim = field(default_factory=lambda: AdamW(lr=1e-3))

    @property
    def decoder(self) -> Decoder:
        """The model."""
        heads = max(2, self.hidden // 64)
        attends = Gqa(heads=heads, kv_heads=heads, head_dim=self.hidden // heads, qk_norm="head")
        mixture = Moe(width=self.width, router=Router(experts=self.experts, top_k=2))
        block = Block(attention=attends, ffn=mixture)
        stack = Stack(repeat=self.layers, blocks=(block,))
        return Decoder(vocab=self.vocab, hidden=self.hidden, stacks=(stack,))


SMALLS = (
    Small(64, 2, 4, 64, 512, 64, 2),
    Small(64, 6, 4, 64, 512, 64, 2),
    Small(64, 2, 8, 64, 512, 128, 2, micro_batches=4),
    Small(128, 2, 8, 128, 1024, 256, 4),
    Small(128, 4, 16, 64, 1024, 128, 4),
    Small(256, 2, 8, 256, 2048, 256, 4),
    Small(256, 1, 4, 128, 8192, 256, 2),
    Small(128, 2, 8, 128, 1024, 256, 2, optim=Muon()),
    Small(192, 3, 8, 96, 2048, 128, 8, optim=Muon()),
)
"""Few rows and many, few layers and many, a large vocabulary, several micro-batches."""


def case_of(small: Small, precision: Any, machine: Machine) -> Case:
    """Return a small model's step as the planner takes it."""
    wide = precision == "fp32"
    return Case(
        decoder=small.decoder,
        seq=small.seq,
        batch=small.sequences * small.micro_batches,
        micro_batch=small.sequences,
        cluster=machine.cluster,
        sizes=Sizes(),
        stages=Stages.balanced(1, 1, small.layers),
        schedule=OneFOneB(),
        dispatch="local",
        load=1.0,
        numbers=Numbers(precision, small.optim, weight_bytes=0 if wide else 2),
    )


def stepping(case: Case) -> Callable[[], None]:
    """Return a call that makes one optimizer step of a case on one rank."""
    precision = "fp32" if case.numbers.recipe == "fp32" else "bf16"
    model = DecoderModel(case.decoder, precision)
    initialise(model, case.decoder, seed=1)
    draw = torch.Generator().manual_seed(0)
    shape = (case.micro_batch, case.seq)
    drawn = (
        torch.randint(case.decoder.vocab, shape, generator=draw) for _ in range(case.micro_batches)
    )
    batches = [from_ids(ids) for ids in drawn]
    data = Data(alone(model))
    optimizer = build(case.numbers.optimizer, dict(model.named_parameters()))

    def step() -> None:
        gradients(data, batches, LOSS_CHUNK)
        optimizer.step()
        data.renew()

    return step


def alternated(calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, float]]:
    """Run calls in turn, so that a drifting machine moves all alike.

    Returns:
        Medians over the rounds: ``own`` seconds of the process, and ``wall`` seconds.
    """
    for call in calls.values():
        call()
    own: dict[str, list[float]] = {name: [] for name in calls}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started, spent = time.perf_counter(), time.process_time()
            call()
            own[name].append(time.process_time() - spent)
            wall[name].append(time.perf_counter() - started)
    return {name: {"own": median(own[name]), "wall": median(wall[name])} for name in calls}


def kernels(name: str, software: str, memory_bytes: int) -> Machine:
    """Measure single kernels; returns the machine without what whole steps tell."""
    call, peaks, rates, tables = _call_seconds(), {}, {}, {}
    for form, dtype in FORMATS.items():
        products, passes = list(_products(dtype)), {}
        peaks[form] = peak = max(rate for *_, rate in products)
        passes = _attention(peak, dtype)
        share, half = _product_law(products, peak)
        rates[form] = {"gemm": share, "half": half, "memory": 1.0, "device": 1.0}
        rates[form] |= {"kernel_s": call, "launch_s": 0.0, "step_s": 0.0}
        for way, found in passes.items():
            rates[form][f"{way}_rate"], rates[form][f"{way}_half"] = _length_law(found)
        grouped = list(_grouped(dtype))
        tables[form] = {"products": products, "grouped": grouped, "attention": passes}
    return Machine(
        name, torch.get_num_threads(), software, peaks["fp32"], peaks["bf16"], _bandwidth(),
        memory_bytes, rates, {**tables, "call_s": call},
    )  # fmt: skip


def _products(dtype: torch.dtype) -> Iterator[tuple[int, int, int, float]]:
    """Yield rows, outputs, inputs and FLOP/s of products."""
    for m, n, k in SHAPES:
        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        times = max(1, 2**24 // (m * n * k))
        taken = seconds(partial(_repeat, partial(torch.mm, a, b.t()), times))
        yield m, n, k, 2 * m * n * k * times / taken


def _repeat(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()


def _grouped(dtype: torch.dtype) -> Iterator[tuple[int, int, float]]:
    """Yield experts, rows of each, and FLOP/s of grouped products."""
    inner, outer = 192, 256
    kernel = choose.choose("auto", dtype, inner, outer)
    for experts, each in GROUPS:
        x, w = torch.randn(experts * each, inner), torch.randn(experts, outer, inner)
        x, w = x.to(dtype), w.to(dtype)
        ends = torch.arange(1, experts + 1, dtype=torch.int32) * each
        taken = seconds(partial(kernel.product, x, w, ends))
        yield experts, each, 2 * x.shape[0] * inner * outer / taken


def _product_law(found: Sequence[tuple[int, int, int, float]], peak: float) -> tuple[float, float]:
    """Return the share of the peak and the half size that fit products best, in logarithms."""
    best: tuple[float, float, float] | None = None
    for half in (2.0**i * 1e3 for i in range(18)):
        h = half * peak / 1e15
        logs = [
            log(rate * (1 + h / m) * (1 + h / n) * (1 + h / k) / peak) for m, n, k, rate in found
        ]
        share = median(logs)
        error = sum(abs(one - share) for one in logs)
        if best is None or error < best[0]:
            best = error, exp(share), half
    assert best is not None
    return best[1], best[2]


def _attention(peak: float, dtype: torch.dtype) -> dict[str, list[tuple[int, float]]]:
    """Return length and share of the peak of attention's own products, there and back."""
    heads, found = 4, {"forward": [], "backward": []}
    for length in LENGTHS:
        q, k, v = (torch.randn(length, heads, HEAD).to(dtype) for _ in range(3))
        flops = 2 * length * length * heads * HEAD
        forward = seconds(partial(attention, q, k, v, (length,), HEAD**-0.5))
        given = [x.requires_grad_() for x in (q, k, v)]
        whole = seconds(partial(_there_and_back, given, length))
        found["forward"].append((length, flops / forward / peak))
        found["backward"].append((length, 2.5 * flops / max(whole - forward, 1e-7) / peak))
    return found


def _there_and_back(given: Sequence[torch.Tensor], length: int) -> None:
    q, k, v = given
    attention(q, k, v, (length,), HEAD**-0.5).sum().backward()


def _length_law(found: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return rate and half length of ``share = rate / (1 + half / length)``, by its two ends.

    The time model scales rates by the head's dims over 128.
    """
    (short, low), (long, high) = found[0], found[-1]
    half = max(0.0, (high - low) / max(low / short - high / long, 1e-9))
    return high * (1 + half / long) * 128 / HEAD, half


def _bandwidth() -> float:
    """Return bytes/s of large sums: two rows read and one written."""
    a, b, out = (torch.randn(16 * MIB // 4) for _ in range(3))
    return 3 * a.numel() * 4 / seconds(lambda: torch.add(a, b, out=out), 0.2)


def _call_seconds() -> float:
    """Return the seconds of a call that does next to nothing."""
    x = torch.zeros(16, requires_grad=True)
    return seconds(lambda: _repeat(lambda: x * 2.0, 200)) / 200


def features(took: StepTime, given: Constants) -> list[float]:
    """Return a step's predicted seconds by what whole steps tell: see ``PARTS``."""
    parts = took.parts
    compute = sum(parts[name] for name in ("attention", "experts", "dense", "head", "recompute"))
    update = orthogonal_seconds(took.case, 0, given.rates(NAME, "moefold", ""))
    return [
        compute + update, parts["memory"], parts["launch"], parts["optimizer"] - update, 1e-3
    ]  # fmt: skip


def adjusted(machine: Machine, cases: Sequence[Case], measured: Sequence[float]) -> Machine:
    """Return the machine with what small steps tell: how far parts are from single kernels.

    Args:
        cases: planned on ``machine``, of one or both formats.
        measured: seconds of their steps.
    """
    rates, tables = dict(machine.rates), dict(machine.tables)
    for form in {case.numbers.recipe for case in cases}:
        given = machine.constants(form)
        pairs = [
            (features(estimate(case, given), given), taken)
            for case, taken in zip(cases, measured, strict=True)
            if case.numbers.recipe == form
        ]
        rows = torch.tensor([row for row, _ in pairs], dtype=torch.float64)
        factors = _factors(rows, torch.tensor([taken for _, taken in pairs], dtype=torch.float64))
        rates[form] = _moved(rates[form], dict(zip(PARTS, factors, strict=True)))
        tables[form] = {**tables[form], "factors": dict(zip(PARTS, factors, strict=True))}
    return replace(machine, rates=rates, tables=tables)


def _moved(rates: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    """Return rates by which each part takes its factor more."""
    found = dict(rates)
    for name in ("gemm", "forward_rate", "backward_rate"):
        found[name] /= factors["compute"]
    found["memory"] = 1 / factors["optimizer"]
    found["device"] = factors["memory"] / factors["optimizer"]
    found["kernel_s"] *= factors["launch"] / found["device"]
    found["step_s"] = factors["step"] * 1e-3
    return found


def _factors(rows: torch.Tensor, measured: torch.Tensor) -> list[float]:
    """Return the factor of each part by least relative squares, near 1 where steps do not tell.

    Products in a step are never faster than alone.
    """
    sure = torch.tensor([0.5, 5.0, 5.0, 5.0, 5.0], dtype=torch.float64)
    least = [1.0, 0.1, 0.1, 0.1, 0.1]
    scaled, wanted = rows / measured[:, None], torch.ones_like(measured)
    noise = 0.05
    factors = torch.ones(rows.shape[1], dtype=torch.float64)
    left = scaled.T @ scaled / noise**2 + torch.diag(1 / sure**2)
    right = scaled.T @ wanted / noise**2 + 1 / sure**2
    # Coordinate by coordinate: no part takes time away.
    for _ in range(500):
        for i in range(len(factors)):
            rest = right[i] - left[i] @ factors + left[i, i] * factors[i]
            factors[i] = max(least[i], float(rest / left[i, i]))
    return factors.tolist()
