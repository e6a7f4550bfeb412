"""Copies of the state on the machines' own disks, from which a restart goes on faster.

Each rank writes its packed share of the state on its machine, and that of the rank half the world
away, so that a machine may be lost. A step is whole where every rank's share is found somewhere,
undamaged and of one session. Else the run goes on from its checkpoints, which hang on no layout.

A file ``step-…/RANK.by-WRITER`` is a line with the SHA-256 of all that follows, a line of JSON and
the packed bytes. The folder above is named after the run.
"""

import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.checkpoint.config import NodeLocal
from moefold.checkpoint.disk import DISK, write_whole
from moefold.checkpoint.folder import candidates, step_name
from moefold.comm.agree import on_first
from moefold.comm.collectives import gather_objects, receive, send, shift
from moefold.comm.world import World
from moefold.files import write_text
from moefold.training.recover import pack, packed, unpack
from moefold.training.saving import behind

NAME_FILE = "local.json"
"""In the run's own folder: the name of its copies. Without it they belong to no run."""
HEAD_BYTES = 65536
TYPES = [int, str, int, str, str]
_log = logging.getLogger("moefold.training")


class RankCopy(NamedTuple):
    """One rank's share of a step, as a file's head tells of it."""

    step: int
    session: str
    """Which process wrote it: shares of two pasts are never mixed."""
    rank: int
    form: str
    """Digest of what it consists of, in its order."""
    progress: str
    """JSON of how far the run was."""


Shares = Sequence[tuple[int, str, Tensor]]
"""Ranks, and the forms and packed bytes of what they have."""


class LocalCopies:
    """A run's copies on this machine. All ranks call its methods alike.

    ``identity`` is a digest of what is computed in which layout, ``form`` of what this rank's share
    consists of.
    """

    def __init__(
        self, record: NodeLocal, folder: Path, identity: str, form: str, world: World
    ) -> None:
        root = os.path.expandvars(record.folder)
        if "$" in root:
            raise ValueError(f"watch.checkpoint.local.folder: no value for what {root} names")
        self._root, self._every, self._identity = Path(root), record.every, identity
        self._folder, self._form, self._world = folder, form, world
        self._session, self._here = "", Path()
        # How many places on the rank stands that keeps this one's copy.
        self._apart = world.on_host.size // 2
        self._thread: threading.Thread | None = None
        self._written = -1
        """The newest step of this process that this rank has on its disk."""

    def keep(
        self, progress: dict[str, Any], state: Callable[[], Sequence[Tensor]], anew: bool = False
    ) -> None:
        """Copy the state where the ``step`` is due, and write it behind the steps that follow.

        ``anew``: after the run went back, so that copies of later steps are void.
        """
        step = progress["step"]
        if anew:
            self.wait()
            self._session, self._written = "", -1
        self._begin(step)
        if step % self._every or step == 0:
            return
        self.wait()
        ranks, tensors = self._world.on_host, state()
        own = torch.empty(packed(tensors), dtype=torch.uint8)
        pack(tensors, own)
        shares = [(ranks.index, self._form, own)]
        said = gather_objects([own.numel(), self._form, self._written], ranks)
        whole = min(written for *_, written in said)
        if ranks.size > 1:
            owner = (ranks.index - self._apart) % ranks.size
            size, form, _ = said[owner]
            theirs = torch.empty(size, dtype=torch.uint8)
            with self._world.recorder.module("local copies"):
                shift(own, theirs, self._apart, ranks).wait()
            shares.append((owner, form, theirs))
        self._thread = behind(self._write, step, json.dumps(progress), shares, whole)

    def take(self, tensors: Sequence[Tensor], since: int) -> tuple[dict[str, Any], Path] | None:
        """Fill the state from the newest whole step, if it is ``since`` or a later one.

        Returns:
            Its ``progress``, and its folder on this machine; None where no step is whole.
        """
        ranks = self._world.on_host
        name = on_first(self._name, ranks)
        here = self._root / str(name)
        found = self._found(here, since) if name else {}
        while True:
            said = gather_objects([self._form, list(found)], ranks)
            heads = [([RankCopy(*head) for head in each], form) for form, each in said]
            sources = newest_whole(heads, self._apart)
            if sources is None:
                return None
            mine = [share for share, holder in sources if holder == ranks.index]
            read = {share: _read(found[share]) for share in mine}
            damaged = [share for share, values in read.items() if values is None]
            for share in damaged:
                del found[share]
            if not any(gather_objects(len(damaged), ranks)):
                break
        own = sources[ranks.index][0]
        values = {share.rank: held for share, held in read.items() if held is not None}
        unpack(self._exchanged(values, sources, packed(tensors)), tensors)
        return json.loads(own.progress), here / step_name(own.step)

    def wait(self) -> None:
        """Wait until what is under way is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _begin(self, step: int) -> None:
        """Before the first step of a session: name the run and the session, drop what is newer.

        Copies of later steps belong to a past that the run does not go on from.
        """
        if self._session:
            return

        def named() -> list[str]:
            name = self._name()
            if name is None:
                name = uuid.uuid4().hex
                write_text(self._folder / NAME_FILE, json.dumps(name) + "\n")
            return [name, uuid.uuid4().hex]

        name, self._session = on_first(named, self._world.on_host)
        self._here = self._root / name
        for candidate in candidates(self._here):
            if candidate.step > step:
                shutil.rmtree(candidate.path, ignore_errors=True)

    def _name(self) -> str | None:
        with suppress(FileNotFoundError, ValueError):  # a loss of power can leave it empty
            return json.loads((self._folder / NAME_FILE).read_text())
        return None

    def _write(self, step: int, progress: str, shares: Shares, whole: int) -> None:
        """Drop the steps before ``whole``, which all ranks have, and write shares.

        A disk that refuses costs this step's copies alone.
        """
        for candidate in candidates(self._here):
            if candidate.step < whole:
                shutil.rmtree(candidate.path, ignore_errors=True)
        folder = self._here / step_name(step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank, form, values in shares:
                share = RankCopy(step, self._session, rank, form, progress)
                head = json.dumps({"identity": self._identity, **share._asdict()}).encode() + b"\n"
                digest, data = sha256(head), values.numpy().data
                digest.update(data)
                path = folder / f"{rank}.by-{self._world.on_host.index}"
                part = path.with_suffix(path.suffix + ".part")
                part.unlink(missing_ok=True)
                write_whole(DISK, part, digest.hexdigest().encode() + b"\n" + head, data)
                DISK.rename(part, path)
            self._written = step
        except OSError as error:
            _log.warning("no local copy of step %d: %s", step, error)

    def _found(self, here: Path, since: int) -> dict[RankCopy, list[Path]]:
        """Return the shares on this machine that fit the run and its layout, by their heads."""
        found: dict[RankCopy, list[Path]] = {}
        for candidate in candidates(here):
            if candidate.step >= since:
                for path in sorted(candidate.path.glob("*.by-*")):
                    share = _head(path, self._identity)
                    if share is not None:
                        found.setdefault(share, []).append(path)
        return found

    def _exchanged(
        self, values: Mapping[int, Tensor], sources: Sequence[tuple[RankCopy, int]], size: int
    ) -> Tensor:
        """Send the shares that others lack; return this rank's own."""
        ranks = self._world.on_host
        sent = [
            send(held, ranks.ranks[at], ranks) for at, held in values.items() if at != ranks.index
        ]
        holder = sources[ranks.index][1]
        if holder == ranks.index:
            own = values[ranks.index]
        else:
            own = torch.empty(size, dtype=torch.uint8)
            receive(own, ranks.ranks[holder], ranks).wait()
        for pending in sent:
            pending.wait()
        return own


