"""Rules about who imports whom: floors, cycles, torch, and imports inside functions."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.house.tree import PACKAGE, Module, dotted, functions, modules

# Rooms by floor; imports point down. A room's config.py and the model families stand on floor 0.
FLOORS: dict[str, int] = {
    "config": 0, "files": 0, "mesh": 0, "spec": 0, "schedule": 0, "run": 0, "recipes": 0,
    "failures": 0, "finetune": 0,
    "comm": 1, "kernels": 1, "offload": 1, "planner": 1,
    "optim": 2, "data": 2,
    "layers": 3,
    "moe": 4,
    "model": 5,
    "parallel": 6,
    "checkpoint": 7, "convert": 7,
    "training": 8, "proof": 8,
    "cli": 9, "api": 9, "__main__": 9,
}  # fmt: skip

# Rooms of one floor that may use each other, in this direction only, each with its reason.
SIDEWAYS: dict[tuple[str, str], str] = {
    ("convert", "checkpoint"): "import and export write and read checkpoints",
    ("proof", "training"): "verify runs the training step it proves",
    ("cli", "api"): "commands are thin over the Python face",
    ("__main__", "cli"): "`python -m moefold` is the command line",
}

# Rooms that never import one another, in this direction, each with its reason.
APART: dict[tuple[str, str], str] = {
    ("parallel", "planner"): "the engine runs a layout; it counts by the layers' descriptions",
    ("planner", "training"): "training asks the planner, which knows records alone",
    ("spec", "planner"): "descriptions of layers do not know who counts by them",
}

# Rooms that import no torch, themselves or through what they import.
TORCH_FREE = {
    "config",
    "files",
    "mesh",
    "spec",
    "schedule",
    "planner",
    "run",
    "finetune",
    "recipes",
}
# What stands for torch: the packages that load it.
TORCHES = {"torch", "torchvision", "transformers", "triton", "torchao"}

# The room that talks to other ranks; the others may use torch's sharding, whose calls are its own,
# and `doctor` asks which back ends are there.
TALKS = "moefold/comm/"
SHARDING = tuple(f"torch.distributed.{part}" for part in ("fsdp", "tensor", "device_mesh"))
ASKS = {"moefold/cli/doctor.py"}

# Where a command may import the package when it runs, so that `--help` stays quick.
LAUNCHERS = ("moefold/cli/", "moefold/__main__.py")


@dataclass(frozen=True)
class Import:
    """One imported module: its full dotted name, the line, and whether a function holds it."""

    target: str
    line: int
    local: bool


def imports_of(module: Module, known: dict[str, Module]) -> list[Import]:
    """Return what ``module`` imports anywhere: at its top, under TYPE_CHECKING, in functions."""
    if module not in _found:
        _found[module] = list(_read(module, known))
    return _found[module]


_found: dict[Module, list[Import]] = {}


def _read(module: Module, known: dict[str, Module]) -> Iterator[Import]:
    inside = {id(c) for node in functions(module.nodes) for c in ast.walk(node)}
    for node in module.nodes:
        local = id(node) in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, local)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield Import(inner if inner in known else source, node.lineno, local)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = module.name.split(".")
    if not module.path.endswith("__init__.py"):
        package = package[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


GROUND = (
    "moefold/model/families/",
    "moefold/layers/kinds/",
    "moefold/moe/describe.py",
    "moefold/data/errors.py",
    "moefold/data/folder/",
)


def is_ground(module: Module) -> bool:
    """Say whether a file stands on floor 0 wherever its room stands."""
    return module.path.endswith("/config.py") or module.path.startswith(GROUND)


def floor(module: Module) -> int | None:
    """Return the floor of a module; None for a room that has no floor yet."""
    if module.name == PACKAGE or module.path.endswith("__init__.py") or is_ground(module):
        return 0
    return FLOORS.get(module.room)


def inner_edges(root: Path) -> Iterator[tuple[Module, Module, Import]]:
    """Yield each import of one module of the package by another."""
    known = modules(root)
    for module in known.values():
        for found in imports_of(module, known):
            if found.target in known and found.target not in (module.name, PACKAGE):
                yield module, known[found.target], found


def point_down(root: Path) -> list[str]:
    """Imports point down between floors; sideways only where SIDEWAYS says why."""
    breaches = [
        module.at(1, f"room {module.room!r} has no floor; give it one in tests/house/imports.py")
        for module in modules(root).values()
        if floor(module) is None
    ]
    for module, target, found in inner_edges(root):
        here, there = floor(module), floor(target)
        if here is None or there is None:
            continue
        if there > here:
            text = f"floor {here} imports {target.name} of floor {there}: imports point down"
            breaches.append(module.at(found.line, text))
        elif here == there > 0 and module.room != target.room:
            if (module.room, target.room) not in SIDEWAYS:
                text = f"{module.room} imports {target.name} of its own floor {here}"
                breaches.append(module.at(found.line, text))
        elif module.room == "config" and target.room not in ("config", "files"):
            text = f"config/ knows no field of any feature, yet imports {target.name}"
            breaches.append(module.at(found.line, text))
    return breaches


def kept_apart(root: Path) -> list[str]:
    """No room imports one that APART keeps from it, not even the records of its config.py."""
    return [
        module.at(found.line, f"{module.room} imports {target.name}: {reason}")
        for module, target, found in inner_edges(root)
        if (reason := APART.get((module.room, target.room)))
    ]


def no_cycles(root: Path) -> list[str]:
    """No module reaches itself by imports of any kind."""
    reach: dict[str, dict[str, int]] = {name: {} for name in modules(root)}
    for module, target, found in inner_edges(root):
        reach[module.name].setdefault(target.name, found.line)
    if _without_cycles(reach):
        return []
    breaches, done = [], set()
    for start in sorted(reach):
        loop = _loop_from(start, reach)
        if loop and not done.intersection(loop):
            done.update(loop)
            first = modules(root)[loop[0]]
            text = "import cycle: " + " -> ".join([*loop, loop[0]])
            breaches.append(first.at(reach[loop[0]][loop[1 % len(loop)]], text))
    return breaches


def _without_cycles(reach: dict[str, dict[str, int]]) -> bool:
    """Say at little cost that there is none."""
    try:
        TopologicalSorter(reach).prepare()
    except CycleError:
        return False
    return True


def _loop_from(start: str, reach: dict[str, dict[str, int]]) -> list[str]:
    """Return a shortest way from ``start`` back to it, without its end; empty if there is none."""
    came_from: dict[str, str] = {}
    front = [start]
    while front:
        after = []
        for name in front:
            for target in reach[name]:
                if target == start:
                    way = [name]
                    while way[-1] != start:
                        way.append(came_from[way[-1]])
                    return way[::-1]
                if target not in came_from:
                    came_from[target] = name
                    after.append(target)
        front = after
    return []


def is_torch_free(module: Module) -> bool:
    """Say whether the plan of the house promises that a file needs no torch."""
    return module.name == PACKAGE or is_ground(module) or module.room in TORCH_FREE


def no_torch(root: Path) -> list[str]:
    """Torch-free rooms reach no torch through anything they import."""
    known = modules(root)
    direct = {
        name: [f for f in imports_of(module, known) if f.target.split(".")[0] in TORCHES]
        for name, module in known.items()
    }
    breaches, reaching = [], _importers([name for name, found in direct.items() if found], known)
    for module in known.values():
        if not is_torch_free(module) or module.name not in reaching:
            continue
        for way in _ways(module.name, known):
            for found in direct[way[-1]]:
                through = "" if len(way) == 1 else f" through {' -> '.join(way[1:])}"
                text = f"imports {found.target}{through}, and this file is torch-free"
                breaches.append(module.at(found.line if len(way) == 1 else 1, text))
    return breaches


def _importers(targets: list[str], known: dict[str, Module]) -> set[str]:
    """Return modules and all that reach one of them."""
    by: dict[str, set[str]] = {name: set() for name in known}
    for module in known.values():
        for found in imports_of(module, known):
            by.get(found.target, set()).add(module.name)
    reaching: set[str] = set()
    while targets:
        name = targets.pop()
        if name not in reaching:
            reaching.add(name)
            targets += by[name]
    return reaching


def _ways(start: str, known: dict[str, Module]) -> Iterator[list[str]]:
    """Yield a chain of imports from ``start`` to each module it reaches, itself first."""
    seen, stack = {start}, [[start]]
    while stack:
        way = stack.pop()
        yield way
        for found in imports_of(known[way[-1]], known):
            if found.target in known and found.target not in seen:
                seen.add(found.target)
                stack.append([*way, found.target])


def no_local_imports(root: Path) -> list[str]:
    """No function imports the package itself; launchers excepted."""
    return [
        module.at(found.line, f"imports {target.name} inside a function")
        for module, target, found in inner_edges(root)
        if found.local and not module.path.startswith(LAUNCHERS)
    ]


def one_import_of_triton(root: Path) -> list[str]:
    """Triton, which not every install has, is imported by kernels/fused.py alone."""
    known = modules(root)
    return [
        module.at(found.line, "imports triton; kernels/fused.py hands it on")
        for module in known.values()
        for found in imports_of(module, known)
        if found.target.split(".")[0] == "triton" and module.path != "moefold/kernels/fused.py"
    ]


def only_comm_talks(root: Path) -> list[str]:
    """No room but comm/ uses torch.distributed, its sharding excepted."""
    breaches = []
    for module in modules(root).values():
        if module.path.startswith(TALKS) or module.path in ASKS:
            continue
        used = {
            (node.lineno, name)
            for node in module.nodes
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute)
            for name in _names_used(node)
            if f"{name}.".startswith("torch.distributed.")
            and not f"{name}.".startswith(tuple(f"{part}." for part in SHARDING))
        }
        breaches += [
            module.at(line, f"uses {name}; comm/ alone talks to other ranks")
            for line, name in sorted(used)
        ]
    return breaches


def _names_used(node: ast.Import | ast.ImportFrom | ast.Attribute) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names if not node.level)
    elif not dotted(node).endswith(".distributed"):
        yield dotted(node)


def _is_command(module: Module) -> bool:
    """Say whether a file describes a command; ``_`` files are loaded when a command runs."""
    return module.room == "cli" and not module.path.rpartition("/")[2].startswith("_")


_LOADER = """
import importlib, json, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in TORCHES:
            raise ImportError(f"{name} is barred here")

TORCHES, NAMES = json.load(sys.stdin)
sys.meta_path.insert(0, NoTorch())
failed = {}
for name in NAMES:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def loads_without_torch(root: Path) -> list[str]:
    """Torch-free files and every command's file load in a process where torch is barred."""
    known = modules(root)
    wanted = [module for module in known.values() if is_torch_free(module) or _is_command(module)]
    task = json.dumps([sorted(TORCHES), [module.name for module in wanted]])
    command = [sys.executable, "-c", _LOADER]
    told = {"input": task, "capture_output": True, "text": True, "timeout": 60}
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=root, env=apart, **told)
    if done.returncode:
        return [f"loading the torch-free files failed: {done.stderr[-2000:]}"]
    failed = json.loads(done.stdout.splitlines()[-1])
    return [
        known[name].at(1, f"does not load without torch: {why}") for name, why in failed.items()
    ]
