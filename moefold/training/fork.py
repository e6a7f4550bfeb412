"""A new run that starts from a checkpoint: another run's state, or a model's weights alone."""

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Fork:
    """What a new run takes of another one."""

    source: Path
    """A run's folder, of which the newest checkpoint is taken, or a checkpoint."""
    weights_only: bool = False
    """Leave optimizer state and progress: the run begins at step 0."""
    new_tokenizer: bool = False
    """Allow that token ids stand for other tokens."""

    def into(self, job: Trainer) -> dict[str, Any]:
        """Fill a run that has not begun, save it, and write down in ``fork.json`` what was taken.

        An imported model has nothing but weights to take. Returns what is written.

        Raises:
            TokenizerMismatch: where the tokenizers differ and none is asked for anew.
            CheckpointError: where there is nothing to take, or it does not fit.
        """
        if job.resumed_from is not None:
            raise ValueError(f"--fork {job.folder}: there is a run already; name a new folder")
        ranks = job.world.group("world")
        path = Path(on_first(lambda: str(checkpoint_in(self.source)), ranks))
        meta = manifest.read(path).meta
        tokenizer = self._tokenizer(path, meta, job.tokenizer)
        weights_only = self.weights_only or "run" not in meta
        try:
            job.progress = restore(path, job.data, None if weights_only else job.optimizer)
        except MismatchError as error:
            names = (*error.missing, *error.unexpected, *error.mismatched)
            if not all(name.startswith(f"{PREFIX}.") for name in names):
                raise
            raise CheckpointError(
                f"{path} holds the state of another optimizer; --weights-only takes its weights "
                "and leaves that"
            ) from None
        job.data.renew()
        stored = as_known_today(meta["run"], job.run) if "run" in meta else {}
        said = {
            "from": str(path),
            "taken": ["weights"] if weights_only else ["weights", "optimizer state", "progress"],
            "tokenizer": tokenizer,
            "step": job.step_number,
            "changed": differences(stored, to_dict(job.run)) if stored else [],
        }
        on_first(lambda: write_json(job.folder / FORK_FILE, said), ranks)
        job.save()
        return said

    def _tokenizer(self, path: Path, meta: Mapping[str, Any], present: Tokenizer) -> str:
        """Return how the run's tokenizer compares with the checkpoint's: same, new or unknown."""
        stored = tokenizer_of(meta)
        if stored is None:
            return "unknown"
        differing = present.first_difference(stored)
        if differing is None:
            return "same"
        if self.new_tokenizer:
            return "new"
        number, now, then = differing
        folder, first = path.parent, ""
        if not (folder / TOKENIZER_FILE).is_file():
            first, folder = f"moefold export {path} HF_FOLDER, and then ", Path("HF_FOLDER")
        rows = f" model.shape.vocab={stored.vocab}" if stored.vocab > stored.size else ""
        raise TokenizerMismatch(
            f"{path} was trained with another tokenizer: token {number} is {then!r} there and "
            f"{now!r} here, so that its weights know nothing of this run's tokens. Keep its own "
            f"with {first}'data.tokenizer={{kind: file, path: {folder}}}'{rows}, or ask for the "
            "new one with --new-tokenizer"
        )
