"""Forks: new runs that start from the state of another run, or only from its weights."""

from pathlib import Path
from typing import Any

from moefold.checkpoint import manifest
from moefold.checkpoint.errors import CheckpointError, MismatchError
from moefold.checkpoint.folder import resolve_checkpoint
from moefold.comm.agree import run_on_first
from moefold.config.base import to_dict
from moefold.data.tokenizer import Tokenizer
from moefold.files import write_json
from moefold.optim.base import PREFIX
from moefold.spec.decoder import LORA_A, LORA_B
from moefold.training.continuation import continue_data, continue_steps
from moefold.training.model_checkpoint import tokenizer_of
from moefold.training.resume import differences, with_current_defaults
from moefold.training.run_folder import TOKENIZER_FILE
from moefold.training.state import restore
from moefold.training.trainer import Trainer

FORK_FILE = "fork.json"


class TokenizerMismatch(CheckpointError):
    """A fork's tokenizer differs from the one that its weights were trained with."""


def fork(
    job: Trainer, source: Path, weights_only: bool = False, new_tokenizer: bool = False
) -> dict[str, Any]:
    """Fill a new run from a checkpoint and save it; record what was taken in ``fork.json``.

    From an imported model only weights are taken. Returns the content of ``fork.json``.

    Args:
        job: the new run.
        source: a checkpoint, or a run folder, of which the newest checkpoint is taken.
        weights_only: take neither optimizer state nor progress: the run begins at step 0.
        new_tokenizer: allow a tokenizer with other token ids.

    Raises:
        TokenizerMismatch: if the tokenizers differ, unless ``new_tokenizer``.
        CheckpointError: if there is no checkpoint, or it does not fit.
    """
    if job.resumed_from is not None:
        raise ValueError(
            f"--fork {job.folder}: the folder already holds a run; name a new folder, or resume "
            f"that run with --folder {job.folder} without --fork"
        )
    ranks = job.world.group("world")
    path = Path(run_on_first(lambda: str(resolve_checkpoint(source)), ranks))
    meta = manifest.read(path).meta
    stored = tokenizer_of(meta)
    tokenizer = "unknown"
    if stored is not None:
        differing = job.tokenizer.first_difference(stored)
        tokenizer = "same" if differing is None else "new"
        if differing is not None and not new_tokenizer:
            raise TokenizerMismatch(_mismatch_message(path, stored, *differing))
    weights_only = weights_only or "run" not in meta
    try:
        job.progress = restore(path, job.state, None if weights_only else job.optimizer)
    except MismatchError as error:
        names = (*error.missing, *error.unexpected, *error.mismatched)
        weights = [name for name in names if not name.startswith(f"{PREFIX}.")]
        if weights and all(name.endswith((LORA_A, LORA_B)) for name in weights):
            raise CheckpointError(
                f"{path} and this run have different adapters; set adapter as in the checkpoint's "
                "run, or merge its adapters into the model's weights and train that: "
                f"moefold export {path} HF_FOLDER --merged"
            ) from None
        if weights:
            raise
        only_histories = all(name.endswith(".amaxes") for name in names)
        what = (
            "scaling histories (train.quantise)" if only_histories else "optimizer states (optim)"
        )
        raise CheckpointError(
            f"{path} and this run have different {what}; --weights-only takes only the weights"
        ) from None
    job.state.refresh_weights()
    stored_run = with_current_defaults(meta["run"], job.run) if "run" in meta else {}
    lines: list[str] = []
    if not weights_only:
        job.progress, lines = continue_data(job.progress, meta, stored_run, job.run, job.loader)
        stored_schedule = stored_run["optim"].get("schedule_lr")
        if stored_schedule != to_dict(job.run.optim.schedule_lr):
            job.progress.rate = ()  # another schedule is stated
    job.progress, _ = continue_steps(job.progress, job.run, job.loader)
    facts = {
        "from": str(path),
        "taken": ["weights"] if weights_only else ["weights", "optimizer state", "progress"],
        "tokenizer": tokenizer,
        "step": job.step_number,
        "changed": differences(stored_run, to_dict(job.run)) if stored_run else [],
        "data": lines,
    }
    run_on_first(lambda: write_json(job.folder / FORK_FILE, facts), ranks)
    job.save()
    return facts


def _mismatch_message(
    path: Path, stored: Tokenizer, number: int, now: str | None, then: str | None
) -> str:
    """Return the error text for token ids that differ from a checkpoint's, with the remedy."""
    folder = path.parent
    first = ""
    if not (folder / TOKENIZER_FILE).is_file():
        first = f"moefold export {path} HF_FOLDER and then "
        folder = Path("HF_FOLDER")
    rows = f" model.shape.vocab={stored.vocab}" if stored.vocab > stored.size else ""
    return (
        f"{path} was trained with another tokenizer: token {number} is {then!r} there "
        f"and {now!r} in this run, so the embeddings do not fit. Keep the checkpoint's tokenizer "
        f"with {first}'data.tokenizer={{kind: file, path: {folder}}}'{rows}, or allow the "
        "new one with --new-tokenizer"
    )
