"""A rule about integers on a device: the narrow ones number rows and are never multiplied.

A row number fits 31 bits; the place of an element, row * columns, does not. So int32 (and the
int16 of sort keys) may be compared, added and handed to library calls, but is neither a factor of
a product nor an index of a gather, whose kernels would multiply it in its own width.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import Module, dotted, functions, modules

HOT = ("moefold/moe/", "moefold/kernels/")
CODES = "moefold/kernels/quantise/"
"""What is narrow there is codes of numbers and bits of floats: it numbers no rows."""
NARROW = {"int32", "int16", "int8", "uint8", "uint16", "uint32"}
# The functions that make narrow integers: row numbers, counts, keys, and codes as they lie.
MAKES_NARROW: set[str] = {
    "moefold/moe/dispatch/routing_plan.py::sort_copies",
    "moefold/moe/dispatch/third_party.py::row_ends",
    "moefold/kernels/grouped/grouped.py::leaves_empty_groups_unwritten",
    "moefold/kernels/grouped/fused.py::_tile_rows",
    "moefold/kernels/routing/fused.py::_key",
    "moefold/kernels/routing/fused.py::_count",
    "moefold/kernels/routing/fused.py::_place",
    "moefold/kernels/routing/fused.py::count_buckets",
    "moefold/kernels/routing/fused.py::_empty_order",
    "moefold/kernels/scaled/operands.py::contiguous_codes",
    "moefold/kernels/scaled/operands.py::as_uint8",
    "moefold/kernels/scaled/deep_gemm.py::multiply_runs",
    "moefold/kernels/scaled/scaled_grouped_mm.py::multiply_runs",
}
# What is narrow wherever it is seen: by contract offsets of groups and of segments are int32.
BY_CONTRACT = ("offs_", "cu_seqlens")
# Functions whose result is as wide as what they are given.
KEEPS = {"where", "cat", "stack", "minimum", "maximum", "clamp", "add", "sub", "diff", "cumsum"}
# Methods whose result is an index or a truth value, whatever they are called on.
WIDE_RESULT = {"argsort", "argmax", "argmin", "eq", "ne", "lt", "le", "gt", "ge", "tolist", "item"}
TWO_FORMS = ("index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce")
INDEXES = {"index_select", "gather", "take", "take_along_dim", "index_fill", "index_fill_"}
INDEXES |= {name + end for name in TWO_FORMS for end in ("", "_")}
MULTIPLIES = {"mul", "mul_", "multiply", "pow", "square", "outer", "addcmul", "bitwise_left_shift"}
PRODUCTS = (ast.Mult, ast.Pow, ast.LShift, ast.MatMult)


def narrow_integers(root: Path) -> list[str]:
    """Narrow integers number rows: they are no factor, no index, and made in few places."""
    breaches = []
    for module in modules(root).values():
        if module.path.startswith(HOT) and not module.path.startswith(CODES):
            breaches += [module.at(line, text) for line, text in sorted(set(_breaches(module)))]
    return breaches


def _breaches(module: Module) -> Iterator[tuple[int, str]]:
    for function in functions(module.nodes):
        names = _narrow_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.expr):
                yield from ((node.lineno, text) for text in _misuse(node, names))
        if f"{module.path}::{function.name}" not in MAKES_NARROW:
            yield from ((line, "makes a narrow integer here") for line in _made(function))


def _misuse(node: ast.expr, names: set[str]) -> Iterator[str]:
    """Word what is wrong with one expression, its parts left aside."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, PRODUCTS):
        for side in (node.left, node.right):
            if _is_narrow(side, names):
                yield f"multiplies the narrow {ast.unparse(side)}"
    elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if _is_narrow(part, names):
                yield f"indexes by the narrow {ast.unparse(part)}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method, given = node.func.attr, [*node.args, *(keyword.value for keyword in node.keywords)]
        if method not in INDEXES | MULTIPLIES:
            return
        if method in MULTIPLIES:
            given.append(node.func.value)
        verb = "indexes by" if method in INDEXES else "multiplies"
        for value in given:
            if _is_narrow(value, names):
                yield f"{verb} the narrow {ast.unparse(value)}"


def _narrow_names(function: ast.AST) -> set[str]:
    """Collect the names that a function binds to narrow integers, through chains of bindings."""
    names: set[str] = set()
    while True:
        before = len(names)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    names.update(_bound(target, node.value, names))
        if len(names) == before:
            return names


def _bound(target: ast.expr, value: ast.expr, names: set[str]) -> Iterator[str]:
    """Yield the names of a target that become narrow when ``value`` is bound to it."""
    if isinstance(target, ast.Tuple | ast.List):
        pairs = (
            zip(target.elts, value.elts, strict=False)
            if isinstance(value, ast.Tuple)
            # Values and indices of a sort, a maximum, a top-k: the second is an int64.
            else [(target.elts[0], value)]
        )
        for part, its_value in pairs:
            yield from _bound(part, its_value, names)
    elif isinstance(target, ast.Name) and _is_narrow(value, names):
        yield target.id


def _is_narrow(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Name | ast.Attribute) and dotted(node):
        name = dotted(node).rpartition(".")[2]
        return name.startswith(BY_CONTRACT) or (isinstance(node, ast.Name) and name in names)
    if isinstance(node, ast.BinOp):
        return _is_narrow(node.left, names) or _is_narrow(node.right, names)
    if isinstance(node, ast.UnaryOp | ast.Starred):
        return _is_narrow(node.operand if isinstance(node, ast.UnaryOp) else node.value, names)
    if isinstance(node, ast.IfExp):
        return _is_narrow(node.body, names) or _is_narrow(node.orelse, names)
    if isinstance(node, ast.Subscript):
        return _is_narrow(node.value, names)
    if isinstance(node, ast.Tuple | ast.List):
        return any(_is_narrow(part, names) for part in node.elts)
    return isinstance(node, ast.Call) and _gives_narrow(node, names)


def _gives_narrow(call: ast.Call, names: set[str]) -> bool:
    if _narrow_cast(call):
        return True
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if any(_names_a_type(value) for value in given) or not isinstance(call.func, ast.Attribute):
        return False
    if dotted(call.func.value) in ("torch", "F", "torch.nn.functional"):
        return call.func.attr in KEEPS and any(_is_narrow(value, names) for value in given)
    method = call.func.attr
    return method not in WIDE_RESULT | {"long"} and _is_narrow(call.func.value, names)


def _narrow_cast(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("int", "short", "byte"):
        return not call.args
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(dotted(value).rpartition(".")[2] in NARROW for value in given)


def _names_a_type(value: ast.expr) -> bool:
    name = dotted(value)
    return name.startswith("torch.") or name.endswith("dtype")


def _made(function: ast.AST) -> Iterator[int]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _narrow_cast(node):
            yield node.lineno
