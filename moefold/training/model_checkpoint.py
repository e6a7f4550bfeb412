"""A model in a checkpoint: its description, weights and tokenizer; initial values of a new run.

``moefold import`` writes the same form, without optimizer state and progress.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.errors import CheckpointError
from moefold.checkpoint.folder import resolve_checkpoint
from moefold.checkpoint.load import Reader
from moefold.checkpoint.tensors import DTYPES
from moefold.config.base import to_dict
from moefold.config.check import check
from moefold.config.errors import RunError
from moefold.config.plugins import import_plugins
from moefold.convert.adapter import AdapterTensors, identity, write_adapter
from moefold.convert.importer import ImportedFolder, import_folder, open_adapter
from moefold.convert.plan import Dtype
from moefold.convert.source import ConvertError
from moefold.data.tokenizer import Tokenizer
from moefold.layers.config import Precision
from moefold.layers.placement import Box, Shard
from moefold.model.config import Decoder, LowRank
from moefold.model.decoder import DecoderModel
from moefold.model.families.folder import Folder, read_config
from moefold.model.init import initial_values
from moefold.model.tuning import merge_adapter
from moefold.parallel.data.sharding import ShardedState
from moefold.run import Run
from moefold.spec.decoder import LORA_A, LORA_B
from moefold.spec.tuning import adapter_scales, without_tuning

MODEL_PREFIX = "model."
"""Prefix of the model's tensors in a checkpoint."""
TOKENIZER_FIELDS = ("text", "end", "start", "vocab", "files")
"""Attributes of a tokenizer that are stored."""