def newest_whole(
    said: Sequence[tuple[Sequence[RankCopy], str]], by: int
) -> list[tuple[RankCopy, int]] | None:
    """Return, of the newest whole step, each rank's share and who reads it; None without one.

    A rank reads its own share if it can, else its keeper, ``by`` ranks away, else the first rank
    that can. ``said`` has of each rank the shares that it can read, and the form of its own.
    """
    size = len(said)
    holders: dict[tuple[int, str, str], dict[int, dict[int, RankCopy]]] = {}
    for holder, (shares, _) in enumerate(said):
        for share in shares:
            if share.rank < size and share.form == said[share.rank][1]:
                by_rank = holders.setdefault((share.step, share.session, share.progress), {})
                by_rank.setdefault(share.rank, {})[holder] = share
    for _, by_rank in sorted(holders.items(), reverse=True):
        if len(by_rank) == size:
            chosen = []
            for rank, held in sorted(by_rank.items()):
                order = (rank, (rank + by) % size, min(held))
                holder = next(at for at in order if at in held)
                chosen.append((held[holder], holder))
            return chosen
    return None


def _head(path: Path, identity: str) -> RankCopy | None:
    """Return what a file's head says, unless it is none of these or hangs on something else."""
    try:
        with path.open("rb") as file:
            file.readline(HEAD_BYTES)
            head = json.loads(file.readline(HEAD_BYTES))
        share = RankCopy(*(head[name] for name in RankCopy._fields))
        types = [type(value) for value in share]
        return share if head["identity"] == identity and types == TYPES else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(paths: Sequence[Path]) -> Tensor | None:
    """Return the bytes of a share from the first of its files that is as it was written."""
    for path in paths:
        try:
            with path.open("rb") as file:
                said, head = file.readline(HEAD_BYTES), file.readline(HEAD_BYTES)
                size = path.stat().st_size - file.tell()
                values = torch.empty(size, dtype=torch.uint8)
                count = file.readinto(values.numpy().data)
        except OSError as error:
            _log.warning("%s: %s", path, error)
            continue
        digest = sha256(head)
        digest.update(values.numpy().data)
        if count == size and said.decode("ascii", "replace").strip() == digest.hexdigest():
            return values
        _log.warning("%s is not as it was written", path)
    return None
