"""What this machine offers: each back end looked for, tried where that is cheap, and judged."""

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Finding:
    """One back end: whether it is there, which version, whether it is chosen, and why (not)."""

    name: str
    found: bool
    version: str
    chosen: bool
    why: str


@dataclass(frozen=True)
class Extra:
    """A package that moefold can do without: what it is for and how to get it."""

    package: str
    module: str
    purpose: str
    remedy: str


OPTIONAL = (
    Extra("pyarrow", "pyarrow", "Parquet data", "pip install 'moefold[parquet]'"),
    Extra("transformers", "transformers", "comparisons", "pip install transformers"),
    Extra("wandb", "wandb", "metrics at Weights & Biases", "pip install 'moefold[wandb]'"),
    Extra("deep_ep", "deep_ep", "dispatch: deep_ep and hybrid_ep", "github.com/deepseek-ai/DeepEP"),
    Extra(
        "transformer_engine",
        "transformer_engine",
        "dispatch: nccl_ep",
        "pip install 'transformer-engine[pytorch]'",
    ),
    Extra("tensorboard", "tensorboard", "event files", "pip install 'moefold[tensorboard]'"),
)
REQUIRED = ("numpy", "pydantic", "tokenizers", "safetensors")
# Found and reported for bug reports; every operation runs on PyTorch's own kernels.
UNUSED = (("triton", "triton"),)


def probe_all() -> list[Finding]:
    """Look for every back end, the general ones first."""
    findings = [_python()]
    probes: tuple[Callable[[], Finding], ...] = ()
    if is_there("torch"):
        probes = (_torch, _threads, _bf16, _cuda, _mps, _gloo, _nccl, _grouped_mm)
    else:
        findings.append(Finding("torch", False, "", False, "missing: pip install torch"))
    findings += [probe() for probe in probes]
    findings += [_required(name) for name in REQUIRED]
    findings += [_optional(wanted) for wanted in OPTIONAL]
    findings += _unused()
    return findings


def is_there(module: str) -> bool:
    """Say whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def package_version(package: str) -> str:
    """Return the installed version of a distribution; empty when it has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _python() -> Finding:
    where = f"{platform.system()} {platform.machine()}"
    return Finding("python", True, platform.python_version(), True, f"on {where}")


def _torch() -> Finding:
    import torch

    build = "CPU build"
    if torch.version.cuda:
        build = f"build for CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"build for ROCm {torch.version.hip}"
    return Finding("torch", True, torch.__version__, True, build)


def _threads() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    set_by = os.environ.get("OMP_NUM_THREADS")
    why = f"of {cores} cores; " + (f"OMP_NUM_THREADS={set_by}" if set_by else "torch's own choice")
    return Finding("threads", True, str(torch.get_num_threads()), True, why)


def _bf16() -> Finding:
    """Measure bf16 against fp32 products, since what a CPU lists is not what it is fast at."""
    import torch

    from moefold.layers.config import faster
    from moefold.training.machine import machines

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = {name: one.flops_per_s for name, one in machines(device).items()}
    chosen = faster(rates) == "bf16"
    level = torch.backends.cpu.get_cpu_capability()
    verdict = "faster than fp32" if chosen else "no faster than fp32"
    figures = f"{rates['bf16'] / 1e9:,.0f} against {rates['fp32'] / 1e9:,.0f} GFLOP/s"
    why = f"{verdict} on {device.type}, so precision: auto is {faster(rates)}: {figures}"
    return Finding("bf16", True, level, chosen, why)


def _cuda() -> Finding:
    import torch

    built = torch.version.cuda or torch.version.hip
    if not built:
        return Finding("cuda", False, "", False, "this build of torch has no accelerator support")
    if not torch.cuda.is_available():
        return Finding("cuda", False, built, False, "torch finds no device: is the driver loaded?")
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    text = f"{torch.cuda.device_count()} x {properties.name}, {memory:.0f} GiB each"
    return Finding("cuda", True, f"{built}, sm_{properties.major}{properties.minor}", True, text)


def _mps() -> Finding:
    import torch

    if torch.backends.mps.is_available():
        return Finding("mps", True, platform.mac_ver()[0], True, "runs the reference path")
    built = torch.backends.mps.is_built()
    why = "needs a newer macOS or Apple silicon" if built else "this build of torch is not for Macs"
    return Finding("mps", False, "", False, why)


def _gloo() -> Finding:
    import torch.distributed as dist

    there = dist.is_available() and dist.is_gloo_available()
    why = "processes on CPUs" if there else "this build of torch leaves it out"
    return Finding("gloo", there, "", there, why)


def _nccl() -> Finding:
    import torch
    import torch.cuda.nccl
    import torch.distributed as dist

    there = dist.is_available() and dist.is_nccl_available()
    if not there:
        return Finding("nccl", False, "", False, "this build of torch leaves it out")
    number = ".".join(str(part) for part in torch.cuda.nccl.version())
    live = torch.cuda.is_available()
    return Finding("nccl", True, number, live, "processes on GPUs" if live else "no CUDA device")


def _grouped_mm() -> Finding:
    """Run a two-expert product and compare it with the plain loop."""
    import torch

    from moefold.kernels.grouped import grouped, loop

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    x_RI = torch.randn(24, 16, generator=generator).to(device, torch.bfloat16)
    w_EOI = torch.randn(2, 32, 16, generator=generator).to(device, torch.bfloat16)
    offs_E = torch.tensor([9, 24], dtype=torch.int32, device=device)
    try:
        fast, plain = grouped.product(x_RI, w_EOI, offs_E), loop.product(x_RI, w_EOI, offs_E)
    except (RuntimeError, AttributeError) as error:
        text = f"the loop runs instead: {str(error).splitlines()[0]}"
        return Finding("grouped_mm", False, torch.__version__, False, text)
    same = torch.allclose(fast.float(), plain.float(), rtol=2e-2, atol=2e-2)
    why = f"equals the loop on {device}" if same else f"WRONG RESULT on {device}: use experts: loop"
    if same and grouped.leaves_dirt(torch.device(device)):
        why += "; gradients of experts without rows are not written, and cleared after it"
    return Finding("grouped_mm", True, torch.__version__, same, why)


def _required(package: str) -> Finding:
    there = is_there(package)
    why = "" if there else f"missing: pip install {package}"
    return Finding(package, there, package_version(package), there, why)


def _optional(wanted: Extra) -> Finding:
    there = is_there(wanted.module)
    why = wanted.purpose if there else f"{wanted.purpose}: {wanted.remedy}"
    return Finding(wanted.package, there, package_version(wanted.package), there, why)


def _unused() -> Iterator[Finding]:
    for name, module in UNUSED:
        there = is_there(module)
        yield Finding(name, there, package_version(name), False, "not used by this version")
