"""Conversations from the docstrings of Python's standard library, to try fine-tuning on.

Each asks what a function or class does; the answer is the first paragraph of its docstring.
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
"""Minimum and maximum length of an answer in characters."""


def write_chats(file: Path, number: int) -> int:
    """Write conversations as JSON lines, reproducible with the same Python; return their number.

    Raises:
        DataError: if ``number`` is not positive, the library yields fewer, or the file exists with
            other content.
    """
    found = dict(chats())
    if not 0 < number <= len(found):
        raise DataError(f"{number} conversations: this Python's library has 1 to {len(found)}")
    # In random order, so that any beginning is a sample of the whole library.
    drawn = sorted(found, key=lambda asked: sha256(asked.encode()).digest())[:number]
    rows = (
        [{"role": "user", "content": asked}, {"role": "assistant", "content": found[asked]}]
        for asked in drawn
    )
    text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    if file.exists() and file.read_bytes() != text.encode():
        raise DataError(f"{file}: already exists with other content; name a new file")
    write_text(file, text)
    return number


def chats() -> Iterator[tuple[str, str]]:
    """Yield questions and answers, each question once."""
    asked: set[str] = set()
    for name, text in StdlibReader(PythonStdlib()).documents(Skipped()):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue  # the library has files that are deliberately not valid Python
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
    """Yield public functions and classes, also inside classes, with their dotted names."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if inner.name.startswith("_"):
                continue
            yield at + inner.name, inner
            if isinstance(inner, ast.ClassDef):
                yield from _public(inner, f"{at}{inner.name}.")
