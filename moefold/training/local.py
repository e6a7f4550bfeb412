"""Copies of the state on node-local disks, for faster restarts in the same layout.

Each rank writes its packed part of the state on its machine, and that of the rank half the world
away, so that a machine may be lost. A step is complete if every rank's part is found somewhere,
undamaged and of one session. Otherwise the run resumes from its checkpoints, in any layout.

A file ``step-…/RANK.by-WRITER`` is a line with the SHA-256 of the rest, a line of JSON and the
packed bytes. The parent folder has the name in the run folder's ``local.json``.
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
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.checkpoint.config import NodeLocal
from moefold.checkpoint.disk import DISK, write_file
from moefold.checkpoint.folder import list_candidates, step_name
from moefold.comm.agree import run_on_first
from moefold.comm.collectives import gather_objects, receive, send, shift
from moefold.comm.world import World
from moefold.files import write_text
from moefold.training.recover import pack, packed_size, unpack
from moefold.training.saving import start_background

NAME_FILE = "local.json"
"""File in the run folder with the name of its copies, which are of no use without it."""
HEAD_BYTES = 1 << 20
HEAD_TYPES = [int, str, int, str, str]
_log = logging.getLogger("moefold.training")


class RankCopy(NamedTuple):
    """One rank's part of the state at a step, as described in the head of a file."""

    step: int
    session: str
    """Random id, new at each start and rewind: parts of two sessions are never mixed."""
    rank: int
    form: str
    """Digest of names, boxes and dtypes in the packed bytes (``state.signature``)."""
    progress: str
    """Progress of the run, as JSON."""


Parts = Sequence[tuple[int, str, Tensor]]
"""Rank, form and packed bytes of each part."""


class LocalCopies:
    """A run's copies on this machine. All ranks must call every method.

    ``identity`` is a digest of the run and its layout, ``signature`` that of names, boxes and
    dtypes of this rank's state.
    """

    def __init__(
        self, record: NodeLocal, folder: Path, identity: str, signature: str, world: World
    ) -> None:
        root = os.path.expandvars(record.folder)
        if "$" in root:
            raise ValueError(f"watch.checkpoint.local.folder: unset environment variable in {root}")
        self._root = Path(root)
        self._every = record.every
        self._identity = identity
        self._folder = folder
        self._signature = signature
        self._world = world
        self._session = ""
        self._run_folder = Path()
        # Distance to the rank that also writes this rank's part.
        self._partner_distance = world.on_host.size // 2
        self._thread: threading.Thread | None = None
        self._written = -1
        """Newest step of this session on this rank's disk."""

    def save(
        self, progress: dict[str, Any], state: Callable[[], Sequence[Tensor]], rewound: bool = False
    ) -> None:
        """Copy the state if the ``step`` is due, and write it in a thread during later steps.

        ``rewound``: copies of later steps are void.
        """
        step = progress["step"]
        if rewound:
            self.wait()
            self._session = ""
            self._written = -1
        self._begin_session(step)
        if step % self._every or step == 0:
            return
        self.wait()
        ranks = self._world.on_host
        tensors = state()
        own_state = torch.empty(packed_size(tensors), dtype=torch.uint8)
        pack(tensors, own_state)
        parts = [(ranks.index, self._signature, own_state)]
        headers = gather_objects([own_state.numel(), self._signature, self._written], ranks)
        complete = min(written for *_, written in headers)
        if ranks.size > 1:
            owner = (ranks.index - self._partner_distance) % ranks.size
            size, signature, _ = headers[owner]
            partner_state = torch.empty(size, dtype=torch.uint8)
            with self._world.recorder.module("local copies"):
                shift(own_state, partner_state, self._partner_distance, ranks).wait()
            parts.append((owner, signature, partner_state))
        self._thread = start_background(self._write, step, json.dumps(progress), parts, complete)

    def restore(self, tensors: Sequence[Tensor], since: int) -> tuple[dict[str, Any], Path] | None:
        """Fill the state from the newest complete step that is not before ``since``.

        Returns:
            Its ``progress``, and its folder on this machine; None if no step is complete.
        """
        ranks = self._world.on_host
        name = run_on_first(self._read_name, ranks)
        folder = self._root / str(name)
        files = self._find_copies(folder, since) if name else {}
        while True:
            gathered = gather_objects([self._signature, list(files)], ranks)
            heads = [([RankCopy(*head) for head in copies], form) for form, copies in gathered]
            sources = newest_complete(heads, self._partner_distance)
            if sources is None:
                return None
            own_copies = [copy for copy, holder in sources if holder == ranks.index]
            loaded = {copy: _read_copy(files[copy]) for copy in own_copies}
            damaged = [copy for copy, values in loaded.items() if values is None]
            for copy in damaged:
                del files[copy]
            if not any(gather_objects(len(damaged), ranks)):
                break
        own_copy = sources[ranks.index][0]
        parts = {copy.rank: values for copy, values in loaded.items() if values is not None}
        unpack(self._exchange(parts, sources, packed_size(tensors)), tensors)
        return json.loads(own_copy.progress), folder / step_name(own_copy.step)

    def wait(self) -> None:
        """Wait until the copy in progress is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _begin_session(self, step: int) -> None:
        """Name a new session before its first step; drop copies of later steps, which are void."""
        if self._session:
            return

        def new_session() -> list[str]:
            name = self._read_name()
            if name is None:
                name = uuid.uuid4().hex
                write_text(self._folder / NAME_FILE, json.dumps(name) + "\n")
            return [name, uuid.uuid4().hex]

        name, self._session = run_on_first(new_session, self._world.on_host)
        self._run_folder = self._root / name
        for candidate in list_candidates(self._run_folder):
            if candidate.step > step:
                shutil.rmtree(candidate.path, ignore_errors=True)

    def _read_name(self) -> str | None:
        with suppress(FileNotFoundError, ValueError):  # it can be empty after a power loss
            return json.loads((self._folder / NAME_FILE).read_text())
        return None

    def _write(self, step: int, progress: str, parts: Parts, complete: int) -> None:
        """Drop the steps before ``complete``, which all ranks have written, and write ``parts``.

        A write error is logged, and costs only this step's copies.
        """
        for candidate in list_candidates(self._run_folder):
            if candidate.step < complete:
                shutil.rmtree(candidate.path, ignore_errors=True)
        folder = self._run_folder / step_name(step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank, signature, values in parts:
                copy = RankCopy(step, self._session, rank, signature, progress)
                fields = {"identity": self._identity, **copy._asdict()}
                head = json.dumps(fields).encode() + b"\n"
                digest = sha256(head)
                data = values.numpy().data
                digest.update(data)
                path = folder / f"{rank}.by-{self._world.on_host.index}"
                part = path.with_suffix(path.suffix + ".part")
                part.unlink(missing_ok=True)
                checksum = digest.hexdigest().encode()
                write_file(DISK, part, checksum + b"\n" + head, data)
                DISK.rename(part, path)
            self._written = step
        except OSError as error:
            _log.warning("cannot write the local copy of step %d: %s", step, error)

    def _find_copies(self, root: Path, since: int) -> dict[RankCopy, list[Path]]:
        """Return the files of each part on this machine that fits the run and its layout."""
        files_by_copy: dict[RankCopy, list[Path]] = {}
        folders = [step.path for step in list_candidates(root) if step.step >= since]
        for path in chain.from_iterable(sorted(folder.glob("*.by-*")) for folder in folders):
            with suppress(OSError, ValueError, KeyError, TypeError):  # not such a file
                with path.open("rb") as file:
                    file.readline(HEAD_BYTES)
                    head = json.loads(file.readline(HEAD_BYTES))
                copy = RankCopy(*(head[name] for name in RankCopy._fields))
                types = [type(value) for value in copy]
                if head["identity"] == self._identity and types == HEAD_TYPES:
                    files_by_copy.setdefault(copy, []).append(path)
        return files_by_copy

    def _exchange(
        self, parts: Mapping[int, Tensor], sources: Sequence[tuple[RankCopy, int]], size: int
    ) -> Tensor:
        """Send the parts that other ranks lack; return this rank's part."""
        ranks = self._world.on_host
        other_ranks = [rank for rank in parts if rank != ranks.index]
        sends = [send(parts[rank], ranks.ranks[rank], ranks) for rank in other_ranks]
        holder = sources[ranks.index][1]
        if holder == ranks.index:
            own_part = parts[ranks.index]
        else:
            own_part = torch.empty(size, dtype=torch.uint8)
            receive(own_part, ranks.ranks[holder], ranks).wait()
        for work in sends:
            work.wait()
        return own_part


