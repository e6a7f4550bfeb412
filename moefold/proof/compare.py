"""Comparison of the results of a layout's ranks with one rank's run of the same subject.

The error of a tensor is ``|a - b| / max(|b|, 1e-6 |all| sqrt(n / n_all))`` in the 2-norm, where
*all* is every tensor of its kind: relative errors of a tensor a million times smaller than the
others are mostly rounding. Tensors at that floor are named.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moefold.comm.recorder import CallSite
from moefold.layers.placement import Box, slices
from moefold.model.config import Decoder
from moefold.proof.case import Subject
from moefold.proof.rank_run import RankResult, micro_batches
from moefold.spec.layer import LayerSpec

NEGLIGIBLE = 1e-6
"""Below this magnitude a quantity is degenerate: agreement on it proves nothing."""
FLOOR = 1e-6
SEPARATOR = "|"
Tensors = dict[str, tuple[float, Sequence[int]]]
"""Norm and shape of each tensor of a kind in the reference, by name."""
Item = tuple[str, str]
"""A quantity, and its tensor or step."""
Row = Sequence[Any]
"""One piece of a tensor: name, box, squared error, and a digest of its bits."""


@dataclass
class Outcome:
    """The outcome of a case."""

    errors: dict[str, float] = field(default_factory=dict)
    """The largest relative error of each quantity."""
    where: dict[str, str] = field(default_factory=dict)
    """The tensor or step of that error."""
    each: dict[Item, float] = field(default_factory=dict)
    """The largest relative error of each tensor, or of each step, over all ranks."""
    floored: tuple[str, ...] = ()
    """Tensors so much smaller than others of their kind that errors are relative to the floor."""
    problems: tuple[str, ...] = ()
    """Problems other than errors: missing pieces, degenerate quantities, narrow tensors."""
    zero: tuple[str, ...] = ()
    """Gradients that are zero by the run's maths, each with its reason."""
    sites: tuple[CallSite, ...] = ()
    """Call sites of the exchanges between ranks that were recorded."""
    seconds: float = 0.0


# ------------------------------------------------------------------------- the reference, on disk


def write_reference(path: Path, subject: Subject, found: RankResult) -> None:
    """Write the results of one rank to a file that the ranks of layouts read."""
    tensors = {
        kind + SEPARATOR + piece.name: piece.tensor.contiguous()
        for kind, pieces in found.pieces.items()
        for piece in pieces
    }
    facts = {
        "figures": found.figures,
        "counts": found.counts,
        "seed": subject.seed,
        "zero": [f"gradient of {name}: {why}" for name, why in zero(subject.decoder).items()],
        "degenerate": degenerate(subject, found),
        "narrow": found.narrow,
        "tensors": {
            kind: {p.name: (float(p.tensor.double().norm()), p.tensor.shape) for p in pieces}
            for kind, pieces in found.pieces.items()
        },
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {"facts": json.dumps(facts)})
    partial.rename(path)


