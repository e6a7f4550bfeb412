"""Compiles what a launch would, for devices that are not here, and reads the code that comes out.

Arguments are on ``meta``: sizes are those of training and cost no memory. Registers, spills and
loops of each kernel are recorded in ``budgets/`` and change only together with the record, which
``python -m tests.triton.compiled NAME ...`` writes anew (without names, all of them).
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from moefold.kernels import fused as kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
USUAL, OTHER = "sm_90", "gfx942"
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
"""Most bytes of shared memory that a program can have."""
BUDGETS = Path(__file__).with_name("budgets")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", re.M)
PRODUCTS = {"HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA"}
Figures = dict[str, int]


class Elsewhere(DriverBase):
    """A driver whose device is any target: it compiles, and does nothing else."""

    def __init__(self) -> None:
        self.name = "sm_90"

    @classmethod
    def is_active(cls) -> bool:
        """Yes."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Launchers are never built."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """Return the target that is compiled for."""
        return TARGETS[self.name]

    def get_active_torch_device(self) -> torch.device:
        """Return where tensors are."""
        return torch.device("meta")

    def get_current_device(self) -> int:
        """Return one number for each target: Triton keeps compiled kernels by it."""
        return list(TARGETS).index(self.name)

    def get_current_stream(self, device: int) -> int:
        """Nothing is queued."""
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        """Nothing can be timed."""
        raise RuntimeError("a kernel that is tuned by timing has no budget")


HERE = Elsewhere()


@contextmanager
def compiling(target: str) -> Iterator[dict[str, Any]]:
    """Yield what kernels are compiled to, by name, instead of being launched."""
    triton.runtime.driver.set_active(HERE)
    HERE.name = target
    launch, found = JITFunction.run, dict[str, Any]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        options.setdefault("enable_fp_fusion", True)
        made = launch(self, *args, grid=(1,), warmup=True, **options)
        name = self.fn.__name__.strip("_")
        found[name if name not in found else f"{name} {len(found)}"] = made
        return made

    JITFunction.run, known = compile_only, kernels.compute_capability_major
    kernels.compute_capability_major = lambda: (
        0 if target.startswith("gfx") else int(target[3:]) // 10
    )
    try:
        yield found
    finally:
        JITFunction.run, kernels.compute_capability_major = launch, known


def figures(made: Any, target: str) -> Figures:
    """Return the registers, spilled bytes, shared bytes and instructions of a compiled kernel."""
    if target.startswith("gfx"):
        return _amd(made.asm["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        use = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "--print-code", "--no-dataflow", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", use)
    assert found is not None
    ops = [found[1].split(".") for found in INSTRUCTION.finditer(code)]
    assert ops, "the disassembler writes otherwise"
    accesses = [op for op in ops if op[0] in ("LDG", "STG")]
    wide = sum(op[-1] == "128" for op in accesses)
    return {
        "registers": int(found[1]),
        "spilled": int(found[2]) + int(found[3]) + sum(op[0] in ("LDL", "STL") for op in ops),
        "shared": made.metadata.shared,
        "loop": _loop(code),
        "products": sum(op[0] in PRODUCTS for op in ops),
        "accesses of 16 bytes": wide,
        "other accesses": len(accesses) - wide,
    }


def _loop(code: str) -> int:
    """Count the instructions of the longest loop; 0 without one."""
    labels = {found[1]: found.start() for found in re.finditer(r"^\.(L_x_\d+):", code, re.M)}
    longest = 0
    for found in INSTRUCTION.finditer(code):
        aim = re.search(r"\(\.(L_x_\d+)\)", found[2])
        start = (
            labels.get(aim[1], found.end()) if found[1].startswith("BRA") and aim else found.end()
        )
        longest = max(longest, len(INSTRUCTION.findall(code, start, found.end())))
    # A program ends in a jump to itself.
    return longest if longest > 1 else 0


def _amd(code: str) -> Figures:
    def read(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", code)
        assert found is not None, f"no {key}"
        return int(found[1])

    spills = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    return {
        "registers": read("vgpr_count"),
        "spilled": sum(map(read, spills)),
        "shared": read("group_segment_fixed_size"),
        "products": len(re.findall("v_mfma", code)),
        "accesses of 16 bytes": len(re.findall(r"(?:load|store)_dwordx4", code)),
    }


def _tool(name: str, *args: str) -> str:
    done = subprocess.run([str(TOOLS / name), *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


Launches = Mapping[str, Callable[[], object]]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def measured(launch: Callable[[], object], target: str) -> dict[str, Figures]:
    """Return the figures of each kernel that a launch compiles for a target."""
    with compiling(target) as found:
        launch()
    return {name: figures(made, target) for name, made in found.items()}


def budget_test(name: str, launches: Launches) -> Callable[..., None]:
    """Return a test that holds the kernels of some launches to ``budgets/NAME.json``.

    By default that is every launch for one target, and the first for one of another compiler;
    ``make matrix`` has the others.
    """
    first, *_ = launches
    some = {(first, OTHER), *((launch, USUAL) for launch in launches)}
    cases = [
        pytest.param(launch, target, marks=[] if (launch, target) in some else pytest.mark.matrix)
        for launch in launches
        for target in TARGETS
    ]

    @pytest.mark.parametrize(("launch", "target"), cases)
    def test(launch: str, target: str) -> None:
        recorded = json.loads((BUDGETS / f"{name}.json").read_text("utf-8"))
        if recorded["triton"] != triton.__version__:
            pytest.skip(f"recorded with Triton {recorded['triton']}")
        found = measured(launches[launch], target)
        for kernel, figure in found.items():
            assert figure["spilled"] == 0, f"{kernel} spills registers"
            assert figure["shared"] <= SHARED[target], f"{kernel} has too much shared memory"
        assert found == recorded["launches"][launch][target], f"tests.triton.compiled {name}"

    return test


def write(name: str) -> None:
    """Record the budgets of the launches of ``test_code_NAME.py``."""
    launches = importlib.import_module(f"tests.triton.test_code_{name}").LAUNCHES
    found = {
        launch: {target: measured(call, target) for target in TARGETS}
        for launch, call in launches.items()
    }
    record = {"triton": triton.__version__, "launches": found}
    text = re.sub(r"\{\n\s+([^{}]*?)\n\s+\}", _on_one_line, json.dumps(record, indent=1))
    (BUDGETS / f"{name}.json").write_text(text + "\n", "utf-8")


def _on_one_line(found: re.Match[str]) -> str:
    return "{" + re.sub(r"\n\s+", " ", found[1]) + "}"


if __name__ == "__main__":
    every = [file.stem.removeprefix("test_code_") for file in BUDGETS.parent.glob("test_code_*.py")]
    for chosen in sys.argv[1:] or sorted(every):
        write(chosen)