def describe_model(decoder: Decoder, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the part of a checkpoint's meta that describes its model, tokenizer and adapters."""
    attributes: dict[str, Any] | None = None
    if tokenizer is not None:
        attributes = {name: getattr(tokenizer, name) for name in TOKENIZER_FIELDS}
        attributes["files"] = dict(tokenizer.files)
    description = {"decoder": to_dict(without_tuning(decoder)), "tokenizer": attributes}
    adapters = adapter_scales(decoder)
    return description | ({"adapters": adapters} if adapters else {})


def precision_of(meta: Mapping[str, Any]) -> Precision | None:
    """Return the compute format of a checkpoint's run, from its meta; None if not stored."""
    return (meta.get("run") or {}).get("train", {}).get("precision")


@dataclass(frozen=True)
class StoredModel:
    """The model of an open checkpoint."""

    path: Path
    meta: Mapping[str, Any]
    decoder: Decoder
    tokenizer: Tokenizer | None
    tensors: "ModelTensors"
    """Tensors by global name, each read on access."""

    @classmethod
    @contextmanager
    def open(cls, source: str | Path, uses: Sequence[str | Path] = ()) -> Iterator["StoredModel"]:
        """Open a checkpoint's folder, or the newest checkpoint of a run's folder.

        Args:
            source: the folder.
            uses: Python files that register parts of the model from outside the package. They
                are never taken from the checkpoint, which must not run code.

        Raises:
            CheckpointError: if there is no checkpoint, or it holds no model.
        """
        import_plugins(uses)
        path = resolve_checkpoint(Path(source))
        with Reader(path) as reader:
            meta = reader.manifest.meta
            if "decoder" not in meta:
                raise CheckpointError(f"{path} holds no model in moefold's format")
            verdict = check(Decoder, meta["decoder"])
            if verdict.record is None:
                if files := (meta.get("run") or {}).get("uses"):
                    flags = " ".join(f"--uses {file}" for file in files)
                    raise CheckpointError(
                        f"{path} was written by a run with plug-ins; name their files: "
                        f"{flags} (in Python: uses=[...])"
                    )
                raise RunError(verdict.violations, meta["decoder"], str(path))
            tensors = ModelTensors(reader, meta.get("adapters", {}))
            yield cls(path, meta, verdict.record, tokenizer_of(meta), tensors)

    def write_adapter(
        self,
        folder: Path,
        dtype: Dtype = "float32",
        more_files: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Write the adapters only, by :func:`moefold.convert.adapter.write_adapter`; return notes.

        ``more_files`` are further files, texts by name, such as a model card.

        Raises:
            ConvertError: if their base is not a Hugging Face folder, or has changed.
        """
        record = (self.meta.get("run") or {}).get("model", {})
        base = record.get("from")
        remedy = "; --merged writes the base with the adapters merged"
        if record.get("family") != "folder" or not isinstance(base, str):
            raise ConvertError(folder, ["the run's base is not a Hugging Face folder" + remedy])
        shapes = {name: self.tensors.shape(name) for name in self.tensors}
        trained_on = identity(shapes, self.tensors.read_box)
        notes = [f"adapter only; its base: {base}"]
        if (Path(base) / "config.json").is_file():
            config = read_config(Path(base), record.get("multi_token") != [])
            with import_folder(base, config=config) as imported:
                if trained_on != imported.tensors.identity():
                    what = f"the weights in {base} are not those that the run was trained on"
                    raise ConvertError(folder, [what + remedy])
        else:
            notes.append(f"{base} was not found, so its weights were not checked")
        adapters = {}
        for name, scale in self.tensors.scales.items():
            rank = self.tensors.shape(name + LORA_B)[-1]
            adapters[name] = LowRank(weight=name, rank=rank, scale=scale)
        write_adapter(
            self.decoder,
            adapters,
            self.tensors,
            folder,
            (base, trained_on),
            self.tokenizer,
            dtype,
            more_files,
        )
        return notes

    def model(
        self, precision: Precision | None = None, device: torch.device | str | None = None
    ) -> DecoderModel:
        """Build the model with its weights; default ``precision``: its run's, else fp32."""
        precision = precision or precision_of(self.meta) or "fp32"
        model = DecoderModel(self.decoder, precision, device=device)
        fill(model, self.tensors)
        return model


class ModelTensors(Mapping[str, Tensor]):
    """The model's tensors in a checkpoint, read on access, with adapters merged into weights.

    ``scales`` has for each weight with an adapter the factor of ``B A``.
    """

    def __init__(self, reader: Reader, scales: Mapping[str, float]) -> None:
        self._reader = reader
        self.scales = scales
        stored = reader.manifest.tensors
        names = (n.removeprefix(MODEL_PREFIX) for n in stored if n.startswith(MODEL_PREFIX))
        self._names = [name for name in names if not name.endswith((LORA_A, LORA_B))]

    def __getitem__(self, name: str) -> Tensor:
        """Read a weight with its adapter merged; or A or B, which are not among the keys."""
        weight = self.stored(name)
        scale = self.scales.get(name)
        if scale is None:
            return weight
        a = self.stored(name + LORA_A)
        b = self.stored(name + LORA_B)
        return merge_adapter(weight, a, b, scale)

    def stored(self, name: str) -> Tensor:
        """Read a tensor as stored: a weight without its adapter, or A or B."""
        return self._reader.read(MODEL_PREFIX + name)

    def read_box(self, name: str, box: Box) -> Tensor:
        """Read a box of a weight without its adapter."""
        stored = self._reader.manifest.tensors[MODEL_PREFIX + name]
        shape = [end - start for start, end in box]
        origin = tuple(start for start, _ in box)
        values = torch.empty(shape, dtype=DTYPES[stored.dtype])
        self._reader.read_into(MODEL_PREFIX + name, values, origin)
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._reader.manifest.tensors[MODEL_PREFIX + name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


@torch.no_grad()
def fill(model: DecoderModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy all tensors of a model from ``tensors``; names are checked first.

    Raises:
        CheckpointError: if names differ; lists missing and unexpected tensors.
    """
    check_names(model, tensors)
    for name, target in model.state_dict().items():
        target.copy_(tensors[name])


def check_names(model: DecoderModel, tensors: Mapping[str, Tensor], complete: bool = True) -> None:
    """Check that ``tensors`` has the names of a model's parameters.

    ``complete``: ``model`` is not one rank's part of a model, so that no name may be left over.

    Raises:
        CheckpointError: if names differ; lists missing and unexpected tensors.
    """
    model_names = {n for n in model.state_dict() if not n.endswith((LORA_A, LORA_B))}
    problems = [f"missing: {name}" for name in model_names if name not in tensors]
    if complete:
        problems += [f"unexpected: {name}" for name in tensors if name not in model_names]
    if problems:
        raise CheckpointError("the tensors do not match the model's\n  " + "\n  ".join(problems))


def tokenizer_of(meta: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer in a checkpoint's meta, or None if there is none."""
    stored = meta.get("tokenizer")
    if stored is None:
        return None
    # Checkpoints of earlier versions do not store the tokenizer's files.
    attributes = {key: stored[key] for key in TOKENIZER_FIELDS if key in stored}
    return Tokenizer(**attributes, source="the checkpoint's tokenizer")


def fill_initial_values(run: Run, state: ShardedState, will_be_replaced: bool) -> tuple[str, ...]:
    """Fill a new run's weights; return a line for each tensor of its folder that is left out.

    With ``will_be_replaced`` no folder is read, as the values will be overwritten.
    """
    source = run.model
    initial = initial_values(run.decoder, run.seed)
    if will_be_replaced or not isinstance(source, Folder):
        state.fill(initial)
        return ()
    with ExitStack() as stack:
        base = stack.enter_context(import_folder(source.path, config=source.read_config()))
        start: AdapterTensors | None = None
        if run.adapter is not None and run.adapter.start is not None:
            model = base.source.folder, base.decoder, base.tensors
            start = stack.enter_context(closing(open_adapter(Path(run.adapter.start), *model)))
        adapters = initial if start is None else lambda shard: shard.slice_of(start[shard.name])
        fill_from_folder(base, state, adapters)
    return base.left_out


def fill_from_folder(
    imported: ImportedFolder, state: ShardedState, adapters: Callable[[Shard], Tensor] | None = None
) -> None:
    """Fill weights from an open Hugging Face folder, and A and B of adapters from ``adapters``."""
    tensors = imported.tensors
    check_names(state.parts.model, tensors, complete=state.parts.world.size == 1)

    def read(shard: Shard) -> Tensor:
        if adapters is not None and shard.name.endswith((LORA_A, LORA_B)):
            return adapters(shard)
        return tensors.read_box(shard.name, shard.box)

    state.fill(read, buffers=True)
