"""Errors of checkpoints, one class for each kind. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

MAX_LISTED = 100
"""Most entries of each list in an error's text; its attributes hold all."""


class CheckpointError(ValueError):
    """Base of every error about checkpoints; the text states a remedy."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written: torn, truncated, altered, or with a file missing.

    ``file`` is the file's name in the checkpoint; ``tensor`` the affected tensor, or None.
    """

    def __init__(self, path: Path, file: str, what: str, tensor: str | None = None) -> None:
        self.path = path
        self.file = file
        self.what = what
        self.tensor = tensor
        suffix = f", tensor {tensor!r}" if tensor is not None else ""
        super().__init__(f"{path / file}{suffix}: {what}")


class VersionError(CheckpointError):
    """A checkpoint of another format, or of a version that this moefold does not read."""


class MismatchError(CheckpointError):
    """The checkpoint's tensors and the requested ones differ; nothing has been loaded.

    ``missing``: names requested but not stored; ``unexpected``: stored but not requested;
    ``mismatched``: names, with how shape or dtype differs.
    """

    def __init__(
        self,
        path: Path,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: dict[str, str] | None = None,
    ) -> None:
        self.path = path
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})
        lines = [f"{path} does not match this run; nothing was loaded"]
        lines += _format_names("missing from the checkpoint", self.missing)
        lines += _format_names("in the checkpoint but not in this run", self.unexpected)
        lines += _format_names("mismatched", [f"{n}: {how}" for n, how in self.mismatched.items()])
        super().__init__("\n".join(lines))


class SaveError(CheckpointError):
    """A checkpoint could not be written; earlier ones are unchanged.

    ``needed`` and ``free`` are bytes, None where unknown.
    """

    def __init__(
        self, path: Path, what: str, needed: int | None = None, free: int | None = None
    ) -> None:
        self.path = path
        self.needed = needed
        self.free = free
        super().__init__(f"{path}: {what}")


class LockError(CheckpointError):
    """Another run holds the folder's lock, or has taken it over."""


def _format_names(title: str, names: Sequence[str]) -> list[str]:
    """Return lines with a title, the number of names, and the names."""
    if not names:
        return []
    omitted = len(names) - MAX_LISTED
    tail = [f"    … and {omitted} more"] if omitted > 0 else []
    return [f"  {title} ({len(names)}):", *(f"    {n}" for n in names[:MAX_LISTED]), *tail]