def facts_of(path: Path) -> dict[str, Any]:
    """Return a reference's facts: everything but its tensors."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["facts"])


def degenerate(subject: Subject, found: RankResult) -> list[str]:
    """Return the degenerate quantities of a reference run: too small to prove anything, or tied.

    Gradients that are zero by the run's maths are excepted: they must be zero in every layout.
    """
    words = []
    for name, values in found.figures.items():
        words += [f"{name} is {v:g}" for v in values if not abs(v) > NEGLIGIBLE]
    grads, weights = (
        {piece.name: piece for piece in found.pieces.get(kind, ())}
        for kind in ("gradients", "weights")
    )
    excused = zero(subject.decoder)
    for kind, pieces in (("gradients", grads), ("weights", weights)):
        for name in grads:
            norm = float(pieces[name].tensor.double().norm())
            vanishes = not norm > NEGLIGIBLE and name not in excused
            words += [f"{kind} of {name}: {norm:g}"] if vanishes else []
    for name, piece in grads.items():
        if ".experts." in name:
            by_expert = piece.tensor.double().flatten(1).norm(dim=1).tolist()
            words += _idle_words(f"gradients of {name}", by_expert, subject, NEGLIGIBLE)
    for name, counts in found.counts.items():
        if name.endswith("load_E"):
            words += _idle_words(name, counts, subject, 0)
    # Experts that choose between equal rows have a tie for roundings. The first rows of documents
    # that begin with equal tokens are equal: nothing precedes them.
    ffns = (block.ffn for block in subject.decoder.blocks)
    if any(isinstance(spec, LayerSpec) and spec.compares_rows for spec in ffns):
        for number, batch in enumerate(micro_batches(subject)):
            first = batch.ids_T[(batch.positions_T == 0) & batch.valid_T].tolist()
            if len(set(first)) < len(first):
                where = f"documents of micro-batch {number} start alike"
                words.append(f"experts choose among equal rows: {where}")
    return words


def zero(decoder: Decoder) -> dict[str, str]:
    """Return parameters whose gradient is zero by the maths of a decoder, each with the reason.

    Layers declare them (``without_gradient``), such as a router whose softmax is over one expert.
    """
    return {
        f"layers.{number}.{spec.prefix or name}.{weight}": reason
        for number, block in enumerate(decoder.blocks)
        for name, spec in (("attention", block.attention), ("ffn", block.ffn))
        if isinstance(spec, LayerSpec)
        for weight, reason in spec.without_gradient()
    }


def _idle_words(what: str, values: Sequence[float], subject: Subject, least: float) -> list[str]:
    words = []
    for expert, value in enumerate(values):
        if expert in subject.idle and value:
            words.append(f"{what}: expert {expert} must be idle, but has {value:g}")
        elif expert not in subject.idle and not value > least:
            words.append(f"{what}: expert {expert} has {value:g}")
    return words


# --------------------------------------------------------------------------------- on each rank


def measure(path: Path, found: RankResult) -> dict[str, Any]:
    """Return a rank's results compared with the reference, as data that JSON can hold.

    Each piece has its tensor's name, its box, its squared error, and a digest of its bits.
    """
    told: dict[str, list[Any]] = {}
    with safe_open(path, "pt") as file:
        known = set(file.keys())
        for kind, pieces in found.pieces.items():
            told[kind] = []
            for piece in pieces:
                key = kind + SEPARATOR + piece.name
                error = math.nan  # if the reference has no such tensor
                if key in known:
                    wanted = file.get_slice(key)[slices(piece.box) or ...].double()
                    error = float((piece.tensor.double() - wanted).square().sum())
                raw = piece.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
                digest = hashlib.blake2b(raw.tobytes(), digest_size=8).hexdigest()
                told[kind].append([piece.name, piece.box, error, digest])
    return {
        "figures": found.figures,
        "counts": found.counts,
        "pieces": told,
        "narrow": found.narrow,
        "sites": found.sites,
    }


# ----------------------------------------------------------------------------- over all ranks


def judge(facts: dict[str, Any], told: Sequence[dict[str, Any]]) -> Outcome:
    """Return the outcome of a case from the reference's facts and each rank's ``measure``."""
    outcome = Outcome()
    problems = [f"degenerate: {words}" for words in facts["degenerate"]]
    narrow = sorted({words for rank in told for words in rank["narrow"]} | set(facts["narrow"]))
    problems += [f"not fp64: {words}" for words in narrow]
    _judge_figures(outcome, facts, told)
    if len(told[0]["figures"]["lm_loss"]) == len(facts["figures"]["lm_loss"]):
        missing = facts["tensors"].keys() - {kind for rank in told for kind in rank["pieces"]}
        problems += [f"no rank has {kind}" for kind in sorted(missing)]
    problems += _judge_counts(outcome, facts["counts"], told)
    replicas: list[str] = []
    for kind in dict.fromkeys(kind for rank in told for kind in rank["pieces"]):
        rows = [row for rank in told for row in rank["pieces"].get(kind, ())]
        problems += _judge_kind(outcome, kind, facts["tensors"].get(kind, {}), rows, replicas)
    _note(outcome, "replicas", float(len(replicas)), replicas[0] if replicas else "")
    outcome.problems, outcome.zero = tuple(problems), tuple(facts["zero"])
    outcome.sites = tuple(sorted({CallSite(*site) for rank in told for site in rank["sites"]}))
    return outcome


def _note(
    outcome: Outcome, quantity: str, error: float, what: str, rank: int | None = None
) -> None:
    """Record an error of a tensor or step if it is the largest so far; NaN is the largest."""
    if _exceeds(error, outcome.each.get((quantity, what))):
        outcome.each[quantity, what] = error
    if _exceeds(error, outcome.errors.get(quantity)):
        outcome.errors[quantity] = error
        outcome.where[quantity] = what if rank is None else f"{what}, rank {rank}"


def _exceeds(error: float, held: float | None) -> bool:
    return held is None or math.isnan(error) or error > held


def _judge_figures(outcome: Outcome, facts: dict[str, Any], told: Sequence[dict[str, Any]]) -> None:
    """Record errors of figures, and of the first step's norm relative to the reference's gradients.

    The latter is compared too because the reference's own norm may be wrong.
    """
    for name, values in facts["figures"].items():
        for number, rank in enumerate(told):
            have = rank["figures"].get(name, [])
            if not have:
                _note(outcome, name, math.inf, f"rank {number} has none")
            for step, (a, b) in enumerate(zip(have, values, strict=False)):
                error = abs(a - b) / max(abs(b), NEGLIGIBLE)
                _note(outcome, name, error, f"step {step + 1}", number)
    whole = math.hypot(*(norm for norm, _ in facts["tensors"]["gradients"].values()))
    for number, rank in enumerate(told):
        for have in rank["figures"].get("grad_norm", [])[:1]:
            error = abs(have - whole) / max(whole, NEGLIGIBLE)
            _note(outcome, "grad_norm", error, "against all gradients", number)


def _judge_counts(
    outcome: Outcome, wanted: dict[str, list[int]], told: Sequence[dict[str, Any]]
) -> list[str]:
    """Record the share of tokens counted for other experts; return the counts that are missing."""
    seen = set()
    for number, rank in enumerate(told):
        for name, have in rank["counts"].items():
            seen.add(name)
            want = wanted.get(name, [])
            apart = sum(abs(a - b) for a, b in zip(have, want, strict=False))
            error = apart / max(sum(want), 1) if len(have) == len(want) else math.inf
            _note(outcome, "counts", error, name, number)
    return [f"no rank has counts of {name}" for name in wanted if name not in seen]


def _judge_kind(
    outcome: Outcome, kind: str, tensors: Tensors, rows: Sequence[Row], replicas: list[str]
) -> Iterator[str]:
    """Record the error of each tensor of a kind, tensors at the floor, and copies that differ.

    Yields the tensors that the ranks' pieces do not cover exactly once.
    """
    held: dict[str, dict[Box, list[Row]]] = {name: {} for name in tensors}
    for row in rows:
        box = tuple((int(start), int(end)) for start, end in row[1])
        held.setdefault(row[0], {}).setdefault(box, []).append(row)
    everything = math.hypot(*(norm for norm, _ in tensors.values()))
    elements = sum(math.prod(shape) for _, shape in tensors.values())
    for name, boxes in held.items():
        what = f"{kind} of {name}"
        if any(len({digest for *_, digest in copies}) > 1 for copies in boxes.values()):
            replicas.append(what)
        if name not in tensors:
            yield f"{what}: the reference has no such tensor"
            continue
        norm, shape = tensors[name]
        size = math.prod(shape)
        volume = sum(math.prod(end - start for start, end in box) for box in boxes)
        if volume != size or not boxes:
            yield f"{what}: the ranks have {volume} of {size} elements"
        floor = FLOOR * everything * math.sqrt(size / max(elements, 1))
        if norm < floor:
            outcome.floored = (*outcome.floored, what)
        errors = [[error for _, _, error, _ in copies] for copies in boxes.values()]
        error = math.sqrt(
            sum(max(e, key=lambda one: math.inf if math.isnan(one) else one) for e in errors)
        )
        _note(outcome, kind, error / max(norm, floor) if error else 0.0, name)
