"""A new run that starts from a checkpoint: another run's state, or a model's weights alone."""

from pathlib import Path
from typing import Any

from moefold.checkpoint import manifest
from moefold.checkpoint.errors import CheckpointError, MismatchError
from moefold.checkpoint.folder import checkpoint_in
from moefold.comm.agree import on_first
from moefold.config.base import to_dict
from moefold.data.tokenizer import Tokenizer
from moefold.files import write_json
from moefold.optim.base import PREFIX
from moefold.training.model_checkpoint import tokenizer_of
from moefold.training.resume import as_known_today, differences
from moefold.training.run_folder import TOKENIZER_FILE
from moefold.training.state import restore
from moefold.training.trainer import Trainer

FORK_FILE = "fork.json"


class TokenizerMismatch(CheckpointError):
    """A fork's token ids stand for other tokens than those that its weights were trained on."""


def fork(
    job: Trainer, source: Path, weights_only: bool = False, new_tokenizer: bool = False
) -> dict[str, Any]:
    """Fill a run that has not begun, save it, and write down in ``fork.json`` what was taken.

    An imported model has nothing but weights to take. Returns what is written.

    Args:
        job: the new run.
        source: a run's folder, of which the newest checkpoint is taken, or a checkpoint.
        weights_only: leave optimizer state and progress: the run begins at step 0.
        new_tokenizer: allow that token ids stand for other tokens.

    Raises:
        TokenizerMismatch: where the tokenizers differ and none is asked for anew.
        CheckpointError: where there is nothing to take, or it does not fit.
    """
    if job.resumed_from is not None:
        raise ValueError(
            f"--fork {job.folder}: there is a run already; name a new folder, or go on with that "
            f"run by --folder {job.folder} without --fork"
        )
    ranks = job.world.group("world")
    path = Path(on_first(lambda: str(checkpoint_in(source)), ranks))
    meta = manifest.read(path).meta
    stored, tokenizer = tokenizer_of(meta), "unknown"
    if stored is not None:
        differing = job.tokenizer.first_difference(stored)
        tokenizer = "same" if differing is None else "new"
        if differing is not None and not new_tokenizer:
            raise TokenizerMismatch(_mismatch(path, stored, *differing))
    weights_only = weights_only or "run" not in meta
    try:
        job.progress = restore(path, job.data, None if weights_only else job.optimizer)
    except MismatchError as error:
        names = (*error.missing, *error.unexpected, *error.mismatched)
        if not all(name.startswith(f"{PREFIX}.") for name in names):
            raise
        seen = all(name.endswith(".amaxes") for name in names)
        what = "magnitudes of other products (train.quantise)"
        what = what if seen else "the state of another optimizer"
        raise CheckpointError(
            f"{path} holds {what}; --weights-only takes its weights and leaves that"
        ) from None
    job.data.renew()
    before = as_known_today(meta["run"], job.run) if "run" in meta else {}
    if not weights_only:
        job.progress = job.progress.rebatched(before["train"]["batch"], job.run.train.batch)
        job.loader.offset = job.progress.sequence_offset
    said = {
        "from": str(path),
        "taken": ["weights"] if weights_only else ["weights", "optimizer state", "progress"],
        "tokenizer": tokenizer,
        "step": job.step_number,
        "changed": differences(before, to_dict(job.run)) if before else [],
    }
    on_first(lambda: write_json(job.folder / FORK_FILE, said), ranks)
    job.save()
    return said


def _mismatch(path: Path, stored: Tokenizer, number: int, now: str | None, then: str | None) -> str:
    """Say that a token is another one in a checkpoint, and what to do."""
    folder, first = path.parent, ""
    if not (folder / TOKENIZER_FILE).is_file():
        first, folder = f"moefold export {path} HF_FOLDER, and then ", Path("HF_FOLDER")
    rows = f" model.shape.vocab={stored.vocab}" if stored.vocab > stored.size else ""
    return (
        f"{path} was trained with another tokenizer: token {number} is {then!r} there and "
        f"{now!r} here, so that its weights know nothing of this run's tokens. Keep its own "
        f"with {first}'data.tokenizer={{kind: file, path: {folder}}}'{rows}, or ask for the "
        "new one with --new-tokenizer"
    )
