"""The model family ``folder``: a model read from a Hugging Face folder."""

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.fields import OnDisk
from moefold.files import read_json
from moefold.model.config import MODEL, Decoder, MultiToken, to_stacks
from moefold.model.families.base import Balance, ParsedConfig, balance_rules, raise_violations
from moefold.model.families.peft import leftover_notes
from moefold.model.families.registry import from_hf
from moefold.moe.config import Capacity, Moe

MULTI_TOKEN_FIELD = "num_nextn_predict_layers"
"""Field of ``config.json`` with the number of multi-token prediction blocks."""
INDEX = "model.safetensors.index.json"
INDEX_LIMIT = 64 * 2**20
CONFIG_LIMIT = 4 * 2**20
"""Largest size of a ``config.json`` in bytes; released ones have a few thousand."""


def read_config(folder: Path, multi_token: bool = True) -> ParsedConfig:
    """Read a Hugging Face folder's ``config.json``.

    Multi-token prediction blocks are left out if ``multi_token`` is False, or if the folder has no
    weights for them, as when transformers wrote it.

    Raises:
        ValueError: if the file cannot be read or has an unsupported field.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    config = read_json(path, limit=CONFIG_LIMIT)
    if config.get(MULTI_TOKEN_FIELD):
        first = f"model.layers.{config.get('num_hidden_layers')}.eh_proj.weight"
        if not (multi_token and _has_tensor(folder, first)):
            config = config | {MULTI_TOKEN_FIELD: 0}
    try:
        parsed = from_hf(config)
    except ValueError as error:
        raise ValueError(str(error).replace("config.json", str(path), 1)) from None
    return replace(parsed, left_out=(*parsed.left_out, *leftover_notes(folder)))


def _has_tensor(folder: Path, name: str) -> bool:
    """Return whether a folder has a tensor, by its index or else by the headers of its files."""
    if (index := folder / INDEX).is_file():
        return name in read_json(index, limit=INDEX_LIMIT).get("weight_map", {})
    for path in folder.glob("*.safetensors"):
        if not path.is_file():  # refused where weights are read
            continue
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if f'"{name}"'.encode() in file.read(min(size, INDEX_LIMIT)):
                return True
    return False


@MODEL.register
class Folder(Record):
    """The model of a Hugging Face folder; fields other than ``from`` replace the folder's."""

    family: Literal["folder"] = "folder"
    path: Annotated[str, OnDisk()] = Field(alias="from")
    """Folder with ``config.json`` and the weights."""
    balance: Balance | None = None
    """Balancing terms that replace the folder's."""
    capacity: Capacity | None = None
    """Bound on the tokens per expert; None is dropless."""
    multi_token: tuple[MultiToken, ...] | None = None
    """Losses of multi-token prediction, as many as the folder has; ``[]`` leaves them out."""

    def describe(self, vocab: int) -> Decoder:
        """Return the folder's decoder, with the balance and capacity of this record.

        Raises:
            ValueError: if the folder cannot be read, or its vocabulary is smaller than ``vocab``.
        """
        raise_violations(self.violations(vocab))
        decoder = self.read_config().decoder
        blocks = list(decoder.blocks)
        changes = dict[str, Any](capacity=self.capacity)
        if self.balance is not None:
            changes["balance"] = self.balance
        for n, block in enumerate(blocks):
            if isinstance(block.ffn, Moe):
                ffn = block.ffn.model_copy(update=changes)
                blocks[n] = block.model_copy(update={"ffn": ffn})
        if self.multi_token:
            pairs = zip(blocks[decoder.layers :], self.multi_token, strict=True)
            further = [block.model_copy(update={"multi_token": record}) for block, record in pairs]
            blocks[decoder.layers :] = further
        return decoder.model_copy(update={"stacks": to_stacks(blocks)})

    def read_config(self) -> ParsedConfig:
        """Read the folder's ``config.json``, without multi-token blocks if ``[]`` was given."""
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
            yield Violation(("from",), self.path, rule, _nearest_folder(self.path))
            return
        count = len(decoder.multi_token)
        if self.multi_token and len(self.multi_token) != count:
            rule = f"must have one entry per multi-token block of the folder ({count}), or none"
            yield Violation(("multi_token",), self.multi_token, rule, self.multi_token[:count])
        moes = [b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe)]
        if self.balance is not None and moes:
            yield from balance_rules(self.balance, moes[0].router.selection_bias)


def _nearest_folder(path: str) -> str | None:
    """Return the sibling model folder whose name is most similar to a missing one's."""
    missing = Path(path)
    try:
        siblings = [p.name for p in missing.parent.iterdir() if (p / "config.json").is_file()]
    except OSError:
        return None
    names = get_close_matches(missing.name, siblings, 1)
    return str(missing.with_name(names[0])) if names else None
