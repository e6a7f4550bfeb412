"""The package as data: every module of a tree with its source and its syntax tree.

A rule is a function from the root of a tree to its breaches, so that it runs on the real tree and
on small trees with a planted fault alike.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGE = "moefold"


@dataclass(frozen=True, eq=False)
class Module:
    """One source file: its dotted name, its path below the root, its text and its syntax."""

    name: str
    path: str
    source: str
    syntax: ast.Module

    @property
    def room(self) -> str:
        """The first folder or file below the package: ``moe`` of ``moefold.moe.router``."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax, walked once for all rules."""
        return list(ast.walk(self.syntax))

    def at(self, line: int, text: str) -> str:
        """Word a breach at a line of this file."""
        return f"{self.path}:{line}: {text}"


@cache
def modules(root: Path) -> dict[str, Module]:
    """Read every Python file of the package below ``root``, by dotted name."""
    found = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        path = file.relative_to(root)
        parts = path.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = file.read_text(encoding="utf-8")
        syntax = ast.parse(source, filename=str(path))
        found[name] = Module(name, path.as_posix(), source, syntax)
    return found


def functions(nodes: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method, nested ones too."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def dotted(node: ast.AST) -> str:
    """Write a name or attribute chain as text: ``torch.autograd.Function``; else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    return ""
