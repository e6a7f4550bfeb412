"""Rules about words: where features are named, what stalls a device, what is not left behind."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import Module, dotted, functions, modules

# The general machinery knows no feature by name.
AT_HOME = re.compile(r"moe(?!fold)|fp8|cuda[ _-]?graph|deepep", re.IGNORECASE)
GENERAL = ("moefold/schedule/", "moefold/comm/", "moefold/training/trainer.py")

# Code that runs on a device never waits for the host: these read values back, or size a result by
# values (which does the same).
HOT = ("moefold/moe/", "moefold/kernels/")
WAITING_CALLS = {"item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique"}
# The functions that may, because a host-side count is what they are for: "file::function".
MAY_WAIT: set[str] = {
    "moefold/kernels/grouped/grouped.py::leaves_empty_groups_unwritten",
    "moefold/kernels/grouped/loop.py::group_spans",
    "moefold/kernels/scaled/rows.py::of_groups",  # an emulation, which loops over runs
    "moefold/moe/dispatch/routing_plan.py::host_counts",
}
# Names of tensors carry their dims: x_TD, offs_E.
TENSOR_NAME = re.compile(r"[a-z0-9]_[A-Z][A-Za-z]*$")
REDUCTIONS = {"sum", "max", "min", "amax", "amin", "any", "all", "mean", "argmax", "argmin"}
ABOUT_SHAPE = {"shape", "size", "numel", "ndim", "dim", "dtype", "stride", "element_size"}

# Beginnings of docstrings that cannot be read without the sentence before them.
LEANING = re.compile(r"\s*(The same|See|That of|As it|Like)\b")

# What a docstring or a comment refers to by its name.
REFERENCE = re.compile(r":\w+:`~?([\w.]+)`|``(moefold\.[\w.]+)``")

# A remark that puts work off, spelled so that this file does not hold it.
PUT_OFF = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
# Folders that exist on one machine only.
MACHINE = re.compile(r"(?<![\w.])/(root|home/\w+|Users/\w+|work|tmp/venv|opt/\w+)/")
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".sh", ""}
SKIPPED = {".git", ".venv", "runs", "build", "dist", "__pycache__", ".hypothesis"}
SKIPPED |= {".pytest_cache", ".ruff_cache"}


def words_at_home(root: Path) -> list[str]:
    """Schedules, communication and the loop name no feature."""
    return [
        module.at(number, f"names {found.group()!r}, which is not known here")
        for module in modules(root).values()
        if module.path.startswith(GENERAL)
        for number, line in enumerate(module.source.splitlines(), 1)
        for found in AT_HOME.finditer(line)
    ]


def never_waits(root: Path) -> list[str]:
    """Device code reads no value back to the host, except in the functions of MAY_WAIT."""
    breaches = []
    for module in modules(root).values():
        if not module.path.startswith(HOT):
            continue
        allowed = {
            id(child)
            for node in functions(module.nodes)
            if f"{module.path}::{node.name}" in MAY_WAIT
            for child in ast.walk(node)
        }
        for node, text in _waits(module):
            if id(node) not in allowed:
                breaches.append(module.at(node.lineno, f"{text} waits for the device"))
    return breaches


def _waits(module: Module) -> Iterator[tuple[ast.expr, str]]:
    for scope in [module.syntax, *functions(module.nodes)]:
        masks = _mask_names(scope)
        for node in _own_nodes(scope):
            if isinstance(node, ast.Call) and (text := _call_waits(node)):
                yield node, text
            elif isinstance(node, ast.Subscript) and _is_mask(node.slice, masks):
                yield node, f"indexing by the mask {ast.unparse(node.slice)}"
            elif isinstance(node, ast.IfExp) and _reads_value(node.test):
                yield node.test, f"deciding by {ast.unparse(node.test)}"
    for node in module.nodes:
        if isinstance(node, ast.If | ast.While | ast.Assert) and _reads_value(node.test):
            yield node.test, f"deciding by {ast.unparse(node.test)}"


def _call_waits(call: ast.Call) -> str:
    """Word what makes a call wait; empty when it does not."""
    if isinstance(call.func, ast.Name):
        converts = call.func.id in ("int", "float", "bool") and len(call.args) == 1
        return f"{ast.unparse(call)}" if converts and _reads_value(call.args[0]) else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    name = call.func.attr
    if name in WAITING_CALLS and dotted(call.func.value) not in ("np", "numpy"):
        return f".{name}("
    if name == "where" and len(call.args) == 1 and not call.keywords:
        return ".where( with one argument"
    if name == "to" and any(_is_cpu(value) for value in [*call.args, *_values(call)]):
        return '.to("cpu")'
    if name == "repeat_interleave" and _sizes_itself(call):
        return ".repeat_interleave( by a tensor, without output_size"
    return ""


def _values(call: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in call.keywords]


def _reads_value(node: ast.expr) -> bool:
    """Say whether a plain number or truth value is made from what a tensor holds."""
    if isinstance(node, ast.Compare):
        if any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
            return False
        return any(_reads_value(side) for side in [node.left, *node.comparators])
    if isinstance(node, ast.BoolOp):
        return any(_reads_value(value) for value in node.values)
    if isinstance(node, ast.UnaryOp):
        return _reads_value(node.operand)
    if isinstance(node, ast.BinOp):
        return _reads_value(node.left) or _reads_value(node.right)
    if isinstance(node, ast.Subscript):
        return _reads_value(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        return name not in ABOUT_SHAPE and (name in REDUCTIONS or _reads_value(node.func.value))
    return bool(TENSOR_NAME.search(dotted(node)))


def _own_nodes(scope: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a scope, not those of functions nested in it."""
    stack = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.expr):
            yield node
        stack.extend(ast.iter_child_nodes(node))


