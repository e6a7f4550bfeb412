"""Conversations made from the docstrings of Python's standard library: something to tune on.

One asks what a function or class does and is answered by the first paragraph of its docstring.
"""

import ast
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from moefold.data.config import DataError, PythonStdlib
from moefold.data.sources import Skipped, StdlibReader
from moefold.files import write_text

SHORTEST, LONGEST = 20, 400
"""Characters of an answer."""


def write_chats(file: Path, number: int) -> int:
    """Write conversations as JSON lines, the same with the same Python, and return how many.

    Raises:
        DataError: where ``number`` is not positive, the library has fewer, or the file is there and
            holds anything else.
    """
    found = dict(chats())
    if not 0 < number <= len(found):
        raise DataError(f"{number} conversations: this Python's library makes 1 to {len(found)}")
    # In an order of chance, so that any beginning is drawn from the whole library.
    drawn = sorted(found, key=lambda asked: sha256(asked.encode()).digest())[:number]
    rows = (
        [{"role": "user", "content": asked}, {"role": "assistant", "content": found[asked]}]
        for asked in drawn
    )
    text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    if file.exists() and file.read_bytes() != text.encode():
        raise DataError(f"{file}: is there already and holds something else; name a new file")
    write_text(file, text)
    return number


def chats() -> Iterator[tuple[str, str]]:
    """Yield questions and answers; the first docstring that answers a question counts."""
    asked: set[str] = set()
    for name, text in StdlibReader(PythonStdlib()).documents(Skipped()):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue  # examples of what is no Python are in the library too
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path, node in _public(tree):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            question = f"What does the {kind} {module}.{path} do?"
            answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if SHORTEST <= len(answer) <= LONGEST and question not in asked:
                asked.add(question)
                yield question, answer


def _public(
    node: ast.AST, at: str = ""
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield public functions and classes with their dotted names, those inside classes too."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if inner.name.startswith("_"):
                continue
            yield at + inner.name, inner
            if isinstance(inner, ast.ClassDef):
                yield from _public(inner, f"{at}{inner.name}.")
