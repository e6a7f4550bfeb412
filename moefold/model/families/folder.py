"""The model family ``folder``: a model that is read from a Hugging Face folder."""

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.fields import OnDisk
from moefold.files import read_json
from moefold.model.config import MODEL, Decoder, MultiToken, to_stacks
from moefold.model.families.base import Balance, Reading, balance_rules, refuse
from moefold.model.families.registry import from_hf
from moefold.moe.config import Capacity, Moe

FURTHER = "num_nextn_predict_layers"
"""Field of ``config.json`` with the number of multi-token prediction blocks."""
INDEX, INDEX_LIMIT = "model.safetensors.index.json", 64 * 2**20
CONFIG_LIMIT = 4 * 2**20
"""Largest size of a ``config.json`` in bytes; released ones have a few thousand."""


def read_config(folder: Path, multi_token: bool = True) -> Reading:
    """Read a Hugging Face folder's ``config.json``.

    Multi-token prediction blocks are left out if the folder has no weights for them, as those that
    transformers writes, or if ``multi_token`` is False.

    Raises:
        ValueError: if it cannot be read, or has a field that is not supported.
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
    """Return whether a folder has a tensor, by its index or by the headers of its files."""
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
    """The model of a Hugging Face folder; other fields than ``from`` replace the folder's."""

    family: Literal["folder"] = "folder"
    path: Annotated[str, OnDisk()] = Field(alias="from")
    """Folder with ``config.json`` and the weights."""
    balance: Balance | None = None
    """Balancing terms in place of the folder's."""
    capacity: Capacity | None = None
    """Bound on the tokens per expert; None is dropless."""
    multi_token: tuple[MultiToken, ...] | None = None
    """Losses of multi-token prediction, as many as the folder has; ``[]`` leaves them out."""

    def describe(self, vocab: int) -> Decoder:
        """Return the folder's decoder, with the balance and capacity of this record.

        Raises:
            ValueError: if the folder cannot be read, or its vocabulary is smaller than ``vocab``.
        """
        refuse(self.violations(vocab))
        decoder = self.reading().decoder
        blocks, changes = list(decoder.blocks), dict[str, Any](capacity=self.capacity)
        if self.balance is not None:
            changes["balance"] = self.balance
        for n, block in enumerate(blocks):
            if isinstance(block.ffn, Moe):
                ffn = block.ffn.model_copy(update=changes)
                blocks[n] = block.model_copy(update={"ffn": ffn})
        if self.multi_token:
            pairs = zip(blocks[decoder.layers :], self.multi_token, strict=True)
            more = [block.model_copy(update={"multi_token": one}) for block, one in pairs]
            blocks[decoder.layers :] = more
        return decoder.model_copy(update={"stacks": to_stacks(blocks)})

    def reading(self) -> Reading:
        """Read the folder's ``config.json``, without multi-token blocks if these are left out."""
        return read_config(Path(self.path), self.multi_token != ())

    def violations(self, vocab: int) -> Iterator[Violation]:
        """Yield values that do not fit a tokenizer of ``vocab`` tokens."""
        try:
            rows = read_config(Path(self.path)).decoder.vocab
        except ValueError:
            return  # reported by rules()
        if rows < vocab:
            rule = f"has {rows} embedding rows for {vocab} tokens; use the folder's own tokenizer"
            yield Violation(("from",), self.path, rule)

    def rules(self) -> Iterator[Violation]:
        """Check that the folder can be read, and that balance and multi_token fit its model."""
        try:
            decoder = read_config(Path(self.path)).decoder
        except ValueError as error:
            rule = f"must be a Hugging Face folder that can be read: {error}"
            yield Violation(("from",), self.path, rule, _like(self.path))
            return
        there = len(decoder.multi_token)
        if self.multi_token and len(self.multi_token) != there:
            rule = f"must have one entry per multi-token block of the folder ({there}), or none"
            yield Violation(("multi_token",), self.multi_token, rule, self.multi_token[:there])
        moes = [b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe)]
        if self.balance is not None and moes:
            yield from balance_rules(self.balance, moes[0].router.selection_bias)


def _like(path: str) -> str | None:
    """Return the model folder next to a missing one whose name is most similar."""
    wanted = Path(path)
    try:
        beside = [p.name for p in wanted.parent.iterdir() if (p / "config.json").is_file()]
    except OSError:
        return None
    names = get_close_matches(wanted.name, beside, 1)
    return str(wanted.with_name(names[0])) if names else None