def newest_complete(
    heads_by_rank: Sequence[tuple[Sequence[RankCopy], str]], distance: int
) -> list[tuple[RankCopy, int]] | None:
    """Return each rank's part of the newest complete step, and who reads it; None without one.

    A rank reads its part itself if it can; else the rank ``distance`` after it does, else the first
    that can. ``heads_by_rank`` has for each rank the parts that it can read, and its state's form.
    """
    size = len(heads_by_rank)
    holders: dict[tuple[int, str, str], dict[int, dict[int, RankCopy]]] = {}
    for holder, (copies, _) in enumerate(heads_by_rank):
        for copy in copies:
            if copy.rank < size and copy.form == heads_by_rank[copy.rank][1]:
                by_rank = holders.setdefault((copy.step, copy.session, copy.progress), {})
                by_rank.setdefault(copy.rank, {})[holder] = copy
    for _, by_rank in sorted(holders.items(), reverse=True):
        if len(by_rank) == size:
            chosen = []
            for rank, copy_by_holder in sorted(by_rank.items()):
                preferred = (rank, (rank + distance) % size, min(copy_by_holder))
                holder = next(rank for rank in preferred if rank in copy_by_holder)
                chosen.append((copy_by_holder[holder], holder))
            return chosen
    return None


def _read_copy(paths: Sequence[Path]) -> Tensor | None:
    """Return the bytes of a part from the first of its files that is undamaged, else None."""
    for path in paths:
        try:
            with path.open("rb") as file:
                checksum = file.readline(HEAD_BYTES)
                head = file.readline(HEAD_BYTES)
                size = path.stat().st_size - file.tell()
                values = torch.empty(size, dtype=torch.uint8)
                count = file.readinto(values.numpy().data)
        except OSError as error:
            _log.warning("%s: %s", path, error)
            continue
        digest = sha256(head)
        digest.update(values.numpy().data)
        expected = checksum.decode("ascii", "replace").strip()
        if count == size and digest.hexdigest() == expected:
            return values
        _log.warning("%s is damaged: its size or checksum is wrong", path)
    return None
