"""The Python face: what notebooks and other programs call. Every command stands on these."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from moefold.comm.environment import Spot
from moefold.comm.launch import launch
from moefold.config.base import to_dict
from moefold.config.check import check
from moefold.config.plugins import import_plugins
from moefold.convert.exporter import export_folder
from moefold.convert.importer import import_folder
from moefold.convert.stream import BUCKET_BYTES, TensorBatch, stream
from moefold.files import free_folder
from moefold.layers.config import Precision
from moefold.model.decoder import DecoderModel
from moefold.model.families.peft import is_hub_folder
from moefold.proof.verify import Proof, cases_of, prove, within_spread
from moefold.run import Run, demand_fit
from moefold.training.distributed import WORDS, device_kind, world_of
from moefold.training.hooks.assemble import assemble
from moefold.training.hooks.base import Figures, Hook
from moefold.training.model_checkpoint import StoredModel, fill
from moefold.training.run_folder import METRICS_FILE, read_lines
from moefold.training.trainer import Trainer

PRECISIONS: dict[str, Precision] = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16"}
_log = logging.getLogger("moefold")


@dataclass(frozen=True)
class Result:
    """What a training run came to."""

    folder: Path
    """Metrics, plots and checkpoints."""
    final: Figures
    """The last step's figures."""
    model: DecoderModel


def train(
    run: Run, nproc: int = 1, hooks: Sequence[Hook] = (), folder: str | Path | None = None
) -> Result:
    """Train a run to its end and return what came of it.

    Args:
        run: the run, from :func:`load_run`.
        nproc: ranks on this machine, each its own process.
        hooks: more hooks, told of each event after the run's own. With several ranks they live in
            the first one: they must be picklable, and what they change is not seen here.
        folder: where output goes; a run found there is continued. Default: a new ``runs/<name>``.

    Raises:
        ValueError: where the run cannot be trained here, or the folder holds another one.
    """
    _check_run(run)
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: at least 1")
    demand_fit(run, nproc)
    model: DecoderModel | None = None
    if nproc == 1:
        with open(run, folder, hooks) as job:
            where, final = job.folder, job.train()
            if job.data.offload is None:  # else the model's own parameters have no values
                model = job.model
    else:
        where = Path(folder or free_folder(run.name))
        task = (to_dict(run), list(hooks), str(where))
        time_out_s = run.watch.time_out_s
        how: dict[str, Any] = {"time_out_s": time_out_s, "device": device_kind(nproc)}
        final = launch(_train_rank, nproc, *task, words=WORDS, **how)
    if not final:  # the run was at its end already
        final = next(reversed(read_lines(where / METRICS_FILE)), {})
    if model is None:
        with StoredModel.open(where) as stored:
            model = stored.model()
    return Result(where, final, model)


def _train_rank(spot: Spot, said: dict[str, Any], hooks: list[Hook], folder: str) -> Figures:
    """Train as one of several ranks."""
    run, where = check(Run, said).record, Path(folder)
    assert run is not None
    with world_of(run, spot, where) as world:
        told = assemble(run.watch, outside=hooks) if spot.rank == 0 else ()
        with Trainer(run, where, told, world=world) as job:
            return job.train()


def open(run: Run, folder: str | Path | None = None, hooks: Sequence[Hook] = ()) -> Trainer:
    """Open a run for one's own loop: ``job.step()``, ``job.evaluate()``, ``job.save()``.

    Use it as a context manager, or call ``job.close()`` at the end. See :func:`train`.
    """
    _check_run(run)
    return Trainer(run, folder or free_folder(run.name), assemble(run.watch, outside=hooks))


def _check_run(run: object) -> None:
    if not isinstance(run, Run):
        raise TypeError(f"run is {run!r}; pass what moefold.load_run(...) returns")


def load_model(
    source: str | Path,
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    device: torch.device | str | None = None,
    uses: Sequence[str | Path] = (),
) -> DecoderModel:
    """Load a model with its weights, from a Hugging Face folder, a checkpoint, or a run's folder.

    An adapter's folder, as PEFT writes it, is its base with the adapter in it.

    Args:
        source: the folder.
        dtype: type of the products; ``bfloat16`` keeps fp32 weights and multiplies bf16 copies.
        device: where it goes.
        uses: Python files that bring the parts from outside which the model is made of.

    Raises:
        ValueError: where the folder is none of these, or does not hold the whole model.
    """
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(PRECISIONS)}")
    path = Path(source)
    import_plugins(uses)
    if is_hub_folder(path):
        with import_folder(path) as imported:
            model = DecoderModel(imported.decoder, PRECISIONS[dtype], device=device)
            fill(model, imported.tensors)
        for said in imported.left_out:
            _log.warning("%s", said)
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
) -> list[str]:
    """Write a checkpoint's model as a folder that ``transformers`` loads; return notes.

    Of a run that trains adapters these alone, as a folder that ``peft`` loads onto their base.

    Args:
        checkpoint: a checkpoint, or a run's folder (its newest one).
        folder: a new folder.
        dtype: type of the weights on disk.
        layout: experts each on their own, or all in one tensor.
        uses: Python files that bring the parts from outside which the model is made of.
        merged: write the whole model of a run with adapters, ``weight + scale * B A``.

    Raises:
        ValueError: where there is no checkpoint, or no known family has this model; or where the
            base of adapters is no folder, or another one by now.
    """
    with StoredModel.open(checkpoint, uses) as stored:
        if stored.tensors.scales and not merged:
            return stored.write_adapter(Path(folder), dtype)
        return export_folder(
            stored.decoder,
            stored.tensors,
            folder,
            stored.tokenizer,
            dtype,
            layout,
            special_tokens=stored.meta.get("special_tokens"),
        )


def export_stream(
    job: Trainer,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    layout: Literal["per_expert", "packed"] = "per_expert",
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[TensorBatch]:
    """Hand the weights of an open run on, between two steps, from any layout, bucket by bucket.

    Every rank goes through it to its end; the first one gets the buckets, the others none. Names,
    shapes and types are those of a Hugging Face folder; :mod:`moefold.convert.stream` has the
    contract.

    Args:
        job: the run.
        dtype: type of the weights; router weights and selection bias stay float32.
        layout: experts each on their own, or all in one tensor.
        bucket_bytes: most bytes of a bucket.

    Raises:
        ValueError: where no known family has this model, a bucket holds no row of a tensor, or
            the run trains adapters.
    """
    return stream(job.data, dtype, layout, bucket_bytes)


def verify(
    run: Run,
    layouts: Sequence[str] | None = None,
    world: int | None = None,
    as_run: bool = False,
) -> Proof:
    """Prove that layouts do not change the maths of a run: its model made small, on processes here.

    The answer's ``passed`` says whether all do, ``rows`` holds the largest relative error of each
    layout and quantity, ``verdicts`` more. What is compared stands in ``docs/proof.md``.

    Args:
        run: the run; schedule, dispatcher and all else of its layout but the sizes are kept.
        layouts: axis sizes such as ``tp2 ep2``; those of the run where left out.
        world: number of ranks; default the fewest of each layout, and two at least.
        as_run: in the run's own number format instead of fp64, within a few times what reordered
            sums differ by; what the format is too coarse for fails, or is named.

    Raises:
        ValueError: for a layout that is not legal for the run on so many ranks, with the nearest.
    """
    return (within_spread if as_run else prove)(cases_of(run, layouts, world, as_run))
