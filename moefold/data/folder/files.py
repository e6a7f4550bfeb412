"""The files of a tokenizer's folder, as text."""

from collections.abc import Iterator
from pathlib import Path

from moefold.data.errors import DataError
from moefold.files import path_in_errors, read_json

TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
"""Only the ids of special tokens and the names of model and tokenizer are read from this file."""
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE_FOLDER = "additional_chat_templates"
TEMPLATE_VALUES = "chat_template_kwargs.json"
"""Values of the template that all conversations of the training data have."""
SIDECAR_FILES = (
    TOKENIZER_CONFIG,
    TEMPLATE_FILE,
    TEMPLATE_VALUES,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
)
"""Files next to a ``tokenizer.json`` that import and export keep with it."""
MAX_BYTES = 4 * 2**20

_OTHER_FORMS = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "chat_template.json",
)
"""Files that ``transformers`` does not read where there is a ``tokenizer.json``."""


def sidecar_paths(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files next to a ``tokenizer.json`` that exist."""
    names = [*SIDECAR_FILES]
    templates = folder / TEMPLATE_FOLDER
    if templates.is_dir():
        names += [f"{TEMPLATE_FOLDER}/{file.name}" for file in sorted(templates.glob("*.jinja"))]
    for name in names:
        if (folder / name).is_file():
            yield name, folder / name


def read_sidecars(folder: Path) -> dict[str, str]:
    """Return the text of the files next to a ``tokenizer.json``, and of ``config.json``.

    Raises:
        DataError: if a file is too large, or a ``.json`` file does not hold an object.
    """
    files = dict[str, str]()
    paths = [*sidecar_paths(folder)]
    if (folder / CONFIG).is_file():
        paths.append((CONFIG, folder / CONFIG))
    for name, path in paths:
        if name.endswith(".json"):
            read_json(path, DataError, MAX_BYTES)
        with path_in_errors(path, DataError):
            files[name] = path.read_text(encoding="utf-8-sig")
    return files


def unread_notes(folder: Path) -> list[str]:
    """Return a note on files that ``transformers`` does not read beside a ``tokenizer.json``."""
    unread = [name for name in _OTHER_FORMS if (folder / name).is_file()]
    named = ", ".join(unread)
    return [f"files that are not read beside {TOKENIZER} are left out: {named}"] if unread else []
