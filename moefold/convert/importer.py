"""From a Hugging Face folder to our tensors: strict, one tensor in memory at a time.

E experts, F expert width, D hidden (see ``model/families/names.py`` for how weights lie on disk).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from moefold.convert.errors import ConvertError
from moefold.convert.plan import Plan, make_plan
from moefold.convert.source import Source
from moefold.convert.targets import Target, targets
from moefold.convert.tokenizer import TokenizerFiles, read_tokenizer
from moefold.model.config import Decoder
from moefold.model.families.base import Family
from moefold.model.families.folder import read_config

_HEAD, _EMBED = "head.weight", "embed.weight"


class FolderTensors(Mapping[str, Tensor]):
    """Our tensors by name, each read from the folder when it is asked for, and never kept."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        wanted: Mapping[str, Target],
        block: tuple[int, int] | None,
        tied_head: str | None,
    ) -> None:
        self._source, self._plan, self._wanted = source, plan, wanted
        self._block, self._tied_head = block, tied_head

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def __contains__(self, name: object) -> bool:
        return name in self._wanted  # the inherited one would read the tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._wanted[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type without reading it."""
        return self._wanted[name].dtype

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor in the type of the model's parameter.

        Raises:
            ConvertError: where NaN is left in it, from the folder or because a part was not
                written.
        """
        target = self._wanted[name]
        whole = torch.full(target.shape, torch.nan, dtype=target.dtype)
        for piece in self._plan.parts[name]:
            part = whole[piece.index]
            part.copy_(self._read(piece.name).reshape(part.shape))
        if bool(whole.isnan().any()):
            names = [p.name for p in self._plan.parts[name]]
            sick = [n for n in names if bool(self._read(n).isnan().any())] or names
            raise ConvertError(self._source.folder, [f"{n} holds NaN" for n in sick])
        if name == _EMBED and self._tied_head is not None:
            self._check_tied(whole, self._tied_head)
        return whole

    def _read(self, name: str) -> Tensor:
        stored = self._source.read(name)
        scale = self._plan.scales.get(name)
        if scale is None or self._block is None:
            return stored
        return dequantise(stored, self._source.read(scale), self._block)

    def _check_tied(self, embed: Tensor, head: str) -> None:
        if not torch.equal(self._source.read(head).to(embed.dtype), embed):
            raise ConvertError(
                self._source.folder,
                [f"{head} differs from the embedding, but config.json says tie_word_embeddings"],
            )


@dataclass(frozen=True)
class Imported:
    """A Hugging Face folder, read."""

    decoder: Decoder
    model: Family
    """The family's record, with the sizes that users write."""
    tensors: FolderTensors
    tokenizer: TokenizerFiles | None
    special_tokens: Mapping[str, Any]
    """``bos_token_id`` and its like."""
    notes: tuple[str, ...]
    """What the reader should know: defaults taken, files and tensors left out."""
    source: Source
    """Keeps the files open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; tensors already read stay."""
        self.source.close()


def import_folder(folder: str | Path) -> Imported:
    """Open a Hugging Face folder and account for everything in it; no weight is read yet.

    What is returned is a context manager, and closed when the tensors are no longer needed.

    Raises:
        ValueError: where ``config.json`` has anything that is not supported.
        ConvertError: listing every tensor that is missing, unexpected, or of another shape.
    """
    folder = Path(folder)
    reading = read_config(folder)
    wanted = targets(reading.decoder)
    source = Source(folder)
    try:
        tied_head = _tied_head(reading.model, source) if reading.decoder.tied else None

        def ignored(name: str) -> str | None:
            if name == tied_head:
                return "the head is the embedding"
            return reading.model.ignores(name)

        plan = make_plan(
            folder,
            reading.model.tensors,
            wanted,
            source.tensors,
            ignored=ignored,
            block=reading.quantised,
        )
        tokenizer, said = read_tokenizer(folder)
    except BaseException:
        source.close()
        raise
    notes = (*reading.notes, *source.notes, *_said(plan), *said)
    tensors = FolderTensors(source, plan, wanted, reading.quantised, tied_head)
    return Imported(
        reading.decoder, reading.model, tensors, tokenizer, reading.special_tokens, notes, source
    )


def _tied_head(model: Family, source: Source) -> str | None:
    """Return the name under which a head is stored although it is the embedding."""
    names = [e.theirs[0] for e in model.tensors if e.ours == _HEAD]
    return next((n for n in names if n in source.tensors), None)


def _said(plan: Plan) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in plan.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        yield f"{len(names)} tensors left out, {reason}: {names[0]}" + (" …" if names[1:] else "")
    if plan.scales:
        yield f"{len(plan.scales)} FP8 tensors multiplied out with their block scales"


def dequantise(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply FP8 codes [R, C] out with the scale of each ``block`` of rows and columns.

    Returns fp32; the arithmetic of DeepSeek-V3's release (arXiv 2412.19437, section 3.3).
    """
    rows, columns = codes.shape
    spread = scales.float().repeat_interleave(block[0], 0)[:rows]
    return codes.float() * spread.repeat_interleave(block[1], 1)[:, :columns]
