"""Calibration of the planner's time model for this CPU: single kernels, then small whole steps.

Everything runs on one thread and is timed in CPU seconds of the process, since on a shared machine
wall time depends on other load. The factors of a step's parts are fitted by least squares to steps
of small models, other than the recipes that are then predicted.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log
from statistics import median
from typing import Any

import torch

from moefold.config.slot import build
from moefold.data.batch import random_batches
from moefold.kernels.attention.sdpa import attention
from moefold.layers.kinds.gqa import Gqa
from moefold.model.config import Block, Decoder, Stack
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise
from moefold.moe.config import Moe, Router
from moefold.optim.config import AdamW, Muon, Optim
from moefold.parallel.apply import single_rank_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.case import Case, NumberFormats
from moefold.planner.hardware import Machine
from moefold.planner.task import task_from_run
from moefold.planner.time import estimate_time, newton_schulz_seconds
from moefold.planner.time_work import build_setting
from moefold.run import Run
from moefold.training.machine import HOST_BYTES, cpu_name, one_thread
from moefold.training.step import gradients

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = (
    (64, 64, 64), (256, 64, 64), (512, 128, 192), (2048, 192, 192), (1024, 512, 128),
    (2048, 1024, 256), (512, 2048, 192), (1024, 1024, 1024), (2048, 2048, 512),
)  # fmt: skip
"""Rows, outputs and inputs of the matrix products that are timed."""
LENGTHS = (64, 256, 512, 1024)
HEADS = 4
HEAD_DIM = 64
"""Tokens, heads and dims of a head of the attention that is timed."""
LOSS_CHUNK = 1024
PARTS = {
    # lowest factor, and prior deviation from 1: products in a step are never faster than alone
    "compute": (1.0, 0.5), "memory": (0.1, 5.0), "launch": (0.1, 5.0), "optimizer": (0.1, 5.0),
    "step": (0.1, 5.0),
}  # fmt: skip
"""Parts of a step whose factors are fitted to small models."""
NOISE = 0.05
"""Relative error of a measured step."""


@dataclass(frozen=True)
class SmallModel:
    """A small model whose step is timed."""

    hidden: int
    layers: int
    experts: int
    width: int
    vocab: int
    seq: int
    sequences: int
    micro_batches: int = 1
    optim: Optim = field(default_factory=lambda: AdamW(lr=1e-3))

    def case(self, precision: Any, machine: Machine) -> Case:
        """Return the model's step on a machine as a case for the planner."""
        heads = max(2, self.hidden // 64)
        attends = Gqa(heads=heads, kv_heads=heads, head_dim=self.hidden // heads, qk_norm="head")
        mixture = Moe(width=self.width, router=Router(experts=self.experts, top_k=2))
        stack = Stack(repeat=self.layers, blocks=(Block(attention=attends, ffn=mixture),))
        copy_bytes = 0 if precision == "fp32" else 2
        return Case(
            decoder=Decoder(vocab=self.vocab, hidden=self.hidden, stacks=(stack,)),
            seq=self.seq,
            batch=self.sequences * self.micro_batches,
            micro_batch=self.sequences,
            cluster=machine.cluster,
            layout=Layout(),
            load=1.0,
            number_formats=NumberFormats(precision, self.optim, weight_bytes=copy_bytes),
        )


SMALL_MODELS = (
    SmallModel(64, 2, 4, 64, 512, 64, 2),
    SmallModel(64, 6, 4, 64, 512, 64, 2),
    SmallModel(64, 2, 8, 64, 512, 128, 2, micro_batches=4),
    SmallModel(128, 2, 8, 128, 1024, 256, 4),
    SmallModel(128, 4, 16, 64, 1024, 128, 4),
    SmallModel(256, 2, 8, 256, 2048, 256, 4),
    SmallModel(256, 1, 4, 128, 8192, 256, 2),
    SmallModel(128, 2, 8, 128, 1024, 256, 2, optim=Muon()),
    SmallModel(192, 3, 8, 96, 2048, 128, 8, optim=Muon()),
)
"""Few rows and many, few layers and many, a large vocabulary, several micro-batches."""


def calibrate(runs: Mapping[str, Run], rounds: int) -> tuple[Machine, dict[str, dict[str, float]]]:
    """Measure this machine, and compare each run's step with its plan.

    Returns:
        The machine; for each run ``planned_s``, ``measured_s`` and ``off``, the relative error,
        in CPU seconds of the process, and ``wall_s``.

    Raises:
        ValueError: if a run has several ranks or cannot be planned.
    """
    with one_thread():
        unfitted = measure_kernels(cpu_name(), f"torch {torch.__version__}", HOST_BYTES)
        cases = {source: _case(run, unfitted) for source, run in runs.items()}
        formats = sorted({case.number_formats.recipe for case in cases.values()})
        small_cases = {
            f"{recipe} {number}": small_model.case(recipe, unfitted)
            for recipe in formats
            for number, small_model in enumerate(SMALL_MODELS)
        }
        step_functions = {name: build_step(case) for name, case in {**small_cases, **cases}.items()}
        timings = time_calls(step_functions, rounds)
    measured = [timings[name]["own"] for name in small_cases]
    machine = fit_machine(unfitted, list(small_cases.values()), measured)
    steps = {}
    for source, run in runs.items():
        planned = estimate_time(_case(run, machine)).seconds
        cpu_s = timings[source]["own"]
        steps[source] = {
            "planned_s": planned, "measured_s": cpu_s, "wall_s": timings[source]["wall"],
            "off": planned / cpu_s - 1,
        }  # fmt: skip
    return machine, steps


def _case(run: Run, machine: Machine) -> Case:
    task, layout = task_from_run(run, machine.cluster, load=1.0)
    return task.case(layout)


# ----------------------------------------------------------------------------- kernels


def measure_kernels(name: str, software: str, memory_bytes: int) -> Machine:
    """Measure single kernels; return the machine before it is fitted to whole steps."""
    little = torch.zeros(16, requires_grad=True)  # times the overhead of a call
    tables: dict[str, Any] = {"call_s": _median_seconds(lambda: little * 2.0, times=200)}
    a, b, out = (torch.randn(2**22) for _ in range(3))
    # Large sums: two rows are read and one is written.
    sum_s = _median_seconds(lambda: torch.add(a, b, out=out), 0.2)
    bandwidth = 3 * a.nbytes / sum_s
    peaks = {}
    rates = {}
    for precision, dtype in FORMATS.items():
        products = list[tuple[int, int, int, float]]()
        for m, n, k in SHAPES:
            x = torch.randn(m, k).to(dtype)
            w = torch.randn(n, k).to(dtype)
            volume = m * n * k
            times = max(1, 2**24 // volume)
            seconds = _median_seconds(partial(torch.mm, x, w.t()), times=times)
            products.append((m, n, k, 2 * volume / seconds))
        peaks[precision] = peak = max(rate for *_, rate in products)
        attention_shares = _measure_attention(peak, dtype)
        share, half = fit_gemm(products, peak)
        rates[precision] = {
            "gemm": share, "half": half, "memory": 1.0, "device": 1.0,
            "kernel_s": tables["call_s"], "launch_s": 0.0, "step_s": 0.0,
        }  # fmt: skip
        for direction, shares in attention_shares.items():
            rate, half = fit_length(shares, HEAD_DIM)
            rates[precision] |= {f"{direction}_rate": rate, f"{direction}_half": half}
        tables[precision] = {"products": products, "attention": attention_shares}
    return Machine(
        name, torch.get_num_threads(), software, peaks["fp32"], peaks["bf16"], bandwidth,
        memory_bytes, rates, tables,
    )  # fmt: skip


def _median_seconds(call: Callable[[], Any], min_seconds: float = 0.05, times: int = 1) -> float:
    """Return the median CPU seconds of a call, measured for at least ``min_seconds``.

    Each measurement covers ``times`` calls, for short ones.
    """
    call()
    seconds: list[float] = []
    while sum(seconds) < min_seconds or len(seconds) < 5:
        started = time.process_time()
        for _ in range(times):
            call()
        seconds.append(time.process_time() - started)
    return median(seconds) / times


def fit_gemm(products: Sequence[tuple[int, int, int, float]], peak: float) -> tuple[float, float]:
    """Return the share of the peak and the half size that fit the products' log rates best."""

    def fit_share(half: float) -> tuple[float, float, float]:
        h = half * peak / 1e15
        log_rates = [
            log(rate * (1 + h / m) * (1 + h / n) * (1 + h / k) / peak) for m, n, k, rate in products
        ]
        share = median(log_rates)
        return sum(abs(log_rate - share) for log_rate in log_rates), exp(share), half

    _, share, half = min(fit_share(2.0**i * 1e3) for i in range(-10, 18))
    return share, half


def _measure_attention(peak: float, dtype: torch.dtype) -> dict[str, list[tuple[int, float]]]:
    """Return lengths with attention's share of the peak rate, for forward and backward."""
    shares: dict[str, list[tuple[int, float]]] = {"forward": [], "backward": []}
    for length in LENGTHS:
        q, k, v = (torch.randn(length, HEADS, HEAD_DIM).to(dtype) for _ in range(3))
        attend = partial(attention, q, k, v, (length,), HEAD_DIM**-0.5)
        flops = 2 * length * length * HEADS * HEAD_DIM
        forward = _median_seconds(attend)
        for x in (q, k, v):
            x.requires_grad_()
        both = _median_seconds(lambda attend=attend: attend().sum().backward())
        backward = max(both - forward, 1e-7)
        shares["forward"].append((length, flops / forward / peak))
        shares["backward"].append((length, 2.5 * flops / backward / peak))
    return shares


def fit_length(shares: Sequence[tuple[int, float]], dim: int) -> tuple[float, float]:
    """Return rate and half length of ``share = rate / (1 + half / length)``, from both ends.

    ``shares`` is in ascending order of length. The time model scales rates by head dim over 128.
    """
    (short, low) = shares[0]
    (long, high) = shares[-1]
    half = max(0.0, (high - low) / max(low / short - high / long, 1e-9))
    return high * (1 + half / long) * 128 / dim, half


# ----------------------------------------------------------------------------- whole steps


def build_step(case: Case) -> Callable[[], None]:
    """Return a function that runs one optimizer step of a case on one rank."""
    model = DecoderModel(case.decoder, case.number_formats.precision)
    initialise(model, case.decoder, seed=1)
    shape = case.micro_batch, case.seq
    batches = random_batches(case.decoder.vocab, shape, case.num_micro_batches, seed=0)
    state = ShardedState(single_rank_parts(model))
    optimizer = build(case.number_formats.optimizer, dict(model.named_parameters()))

    def step() -> None:
        gradients(state, batches, LOSS_CHUNK)
        optimizer.step()
        state.refresh_weights()

    return step


def time_calls(calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, float]]:
    """Run calls in turn, so that drifting load affects all alike.

    Returns:
        Medians over the rounds: ``own``, CPU seconds of the process, and ``wall`` seconds.
    """
    for call in calls.values():
        call()
    cpu_s, wall_s = ({name: list[float]() for name in calls} for _ in range(2))
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            cpu_started = time.process_time()
            call()
            cpu_s[name].append(time.process_time() - cpu_started)
            wall_s[name].append(time.perf_counter() - started)
    return {name: {"own": median(cpu_s[name]), "wall": median(wall_s[name])} for name in calls}


def planned_seconds(case: Case) -> list[float]:
    """Return a step's planned seconds by part, in the order of ``PARTS``."""
    software = case.software
    numbers = case.number_formats
    parts = estimate_time(case).parts
    setting = build_setting(case.cluster, software, numbers.recipe, numbers.recipe_options)
    compute = sum(parts[name] for name in ("attention", "experts", "dense", "head", "recompute"))
    update = newton_schulz_seconds(case, 0, setting.rates)
    return [
        compute + update, parts["memory"], parts["launch"], parts["optimizer"] - update, 1e-3
    ]  # fmt: skip


def fit_machine(machine: Machine, cases: Sequence[Case], measured: Sequence[float]) -> Machine:
    """Return the machine with rates scaled by the factors of parts that fit small steps.

    ``measured`` has the seconds of the steps that ``cases`` describe, in one or both formats.
    """
    rates = dict(machine.rates)
    tables = dict(machine.tables)
    for precision in {case.number_formats.recipe for case in cases}:
        indices = [i for i, case in enumerate(cases) if case.number_formats.recipe == precision]
        planned_parts = [planned_seconds(cases[i]) for i in indices]
        measured_s = [measured[i] for i in indices]
        factors = _fit_factors(
            torch.tensor(planned_parts, dtype=torch.float64),
            torch.tensor(measured_s, dtype=torch.float64),
        )
        # With these rates each part takes longer by its factor.
        fitted = dict(rates[precision])
        for name in ("gemm", "forward_rate", "backward_rate"):
            fitted[name] /= factors["compute"]
        fitted["memory"] = 1 / factors["optimizer"]
        fitted["device"] = factors["memory"] / factors["optimizer"]
        fitted["kernel_s"] *= factors["launch"] / fitted["device"]
        fitted["step_s"] = factors["step"] * 1e-3
        rates[precision] = fitted
        tables[precision] = {**tables[precision], "factors": factors}
    return replace(machine, rates=rates, tables=tables)


def _fit_factors(rows: torch.Tensor, measured: torch.Tensor) -> dict[str, float]:
    """Return each part's factor by least relative squares, near 1 if the steps do not show it."""
    lower_bound, prior_deviation = torch.tensor(list(PARTS.values()), dtype=torch.float64).T
    scaled = rows / measured[:, None] / NOISE
    prior_weight = 1 / prior_deviation**2
    matrix = scaled.T @ scaled + torch.diag(prior_weight)
    vector = scaled.sum(0) / NOISE + prior_weight
    factors = torch.ones_like(prior_deviation)
    # Coordinate descent, since factors have lower bounds: no part takes negative time.
    for _ in range(500):
        for i in range(len(factors)):
            diagonal = matrix[i, i]
            residual = vector[i] - matrix[i] @ factors + diagonal * factors[i]
            factors[i] = torch.maximum(lower_bound[i], residual / diagonal)
    return dict(zip(PARTS, factors.tolist(), strict=True))
