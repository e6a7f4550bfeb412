"""``moefold doctor``: show which back ends are found and chosen, and why.

Looks for every back end and optional package, tests it where that is cheap, and says which ones
moefold uses and why. Exit status 1 if one named by --need is not usable, otherwise 0.
"""

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.text import Text

from moefold.cli._common import add_json, plain_table, print_json
from moefold.config.suggest import closest

UNUSABLE = 1


@dataclass(frozen=True)
class Finding:
    """One back end: whether it is available, its version, whether it is chosen, and why (not)."""

    name: str
    found: bool
    version: str
    chosen: bool
    why: str


REQUIRED = ("numpy", "pydantic", "tokenizers", "safetensors")
OPTIONAL = {
    "pyarrow": ("Parquet data", "pip install 'moefold[parquet]'"),
    "transformers": ("comparisons", "pip install transformers"),
    "wandb": ("metrics at Weights & Biases", "pip install 'moefold[wandb]'"),
    "deep_ep": ("dispatch: deep_ep and hybrid_ep", "github.com/deepseek-ai/DeepEP"),
    "transformer_engine": ("dispatch: nccl_ep", "pip install 'transformer-engine[pytorch]'"),
    "tensorboard": ("event files", "pip install 'moefold[tensorboard]'"),
}
"""Optional packages: purpose and how to install."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    text = "exit with status 1 if this back end is not usable; repeatable (default: none)"
    parser.add_argument("--need", metavar="NAME", action="append", default=[], help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Report all back ends; return 1 if one that ``--need`` names is not usable."""
    known = ["python", *PROBES, *REQUIRED, *OPTIONAL]
    for name in args.need:
        if name not in known:
            hint = f"nearest: {closest(name, known, 0.0)}; all: {', '.join(known)}"
            raise ValueError(f"--need {name}: unknown back end; {hint}")
    findings = probe_all()
    chosen = {finding.name for finding in findings if finding.chosen}
    missing = [name for name in args.need if name not in chosen]
    if args.json:
        backends = [asdict(finding) for finding in findings]
        print_json({"backends": backends, "missing": missing})
    else:
        _print_table(findings)
        for name in missing:
            print(f"needed and not usable: {name}", file=sys.stderr)
    return UNUSABLE if missing else 0


def _print_table(findings: list[Finding]) -> None:
    texts = {True: Text("yes", "green"), False: Text("no", "yellow")}
    rows = [(f.name, texts[f.found], f.version, texts[f.chosen], f.why) for f in findings]
    titles = ("back end", "found", "version", "chosen", "why, or why not")
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(plain_table(*titles, rows=rows))


def probe_all() -> list[Finding]:
    """Return findings for every back end, general ones first."""
    where = f"on {platform.system()} {platform.machine()}"
    findings = [Finding("python", True, platform.python_version(), True, where)]
    if is_installed("torch"):
        findings += [probe() for probe in PROBES.values()]
    else:
        findings.append(_probe_package("torch"))
    return findings + [_probe_package(name) for name in (*REQUIRED, *OPTIONAL)]


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def _probe_package(name: str) -> Finding:
    """Return the finding for a package, which is chosen if it is installed."""
    installed = is_installed(name)
    found_version = _version(name)
    purpose, remedy = OPTIONAL.get(name, ("", f"missing: pip install {name}"))
    why = purpose if installed else ": ".join(filter(None, (purpose, remedy)))
    return Finding(name, installed, found_version, installed, why)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


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
    why = f"of {cores} cores; " + (f"OMP_NUM_THREADS={set_by}" if set_by else "torch's default")
    return Finding("threads", True, str(torch.get_num_threads()), True, why)


def _bf16() -> Finding:
    """Time bf16 and fp32 products, since a CPU's features do not show its speed."""
    import torch

    from moefold.layers.config import faster_precision
    from moefold.training.machine import matrix_rates

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = {name: rate.flops_per_s for name, rate in matrix_rates(device).items()}
    chosen = faster_precision(rates) == "bf16"
    level = torch.backends.cpu.get_cpu_capability()
    verdict = "faster than fp32" if chosen else "no faster than fp32"
    figures = f"{rates['bf16'] / 1e9:,.0f} against {rates['fp32'] / 1e9:,.0f} GFLOP/s"
    why = f"{verdict} on {device.type}, so precision: auto is {faster_precision(rates)}: {figures}"
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

    available = dist.is_available() and dist.is_gloo_available()
    why = "processes on CPUs" if available else "not in this build of torch"
    return Finding("gloo", available, "", available, why)


def _nccl() -> Finding:
    import torch
    import torch.cuda.nccl
    import torch.distributed as dist

    available = dist.is_available() and dist.is_nccl_available()
    if not available:
        return Finding("nccl", False, "", False, "not in this build of torch")
    number = ".".join(str(part) for part in torch.cuda.nccl.version())
    live = torch.cuda.is_available()
    return Finding("nccl", True, number, live, "processes on GPUs" if live else "no CUDA device")


def _grouped_mm() -> Finding:
    """Compare a grouped product of two experts with the plain loop."""
    import torch

    from moefold.kernels.grouped import grouped, loop

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    x_RI = torch.randn(24, 16, generator=generator).to(device, torch.bfloat16)
    w_EOI = torch.randn(2, 32, 16, generator=generator).to(device, torch.bfloat16)
    offs_E = torch.tensor([9, 24], dtype=torch.int32, device=device)
    try:
        fast = grouped.product(x_RI, w_EOI, offs_E)
        plain = loop.product(x_RI, w_EOI, offs_E)
    except (RuntimeError, AttributeError) as error:
        text = f"the loop runs instead: {str(error).splitlines()[0]}"
        return Finding("grouped_mm", False, torch.__version__, False, text)
    same = torch.allclose(fast.float(), plain.float(), rtol=2e-2, atol=2e-2)
    why = f"equals the loop on {device}" if same else f"WRONG RESULT on {device}: use experts: loop"
    if same and device == "cpu":
        why += "; used for experts in bf16 here"
    if same and grouped.leaves_empty_groups_unwritten(torch.device(device)):
        why += "; leaves gradients of experts without rows unwritten, so they are cleared"
    return Finding("grouped_mm", True, torch.__version__, same, why)


def _triton() -> Finding:
    import torch

    from moefold.kernels.fused import why_no_triton

    why = why_no_triton("cuda" if torch.cuda.is_available() else "cpu")
    used = "fused kernels between matrix products"
    return Finding("triton", is_installed("triton"), _version("triton"), not why, why or used)


def _quantise() -> Finding:
    import torch

    from moefold.kernels.quantise.blocks import BLOCKS
    from moefold.kernels.scaled.choose import describe_backends
    from moefold.kernels.scaled.products import Recipe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds_by_path: dict[str, list[str]] = {}
    for kind in BLOCKS:
        use = Recipe(kind).product_spec("y", False, torch.bfloat16, device)
        kinds_by_path.setdefault(", ".join(describe_backends("auto", use)), []).append(kind)
    paths = [f"{', '.join(kinds)}: {text}" for text, kinds in kinds_by_path.items()]
    return Finding("quantise", True, torch.__version__, True, "; ".join(paths))


PROBES: dict[str, Callable[[], Finding]] = {
    probe.__name__[1:]: probe
    for probe in (
        _torch,
        _threads,
        _bf16,
        _cuda,
        _mps,
        _gloo,
        _nccl,
        _grouped_mm,
        _triton,
        _quantise,
    )
}
"""Probes that need torch, by the name of their finding."""
