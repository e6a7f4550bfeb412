"""A Hugging Face folder as a model: its shape, and for the trainer its weights and tokenizer."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.fields import OnDisk
from moefold.files import read_json
from moefold.model.config import MODEL, Block, Decoder, patterns
from moefold.model.families.base import Balance, Reading, balance_rules, refuse
from moefold.model.families.registry import from_hf
from moefold.moe.config import Capacity, Moe

CONFIG_LIMIT = 4 * 2**20
"""Bytes of the largest ``config.json`` that is read; released ones have some thousand."""


def read_config(folder: Path) -> Reading:
    """Read a Hugging Face folder's ``config.json``.

    Raises:
        ValueError: where it cannot be read, or has a field that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    return from_hf(read_json(path, limit=CONFIG_LIMIT))


@MODEL.register
class Folder(Record):
    """The model of a Hugging Face folder; what stands beside ``from`` replaces the folder's."""

    family: Literal["folder"] = "folder"
    path: Annotated[str, OnDisk()] = Field(alias="from")
    """The folder with ``config.json`` and the weights."""
    balance: Balance | None = None
    """Terms in place of those the folder names."""
    capacity: Capacity | None = None
    """None is dropless."""

    def describe(self, vocab: int) -> Decoder:
        """Return the folder's decoder, with the balance and capacity of this record.

        Raises:
            ValueError: where the folder cannot be read, or has fewer rows than ``vocab``.
        """
        refuse(self.misfits(vocab))
        decoder = read_config(Path(self.path)).decoder
        return with_training(decoder, self.balance, self.capacity)

    def misfits(self, vocab: int) -> Iterator[Violation]:
        """Yield what does not fit a tokenizer of ``vocab`` tokens."""
        try:
            rows = read_config(Path(self.path)).decoder.vocab
        except ValueError:
            return  # rules() says it
        if rows < vocab:
            rule = f"has {rows} rows for {vocab} tokens; train with the folder's own tokenizer"
            yield Violation(("from",), self.path, rule)

    def rules(self) -> Iterator[Violation]:
        """The folder is there and its model is known; balance terms fit its router."""
        try:
            decoder = read_config(Path(self.path)).decoder
        except ValueError as error:
            rule = f"must be a Hugging Face folder that can be read: {error}"
            yield Violation(("from",), self.path, rule, _like(self.path))
            return
        moes = [b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe)]
        if self.balance is not None and moes:
            yield from balance_rules(self.balance, moes[0].router.selection_bias)


MODEL.implied["from"] = "folder"


def _like(path: str) -> str | None:
    """Return the folder beside a missing one whose name is most like it, with a config.json."""
    wanted = Path(path)
    try:
        beside = [p.name for p in wanted.parent.iterdir() if (p / "config.json").is_file()]
    except OSError:
        return None
    names = get_close_matches(wanted.name, beside, 1)
    return str(wanted.with_name(names[0])) if names else None


def with_training(decoder: Decoder, balance: Balance | None, capacity: Capacity | None) -> Decoder:
    """Return a decoder whose layers with experts have this balance (None keeps) and capacity."""
    changes: Mapping[str, Any] = {"capacity": capacity} | (
        {} if balance is None else {"balance": balance}
    )

    def changed(block: Block) -> Block:
        if not isinstance(block.ffn, Moe):
            return block
        return block.model_copy(update={"ffn": block.ffn.model_copy(update=changes)})

    return decoder.model_copy(update={"stacks": patterns(map(changed, decoder.blocks))})
