"""The raw run for fine-tuning a Hugging Face folder, with defaults or from a ``base=`` recipe."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moefold.data.folder.files import TEMPLATE_FILE, TOKENIZER_CONFIG
from moefold.files import read_json
from moefold.model.families.peft import base_folder, is_adapter

FOLDER = Path(__file__).parent / "recipes" / "folder"
PLAIN = FOLDER / "plain.jinja"
"""Chat template for folders without one."""
DEFAULT_DATA: dict[str, Any] = {"source": "python_stdlib", "holdout": 0.05}
"""Default training data for a Hugging Face folder."""
_BASE = "base="


def recipes() -> dict[str, Path]:
    """Return the paths of the recipes that leave model and tokenizer to the folder, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def require_base_model(source: str | Path) -> None:
    """Raise ``ValueError`` if ``source`` needs a base model: a fine-tuning recipe or an adapter."""
    if is_adapter(Path(source)):
        hint = (
            f"moefold train {base_folder(Path(source))} "
            f"'adapter={{kind: lora, from: {source}, rank: stored}}'"
        )
        raise ValueError(f"{source} is an adapter; to train it, name its base model: {hint}")
    if str(source) in recipes():
        hint = f"moefold train FOLDER {_BASE}{source}"
        raise ValueError(f"the recipe {source} needs a Hugging Face folder to fine-tune: {hint}")


def raw_run(folder: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the raw run of a Hugging Face folder, and the overrides still to be applied.

    The tokenizer is the folder's. Without ``base=RECIPE`` all weights are trained, by default on
    Python's standard library; an override such as
    ``data.train=[{source: jsonl, files: [notes.jsonl]}]`` names other data.

    Raises:
        ValueError: if the folder has no tokenizer and no override names one.
    """
    own = any(override.startswith("data.tokenizer") for override in overrides)
    if not own and not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; save the model's fast tokenizer there, or name one "
            "with data.tokenizer={kind: file, path: ...}"
        )
    bases = [override for override in overrides if override.startswith(_BASE)]
    remaining = [override for override in overrides if override not in bases]
    tokenizer = {"kind": "file", "path": str(folder)}
    raw: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).strip("-._") or "finetune",
        "model": {"family": "folder", "from": str(folder)},
    }
    if bases:
        file = folder / TOKENIZER_CONFIG
        templated = (folder / TEMPLATE_FILE).is_file() or (
            file.is_file() and read_json(file).get("chat_template")
        )
        template = {} if templated else {"template": str(PLAIN)}
        data = {"tokenizer": tokenizer | template}
        return raw | {"base": bases[-1][len(_BASE) :], "data": data}, remaining
    return raw | {
        "data": {"seq": 1024, "tokenizer": tokenizer, "train": [DEFAULT_DATA]},
        "optim": {"kind": "adamw", "lr": 1e-5, "schedule_lr": {"kind": "cosine", "warmup": 0.03}},
        "train": {"steps": 200, "batch": 8, "micro_batch": 1},
    }, remaining
