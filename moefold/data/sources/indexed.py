"""Ready token files as a source: nothing is tokenized, the files are used where they lie."""

import json
from pathlib import Path

import numpy as np

from moefold.data.config import DataError, read_json
from moefold.data.config import IndexedTokens as Record
from moefold.data.index import Indexed, files_of
from moefold.data.order import key_of


def said_file(prefix: str | Path) -> Path:
    """Return the file beside token files that says which tokenizer made them."""
    return files_of(prefix)[1].with_suffix(".json")


def say(prefix: Path, **facts: str | int) -> None:
    """Write the facts about token files beside them."""
    said_file(prefix).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


class IndexedTokens:
    """Token files in Megatron's format, checked before use."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.prefix = Path(record.prefix)
        self.indexed = Indexed(record.prefix)

    def facts(self) -> dict:
        """Return what the files' maker wrote beside them; empty for files of other makers."""
        file = said_file(self.prefix)
        return read_json(file) if file.is_file() else {}

    def check_tokenizer(self, fingerprint: str) -> None:
        """Refuse files that say another tokenizer made them, unless the record allows it."""
        made_by = self.facts().get("tokenizer")
        if made_by in (None, fingerprint) or self._record.other_tokenizer == "allow":
            return
        raise DataError(
            f"{said_file(self.prefix)}: these tokens were made by the tokenizer {made_by[:12]}…, "
            f"the run's is {fingerprint[:12]}…; use that one, prepare the text again, or set "
            "other_tokenizer: allow"
        )

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the documents for training and of those held out."""
        numbers = np.arange(len(self.indexed))
        if not self._record.holdout:
            return numbers, numbers[:0]
        limit = int(self._record.holdout * 2**64)
        held = np.fromiter((key_of("holdout", int(n)) < limit for n in numbers), bool, len(numbers))
        return numbers[~held], numbers[held]
