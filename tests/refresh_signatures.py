"""Reads what other packages' functions take from their sources, without importing them.

    python -m tests.refresh_signatures DEEP_EP TRANSFORMER_ENGINE DEEP_GEMM

All are clones of the packages' repositories. Written is ``tests/data/dispatch_signatures.json``:
of each function that an adapter calls the parameters' names, kinds and defaults, and how many
values it returns where its source says so; and ``tests/data/deep_gemm_signatures.json``, parameters
and which are required; no line of the source itself.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moefold.moe.dispatch.config import DeepEp, HybridEp, NcclEp

FACTS = Path(__file__).parent / "data" / "dispatch_signatures.json"
PRODUCTS = FACTS.with_name("deep_gemm_signatures.json")
DEEP_GEMM = {"v2.1.1": "csrc/apis/gemm.hpp", "main": "csrc/apis/gemm.hpp"}
MULTIPLIES = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous")
TE = "transformer_engine/pytorch/ep.py"
SOURCES = {
    DeepEp: {"v1.2.1": "deep_ep/buffer.py", "main": "deep_ep/buffers/legacy.py"},
    HybridEp: {"hybrid-ep": "deep_ep/hybrid_ep_buffer.py"},
    NcclEp: {f"release_v2.{n}": TE for n in (17, 18, 19)} | {"main": TE},
}


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions and methods by name; a class goes by the name of its ``__init__``."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    name = "" if inner.name == "__init__" else f".{inner.name}"
                    yield node.name + name, inner


def facts_of(function: ast.FunctionDef) -> dict[str, Any]:
    """Return what a function takes and how many values it returns."""
    found = function.args
    assert not (found.posonlyargs or found.vararg or found.kwarg), function.name
    plain = [None] * (len(found.args) - len(found.defaults)) + found.defaults
    takes = [
        [argument.arg, kind, None if default is None else ast.unparse(default)]
        for kind, arguments, defaults in (
            ("POSITIONAL_OR_KEYWORD", found.args, plain),
            ("KEYWORD_ONLY", found.kwonlyargs, found.kw_defaults),
        )
        for argument, default in zip(arguments, defaults, strict=True)
    ]
    values = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
    returns = sorted({len(value.elts) for value in values if isinstance(value, ast.Tuple)})
    return {"takes": takes, "returns": returns}


def _git(repository: str, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", repository, *words], capture_output=True, check=True, text=True
    ).stdout.strip()


def bound(source: str, name: str) -> list[tuple[str, bool]]:
    """Return what a function takes that C++ binds for Python, and whether it has to be given."""
    other = re.search(rf'm\.attr\("{name}"\) = m\.attr\("(\w+)"\)', source)
    name = other[1] if other else name
    (found,) = re.findall(rf'm\.def\("{name}",(.*?)\);\n', source, re.DOTALL)
    return [(one, not given) for one, given in re.findall(r'py::arg\("(\w+)"\)( =)?', found)]


def main(deep_ep: str, transformer_engine: str, deep_gemm: str) -> None:
    """Write the facts."""
    lines = []
    for revision, path in DEEP_GEMM.items():
        commit = _git(deep_gemm, "rev-parse", f"{revision}^{{commit}}")
        source = _git(deep_gemm, "show", f"{commit}:{path}")
        takes = {name: bound(source, name) for name in MULTIPLIES}
        facts = {"commit": commit, "path": path, "functions": takes}
        lines.append(f"{json.dumps(revision)}: {json.dumps(facts)}")
    PRODUCTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    every: dict[str, Any] = {}
    for record, paths in SOURCES.items():
        repository = transformer_engine if record is NcclEp else deep_ep
        wanted = {name for name, _ in record.required_calls}
        for revision, path in paths.items():
            source = dict(definitions(ast.parse(_git(repository, "show", f"{revision}:{path}"))))
            every.setdefault(record.model_fields["kind"].default, {})[revision] = {
                "commit": _git(repository, "rev-parse", f"{revision}^{{commit}}"),
                "path": path,
                "functions": {name: facts_of(source[name]) for name in sorted(wanted)},
            }
    lines = (f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in every.items())
    FACTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
