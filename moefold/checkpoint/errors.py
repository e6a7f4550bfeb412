"""What can be wrong with a checkpoint, each kind a class of its own. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

SHOWN = 100
"""Entries of each list that an error's text spells out; its attributes hold all of them."""


class CheckpointError(ValueError):
    """The base of every error about checkpoints; says what to do."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written: torn, truncated, altered, or with a file missing.

    ``file`` is the file's name inside the checkpoint; ``tensor`` the tensor it concerns, if one.
    """

    def __init__(self, path: Path, file: str, what: str, tensor: str | None = None) -> None:
        self.path = path
        self.file = file
        self.what = what
        self.tensor = tensor
        named = f", tensor {tensor!r}" if tensor is not None else ""
        super().__init__(f"{path / file}{named}: {what}")


class VersionError(CheckpointError):
    """A checkpoint of a foreign format, or of a version that this moefold does not read."""


class MismatchError(CheckpointError):
    """The checkpoint's tensors and the wanted ones differ; nothing has been loaded.

    ``missing`` are wanted but not stored, ``unexpected`` stored but not wanted, ``mismatched``
    map a name to how its shape or dtype differs.
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
        lines = [f"{path} does not fit; nothing was loaded"]
        lines += _listed("missing from the checkpoint", self.missing)
        lines += _listed("in the checkpoint but not wanted", self.unexpected)
        lines += _listed("different", [f"{n}: {how}" for n, how in self.mismatched.items()])
        super().__init__("\n".join(lines))


class SaveError(CheckpointError):
    """The storage refused a checkpoint. What was there before still stands.

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
    """Another run writes into the folder, or has taken it over."""


def _listed(title: str, names: Sequence[str]) -> list[str]:
    """Return lines that name each entry under a title with their number."""
    if not names:
        return []
    rest = len(names) - SHOWN
    more = [f"    … and {rest} more"] if rest > 0 else []
    return [f"  {title} ({len(names)}):", *(f"    {n}" for n in names[:SHOWN]), *more]
