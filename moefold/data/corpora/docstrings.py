"""Conversations from the docstrings of Python's standard library, to try fine-tuning.

The question is what a function or class does, the answer its docstring's first paragraph.
"""

import ast
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from moefold.data.config import DataError, PythonStdlib
from moefold.data.corpora.sources import Skipped, StdlibReader
from moefold.files import write_text

MIN_ANSWER = 20
MAX_ANSWER = 400
"""Minimum and maximum length of an answer in characters."""


def write_chats(file: Path, number: int) -> int:
    """Write conversations as JSON lines, reproducible with one Python version; return their number.

    Raises:
        DataError: if ``number`` is not positive, the library yields fewer, or the file exists with
            other content.
    """
    answers = dict(generate_chats())
    if not 0 < number <= len(answers):
        raise DataError(f"{number} conversations: this Python's library has 1 to {len(answers)}")
    # In random order, so that any prefix is a sample of the whole library.
    questions = sorted(answers, key=lambda question: sha256(question.encode()).digest())[:number]
    conversations = (
        [{"role": "user", "content": question}, {"role": "assistant", "content": answers[question]}]
        for question in questions
    )
    text = "".join(json.dumps({"messages": row}) + "\n" for row in conversations)
    if file.exists() and file.read_bytes() != text.encode():
        raise DataError(f"{file}: already exists with other content; name a new file")
    write_text(file, text)
    return number


def generate_chats() -> Iterator[tuple[str, str]]:
    """Yield questions and answers, each question once."""
    seen: set[str] = set()
    for name, text in StdlibReader(PythonStdlib()).documents(Skipped()):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue  # some files are deliberately invalid
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path, node in _public_definitions(tree):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            question = f"What does the {kind} {module}.{path} do?"
            answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if MIN_ANSWER <= len(answer) <= MAX_ANSWER and question not in seen:
                seen.add(question)
                yield question, answer


def _public_definitions(
    node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield public functions and classes, also nested in classes, with their dotted names."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if inner.name.startswith("_"):
                continue
            yield prefix + inner.name, inner
            if isinstance(inner, ast.ClassDef):
                yield from _public_definitions(inner, f"{prefix}{inner.name}.")
