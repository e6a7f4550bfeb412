"""The Python API, for notebooks and other programs; the commands in ``cli/`` are built on it."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from moefold.comm.environment import RankInfo
from moefold.comm.launch import launch
from moefold.config.base import to_dict
from moefold.config.check import check
from moefold.config.plugins import import_plugins
from moefold.convert.exporter import export_folder
from moefold.convert.importer import import_folder
from moefold.convert.stream import BUCKET_BYTES, TensorBatch, stream_weights
from moefold.files import unused_folder
from moefold.layers.config import Precision
from moefold.model.decoder import DecoderModel
from moefold.model.families.peft import is_hub_folder
from moefold.proof.verify import Proof, cases_of, prove, prove_as_run
from moefold.run import Run, require_fit
from moefold.training.distributed import MESSAGES, device_kind, open_world
from moefold.training.hooks.assemble import assemble
from moefold.training.hooks.base import Figures, Hook
from moefold.training.model_card import card_files, left_behind
from moefold.training.model_checkpoint import StoredModel, fill
from moefold.training.run_folder import METRICS_FILE, read_lines
from moefold.training.trainer import Trainer

PRECISIONS: dict[str, Precision] = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16"}
_log = logging.getLogger("moefold")


@dataclass(frozen=True)
class Result:
    """Outcome of a training run."""

    folder: Path
    """Run folder, with metrics, plots and checkpoints."""
    final: Figures
    """Metrics of the last step."""
    model: DecoderModel


def train(
    run: Run, nproc: int = 1, hooks: Sequence[Hook] = (), folder: str | Path | None = None
) -> Result:
    """Train a run to its end and return its folder, last metrics and model.

    Args:
        run: the run, from :func:`load_run`.
        nproc: ranks on this machine, each its own process.
        hooks: further hooks, called after the run's evaluation and before its loggers. With several
            ranks they run in rank 0's process: they must be picklable, and changes stay there.
        folder: the output folder; a run in it is resumed. Default: a new ``runs/<name>``.

    Raises:
        ValueError: if the run cannot be trained here, or the folder holds a different run.
    """
    _check(run, hooks)
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: must be at least 1")
    require_fit(run, nproc)
    model: DecoderModel | None = None
    if nproc == 1:
        with open(run, folder, hooks) as job:
            where = job.folder
            final = job.train()
            if job.state.offload is None:  # else parameters are handles without values
                model = job.model
    else:
        where = Path(folder or unused_folder(run.name))
        task = (to_dict(run), list(hooks), str(where))
        time_out_s = run.watch.time_out_s
        options: dict[str, Any] = {"time_out_s": time_out_s, "device": device_kind(nproc)}
        final = launch(_train_rank, nproc, *task, messages=MESSAGES, **options)
    if not final:  # the run had already ended
        final = next(reversed(read_lines(where / METRICS_FILE)), {})
    if model is None:
        with StoredModel.open(where) as stored:
            model = stored.model()
    return Result(where, final, model)


def _train_rank(info: RankInfo, raw_run: dict[str, Any], hooks: list[Hook], folder: str) -> Figures:
    run = check(Run, raw_run).record
    where = Path(folder)
    assert run is not None
    with open_world(run, info, where) as world:
        own_hooks = assemble(run.watch, extra=hooks) if info.rank == 0 else ()
        with Trainer(run, where, own_hooks, world=world) as job:
            return job.train()


def open(run: Run, folder: str | Path | None = None, hooks: Sequence[Hook] = ()) -> Trainer:
    """Open a run for a custom loop: ``job.step()``, ``job.evaluate()``, ``job.save()``.

    Use it as a context manager, or call ``job.close()``. Arguments are as in :func:`train`.
    """
    _check(run, hooks)
    return Trainer(run, folder or unused_folder(run.name), assemble(run.watch, extra=hooks))


def _check(run: object, hooks: Sequence[object]) -> None:
    if not isinstance(run, Run):
        raise TypeError(f"run must be a Run, as moefold.load_run(...) returns, not {run!r}")
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise TypeError(f"hooks must be instances of subclasses of Hook, not {hook!r}")


def load_model(
    source: str | Path,
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    device: torch.device | str | None = None,
    uses: Sequence[str | Path] = (),
) -> DecoderModel:
    """Load a model with its weights from a Hugging Face folder, a checkpoint or a run folder.

    For a PEFT adapter folder, the model is the adapter's base with the adapter attached.

    Args:
        source: the folder.
        dtype: compute dtype; ``bfloat16`` keeps fp32 weights and multiplies with bf16 copies.
        device: the device of the weights.
        uses: Python files that register parts of the model from outside the package.

    Raises:
        ValueError: if the folder is none of these, or does not hold the whole model.
    """
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(PRECISIONS)}")
    path = Path(source)
    import_plugins(uses)
    if is_hub_folder(path):
        with import_folder(path) as imported:
            model = DecoderModel(imported.decoder, PRECISIONS[dtype], device=device)
            fill(model, imported.tensors)
        for note in imported.left_out:
            _log.warning("%s", note)
        return model
    with StoredModel.open(path) as stored:
        return stored.model(PRECISIONS[dtype], device)


def export(
    checkpoint: str | Path,
    folder: str | Path,
    dtype: Literal["float32", "bfloat16"] = "float32",
    layout: Literal["per_expert", "packed"] = "per_expert",
    uses: Sequence[str | Path] = (),
    merged: bool = False,
    card: bool = True,
) -> list[str]:
    """Write a checkpoint's model as a folder that ``transformers`` loads; return notes.

    For a run that trains adapters, write only these, as a folder that ``peft`` loads.

    Args:
        checkpoint: a checkpoint, or a run folder, of which the newest checkpoint is taken.
        folder: a new folder.
        dtype: dtype of the weights on disk.
        layout: one tensor per expert, or all experts packed in one tensor.
        uses: Python files that register parts of the model from outside the package.
        merged: for a run with adapters, write the whole model, ``weight + scale * B A``.
        card: write a model card (``README.md``), and the base model's beside it.

    Raises:
        ValueError: if there is no checkpoint, no known family fits the model, or the adapters'
            base is not a folder or has changed.
    """
    with StoredModel.open(checkpoint, uses) as stored:
        adapter = bool(stored.tensors.scales) and not merged
        files = card_files(stored, dtype, layout, adapter) if card else {}
        unsaid = [] if card else left_behind(stored)
        if adapter:
            return unsaid + stored.write_adapter(Path(folder), dtype, files)
        return unsaid + export_folder(
            stored.decoder,
            stored.tensors,
            folder,
            stored.tokenizer,
            dtype,
            layout,
            special_tokens=stored.meta.get("special_tokens"),
            more_files=files,
        )


def export_stream(
    job: Trainer,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    layout: Literal["per_expert", "packed"] = "per_expert",
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[TensorBatch]:
    """Stream the weights of an open run in buckets, between two steps and from any layout.

    Every rank must exhaust the iterator; only rank 0 receives buckets. Names, shapes and dtypes
    are those of a Hugging Face folder; :mod:`moefold.convert.stream` documents the contract.

    Args:
        job: the open run.
        dtype: dtype of the weights; router weights and selection bias stay float32.
        layout: one tensor per expert, or all experts packed in one tensor.
        bucket_bytes: maximum size of a bucket in bytes.

    Raises:
        ValueError: if no known family fits the model, a bucket is too small for one row of a
            tensor, or the run trains adapters.
    """
    return stream_weights(job.state, dtype, layout, bucket_bytes)


def verify(
    run: Run,
    layouts: Sequence[str] | None = None,
    world: int | None = None,
    as_run: bool = False,
) -> Proof:
    """Prove that layouts compute what one rank does, on a small version of a run's model.

    The ranks are processes on this machine. In the result ``passed`` says whether all layouts
    agree, ``rows`` has the largest relative error of each layout and quantity (``docs/proof.md``).

    Args:
        run: the run, whose layout is used except for its axis sizes.
        layouts: axis sizes such as ``tp2 ep2``; default: the run's own.
        world: number of ranks; default: the fewest that each layout needs, at least two.
        as_run: compare in the run's number format instead of fp64, against a small multiple of the
            differences that reordered sums cause; too coarse a format fails, or is named.

    Raises:
        ValueError: if a layout is illegal for the run on ``world`` ranks; names the nearest legal.
    """
    if isinstance(layouts, str):
        raise TypeError(f"layouts must be a list, such as [{layouts!r}], not {layouts!r}")
    return (prove_as_run if as_run else prove)(cases_of(run, layouts, world, as_run))
