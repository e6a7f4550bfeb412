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
from moefold.model.config import MODEL, Block, Decoder, MultiToken, patterns
from moefold.model.families.base import Balance, Reading, balance_rules, refuse
from moefold.model.families.registry import from_hf
from moefold.moe.config import Capacity, Moe

FURTHER = "num_nextn_predict_layers"
"""The field of ``config.json`` that counts blocks of further tokens."""
INDEX, INDEX_LIMIT = "model.safetensors.index.json", 64 * 2**20
CONFIG_LIMIT = 4 * 2**20
"""Bytes of the largest ``config.json`` that is read; released ones have some thousand."""


def read_config(folder: Path, multi_token: bool = True) -> Reading:
    """Read a Hugging Face folder's ``config.json``.

    Blocks of further tokens are left out where the folder has no weights of them, as transformers
    writes it, or where they are not asked for.

    Raises:
        ValueError: where it cannot be read, or has a field that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    config = read_json(path, limit=CONFIG_LIMIT)
    if config.get(FURTHER):
        first = f"model.layers.{config.get('num_hidden_layers')}.eh_proj.weight"
        config = config if multi_token and _holds(folder, first) else config | {FURTHER: 0}
    try:
        return from_hf(config)
    except ValueError as error:
        raise ValueError(str(error).replace("config.json", str(path), 1)) from None


def _holds(folder: Path, name: str) -> bool:
    """Return whether a tensor is in a folder, by its index or by the headers of its files."""
    if (index := folder / INDEX).is_file():
        return name in read_json(index, limit=INDEX_LIMIT).get("weight_map", {})
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if f'"{name}"'.encode() in file.read(min(size, INDEX_LIMIT)):
                return True
    return False


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
    multi_token: tuple[MultiToken, ...] | None = None
    """Losses of further tokens in place of the folder's, as many; ``[]`` leaves them out."""

    def describe(self, vocab: int) -> Decoder:
        """Return the folder's decoder, with the balance and capacity of this record.

        Raises:
            ValueError: where the folder cannot be read, or has fewer rows than ``vocab``.
        """
        refuse(self.violations(vocab))
        decoder = self.reading().decoder
        if self.multi_token:
            pairs = zip(decoder.blocks[decoder.layers :], self.multi_token, strict=True)
            more = (block.model_copy(update={"multi_token": one}) for block, one in pairs)
            blocks = (*decoder.blocks[: decoder.layers], *more)
            decoder = decoder.model_copy(update={"stacks": patterns(blocks)})
        return with_training(decoder, self.balance, self.capacity)

    def reading(self) -> Reading:
        """Return what the folder says, without what is to be left out."""
        return read_config(Path(self.path), self.multi_token != ())

    def violations(self, vocab: int) -> Iterator[Violation]:
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
        there = len(decoder.multi_token)
        if self.multi_token and len(self.multi_token) != there:
            rule = f"has as many as the folder, {there}, or none"
            yield Violation(("multi_token",), self.multi_token, rule, self.multi_token[:there])
        moes = [b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe)]
        if self.balance is not None and moes:
            yield from balance_rules(self.balance, moes[0].router.selection_bias)


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
