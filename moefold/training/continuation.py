"""A run's loader, and how a changed run goes on: each source continues where it stopped.

A fork may change mixture, length of sequences, seed, batch and sources. What is read again because
of it is counted, and refused unless ``train.repeat`` allows it.
"""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moefold.comm.world import World
from moefold.config.base import to_dict
from moefold.config.fields import FieldSpec, basename, iter_file_paths
from moefold.data.config import BatchSizes, Data
from moefold.data.loader import Loader, Reading, same_data
from moefold.data.order import Given, Mixture, OrderStart, match_given
from moefold.data.packing import MaskedCorpus, build_sequences
from moefold.data.prepare import PreparedData, PreparedPart
from moefold.optim.rates import RatePhase, change_steps
from moefold.run import Run
from moefold.training.config import BatchRamp, batch_sizes
from moefold.training.state import Progress


class RepeatedData(ValueError):
    """A fork that changes the order of data would read again what was trained.

    ``lines`` has what is read of each source, and how much of it again.
    """

    def __init__(self, message: str, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = tuple(lines)


@dataclass(frozen=True)
class StoredOrder:
    """The data order of a checkpoint's run, and its place in it."""

    seed: int
    seq: int
    sizes: BatchSizes
    sources: tuple[Mapping[str, Any], ...]
    """Records of the training sources."""
    taken: tuple[int, ...]
    """Sequences of each source since the order began."""
    planned: tuple[int, ...]
    """Sequences of each source from the checkpoint to the last step of its run."""

    @classmethod
    def of(cls, stored: Mapping[str, Any], progress: Progress) -> "StoredOrder":
        """Read it from the run of a checkpoint, as plain data, and the progress there."""
        train = stored["train"]
        data = stored["data"]
        sources = tuple(data["train"])
        ramp = train.get("ramp") and BatchRamp.model_validate(train["ramp"])
        sizes = batch_sizes(train["batch"], data["seq"], ramp)
        mixture = Mixture(tuple(source.get("weight", 1.0) for source in sources))
        index = progress.next_batch_index()
        offset = progress.sequence_offset - progress.order.first
        steps_left = max(train["steps"] - progress.step, 0)
        taken = mixture.counts(sizes.before(index) + offset)
        end = mixture.counts(sizes.before(index + steps_left) + offset)
        planned = tuple(b - a for a, b in zip(taken, end, strict=True))
        return cls(stored.get("seed", 1), data["seq"], sizes, sources, taken, planned)

    @property
    def labels(self) -> list[str]:
        """Names of the training sources."""
        return [source.get("name") or source["source"] for source in self.sources]


def open_loader(run: Run, prepared: PreparedData, world: World) -> Loader:
    """Return the loader of this data rank's micro-batches.

    Raises:
        ValueError: if the pipeline schedule cannot run the micro-batches of a later, larger batch.
    """
    seq = run.data.seq
    micro_batch = run.train.micro_batch
    sizes = run.train.sizes(seq)
    pad_to = world.folding.sizes.row_multiple
    rank = world.attention.dp
    ranks = world.folding.dp
    for _, size in sizes.stages if run.train.ramp else ():
        per_rank = -(-size // (micro_batch * ranks))
        for found in run.layout.schedule_violations(per_rank):
            raise ValueError(
                f"train.ramp: a batch of {size} is {per_rank} micro-batches on each data rank, but "
                f"their number {found.rule}; choose train.ramp.from and train.batch accordingly"
            )
    return Loader(prepared, seq, sizes, micro_batch, run.seed, pad_to, rank, ranks)


def continue_data(
    progress: Progress, meta: Mapping[str, Any], stored: Mapping[str, Any], run: Run, loader: Loader
) -> tuple[Progress, list[str]]:
    """Let a fork's loader go on where each source stopped; return its progress, and what to report.

    Args:
        progress: the progress of the checkpoint.
        meta: the checkpoint's metadata.
        stored: the checkpoint's run, as plain data.
        run: the fork.
        loader: the fork's loader.

    Raises:
        RepeatedData: if the change reads again what was trained, unless ``train.repeat`` allows it.
    """
    old = StoredOrder.of(stored, progress)
    is_same_order = same_data(meta["data"], loader.fingerprint()) and old.seed == run.seed
    given = _given_before(old, meta, run, loader)
    lines: list[str] = []
    refused: list[str] = []
    start = progress.order
    if not is_same_order:
        stored_sources = meta["run"]["data"]["train"]
        changed = _unrecognised(stored_sources, given, run, loader)
        kept = [_recut(one, run, loader, lines) for one in given]
        start = OrderStart(progress.first_sequence(old.sizes), tuple(kept))
        refused += changed
        lines += changed
    progress = replace(progress.rebatched(old.sizes, loader.sizes), order=start)
    loader.start_order(start, progress.sequence_offset)
    index = progress.next_batch_index()
    last = index + max(run.train.steps - progress.step, 0)
    readings = loader.readings(index, last)
    lines[:0] = [describe_reading(each, run.train.steps) for each in readings]
    accepted = _repeated_before(old, given, loader)
    for each in readings if not is_same_order else ():
        if each.again and each.name not in accepted:
            refused.append(describe_reading(each, run.train.steps))
    if refused and run.train.repeat == "refuse":
        listed = "".join(f"\n  {line}" for line in refused)
        raise RepeatedData(
            f"with these changes data that was trained is trained again:{listed}\n"
            "Lower the weight of the source or train.steps, add data, or allow it with "
            "train.repeat=allow",
            refused,
        )
    return progress, lines


def continue_steps(progress: Progress, run: Run, loader: Loader) -> tuple[Progress, list[str]]:
    """Let the loader go on, and the run with its number of steps, which may have been another.

    More steps read on in the same order, as if the run had been stated with them, so that what
    they repeat is reported and not refused.

    Returns:
        The progress, and a line for each source of which the change repeats data.

    Raises:
        RateJump: if the learning rate would jump, and ``train.extend`` does not say how it goes.
    """
    loader.start_order(progress.order, progress.sequence_offset)
    steps = run.train.steps
    step = progress.step
    phases = progress.rate or (RatePhase(steps),)
    optim = run.optim
    done = progress.updates
    changed = change_steps(phases, optim.schedule_lr, done, steps, run.train.extend, optim.lr)
    lines: list[str] = []
    if step and steps > phases[-1].end:
        index = progress.next_batch_index()
        planned_steps = max(phases[-1].end - step, 0)
        planned = loader.readings(index, index + planned_steps)
        present = loader.readings(index, index + steps - step)
        pairs = zip(planned, present, strict=True)
        longer = [one for before, one in pairs if one.again > before.again]
        lines = [describe_reading(one, steps) for one in longer]
    return replace(progress, rate=changed), lines


def describe_reading(reading: Reading, last_step: int) -> str:
    """Return what is read of a source up to a step, and how much of it again."""
    epoch = f" of epoch {reading.epoch + 1}" if reading.epoch else ""
    again = f"{reading.again:,} of them again" if reading.again else "none of them again"
    trained = f"{reading.given:,} of {reading.n_tokens:,} tokens trained{epoch}"
    return f"{reading.name}: {trained}; {reading.tokens:,} more to step {last_step:,}, {again}"


def _given_before(
    old: StoredOrder, meta: Mapping[str, Any], run: Run, loader: Loader
) -> list[Given]:
    """Return what the sources of the checkpoint's run have given, in the order of its sources.

    Sources that it no longer read follow. Checkpoints of earlier versions have only a position in
    the mixture; their sources are recognised by their records.
    """
    if "sources" in meta:
        return [Given.from_dict(one) for one in meta["sources"]]
    given = []
    for source, label, n in zip(old.sources, old.labels, old.taken, strict=True):
        one = Given(label, "", old.seed, ((old.seq, n),))
        for record, part in zip(run.data.train, loader.prepared.train, strict=True):
            if _content(to_dict(record)) == _content(source) and _fits(part, old.seq):
                sequences = build_sequences(part.corpus, old.seed, label, old.seq)
                one = replace(sequences.given_after(n), digest=part.digest)
        given.append(one)
    return given


def _content(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a source's record on which its documents depend."""
    return {key: value for key, value in source.items() if key not in ("name", "weight")}


def _fits(part: PreparedPart, seq: int) -> bool:
    """Return whether sequences of a length can hold a source's documents."""
    corpus = part.corpus
    if not isinstance(corpus, MaskedCorpus):
        return True
    # Masked documents are not cut.
    return int(corpus.lengths.max(initial=0)) <= seq


def _recut(given: Given, run: Run, loader: Loader, lines: list[str]) -> Given:
    """Begin another epoch of a text whose sequences grow, if repeats are allowed, and report it.

    What is left of its epoch has been cut to shorter sequences, so that no document in it has a
    longer context.
    """
    parts = (p for p in loader.prepared.train if p.digest == given.digest)
    part = next(parts, None)
    seq = loader.seq
    cut = given.cuts[0][0]
    if part is None or isinstance(part.corpus, MaskedCorpus):
        return given
    if given.is_between_epochs or cut >= seq:
        return given
    sequences = build_sequences(part.corpus, run.seed, part.name, seq, given)
    trained = sequences.tokens_given
    left = sequences.count_tokens(0, sequences.n_left)
    if run.train.repeat == "allow":
        lines.append(
            f"{part.name}: a new epoch begins in sequences of {seq} tokens; {trained:,} of its "
            f"tokens were trained in sequences of {cut} (train.repeat: allow)"
        )
        return Given(part.name, given.digest, run.seed, ((seq, 0),), given.epoch + 1)
    lines.append(
        f"{part.name}: the {left:,} tokens left of its epoch were cut to sequences of {cut}, so "
        f"their context stays below that until they are used up; train.repeat=allow cuts all "
        f"anew, and trains {trained:,} tokens of them again"
    )
    return given


def _unrecognised(
    stored: Sequence[Mapping[str, Any]], given: Sequence[Given], run: Run, loader: Loader
) -> list[str]:
    """Describe sources of which something was trained, but whose tokens are others now.

    Such a source reads files that an old source read, but text, tokenizer or holdout differ, so
    that its documents cannot be told from those that were trained.
    """
    matched, _ = match_given(given, loader.identities)
    begun = [one.epoch > 0 or not one.is_between_epochs for one in given]
    missing = [
        (one, source)
        for one, source, has_begun in zip(given, stored, begun, strict=False)
        if has_begun and one not in matched
    ]
    lines = []
    for record, found in zip(run.data.train, matched, strict=True):
        for one, source in missing if found is None else ():
            if not _shares_files(source, to_dict(record)):
                continue
            trained = sum(seq * n for seq, n in one.cuts)
            epochs = f" in epoch {one.epoch + 1}" if one.epoch else ""
            lines.append(
                f"{record.label}: its tokens are not those of the checkpoint's run (its files, the "
                f"tokenizer or holdout changed), so it is read from the start; {trained:,} tokens "
                f"of it were trained{epochs} and come again as far as they are still in it"
            )
    return lines


def _shares_files(stored: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """Return whether two sources' records name a file in common; if none names any, their kind.

    A stored file that is gone may have been moved: it is one of the same name.
    """
    old = _source_paths(stored)
    new = _source_paths(present)
    if not old and not new:
        return stored["source"] == present["source"]
    found = set[str]().union(*(_existing(path, globs) for path, globs in new))
    names = {basename(path) for path, _ in new}
    for path, globs in old:
        files = _existing(path, globs)
        if files & found or (not files and basename(path) in names):
            return True
    return False


def _source_paths(source: Any) -> list[tuple[str, bool]]:
    """Return the paths of a source's record, and whether each is a pattern."""
    paths = iter_file_paths(FieldSpec(Data), {"train": [source]})
    return [(path, mark.globs) for _, path, mark in paths]


def _existing(path: str, globs: bool) -> set[str]:
    """Return the files at a path, or of a pattern."""
    if globs:
        return set(glob.glob(path, recursive=True))
    return set(glob.glob(f"{glob.escape(path)}*"))


def _repeated_before(old: StoredOrder, given: Sequence[Given], loader: Loader) -> set[str]:
    """Return the sources whose repeats are no consequence of the change.

    They are new, so that they repeat as in a new run, or the checkpoint's run itself has read them
    again, or was to.
    """
    matched, _ = match_given(given, loader.identities)
    found = set()
    for part, one in zip(loader.prepared.train, matched, strict=True):
        number = len(old.planned) if one is None else given.index(one)
        if one is None or one.epoch or one.is_between_epochs:
            found.add(part.name)
        elif number < len(old.planned):
            label = old.labels[number]
            sequences = build_sequences(part.corpus, old.seed, label, old.seq, one)
            if sequences.again(old.planned[number]):
                found.add(part.name)
    return found