def _is_cpu(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == "cpu"


def _sizes_itself(call: ast.Call) -> bool:
    """Say whether the number of rows of a repeat hangs on what a tensor holds."""
    if "output_size" in {keyword.arg for keyword in call.keywords}:
        return False
    method = dotted(call.func).partition(".")[0] != "torch"
    repeats = [*_values(call), *call.args[0 if method else 1 :]]
    return any(
        _reads_value(value)
        or (isinstance(value, ast.Call) and dotted(value.func) == "torch.tensor")
        for value in repeats
    )


def _mask_names(scope: ast.AST) -> set[str]:
    """Collect the names that a function binds to a comparison, or to one of masks."""
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and _is_mask(node.value, names):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _is_mask(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Compare):
        return not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor):
        return _is_mask(node.left, names) or _is_mask(node.right, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("bool", "logical_and", "logical_or", "logical_not", "isfinite")
    if isinstance(node, ast.Tuple):
        return any(_is_mask(item, names) for item in node.elts)
    words = dotted(node).rpartition(".")[2].split("_")
    return (isinstance(node, ast.Name) and node.id in names) or bool({"mask", "valid"} & set(words))


def docstrings_stand_alone(root: Path) -> list[str]:
    """A docstring, of an attribute too, can be read without what stands before it."""
    return [
        module.at(node.lineno, f"a docstring begins with {found[1]!r}: say what the thing is")
        for module in modules(root).values()
        for node in module.nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and (found := LEANING.match(node.value.value))
    ]


def references_exist(root: Path) -> list[str]:
    """What docstrings and comments refer to is defined, under the module that they name if any."""
    package = modules(root)
    defined = {name: {*_defined(module)} for name, module in package.items()}
    anywhere = {name for names in defined.values() for name in names}
    return [
        module.at(number, f"refers to {target}, which is not defined")
        for module in package.values()
        for number, line in enumerate(module.source.splitlines(), 1)
        for target in (found[1] or found[2] for found in REFERENCE.finditer(line))
        if not _is_defined(target, defined, anywhere)
    ]


def arguments_exist(root: Path) -> list[str]:
    """The arguments that a docstring describes are those of its function, or of its class."""
    return [
        module.at(node.lineno, f"{node.name} has no argument {name}, which its docstring describes")
        for module in modules(root).values()
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for name in _described(ast.get_docstring(node) or "")
        if name not in _arguments(node)
    ]


def _described(docstring: str) -> list[str]:
    """Return the names that a docstring's section on arguments describes."""
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    lines = re.findall(r"^ {4}([\w*][\w, *]*):", section, re.MULTILINE)
    return [name.strip(" *") for line in lines for name in line.split(",")]


def _arguments(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Return a function's arguments, or the fields and the initialiser's arguments of a class."""
    inner = ast.walk(node) if isinstance(node, ast.ClassDef) else [node.args]
    names = {item.arg for part in inner for item in ast.walk(part) if isinstance(item, ast.arg)}
    fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
    return names | {field.id for field in fields if isinstance(field, ast.Name)}


def _defined(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _is_defined(target: str, defined: dict[str, set[str]], anywhere: set[str]) -> bool:
    if not target.startswith("moefold."):
        return anywhere.issuperset(target.split("."))
    module, names = target, list[str]()
    while module not in defined and "." in module:
        module, _, name = module.rpartition(".")
        names.append(name)
    return defined.get(module, set()).issuperset(names)


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of every file a person writes below ``root``."""
    for folder, inner, names in os.walk(root):
        here = Path(folder).relative_to(root)
        inner[:] = sorted(name for name in inner if not _is_skipped(here / name))
        for name in sorted(names):
            if Path(name).suffix in TEXT and name != ".git":  # a file where a tree is one of many
                path = here / name
                yield path.as_posix(), (root / path).read_text("utf-8", "replace")


def _is_skipped(folder: Path) -> bool:
    built = folder.name in SKIPPED or folder.name.endswith(".egg-info")
    return built or folder == Path("tests/data")


def nothing_left_behind(root: Path) -> list[str]:
    """No remark puts work off, and no text holds a folder of one machine."""
    return [
        f"{path}:{number}: {text} {found.group()!r}"
        for path, whole in texts(root)
        for number, line in enumerate(whole.splitlines(), 1)
        for pattern, text in ((PUT_OFF, "puts work off:"), (MACHINE, "a folder of one machine:"))
        for found in pattern.finditer(line)
    ]
