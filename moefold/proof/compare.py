"""Compares the results of a layout's ranks with one rank's run of the same subject.

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
"""Magnitude below which a quantity is degenerate: agreement on it proves nothing."""
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
    item_errors: dict[Item, float] = field(default_factory=dict)
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


def write_reference(path: Path, subject: Subject, result: RankResult) -> None:
    """Write one rank's results to a file that the ranks of layouts read."""
    tensors = {}
    norms_and_shapes = {}
    for kind, pieces in result.pieces.items():
        tensors |= {kind + SEPARATOR + p.name: p.tensor.contiguous() for p in pieces}
        norms_and_shapes[kind] = {
            p.name: (float(p.tensor.double().norm()), p.tensor.shape) for p in pieces
        }
    zero = zero_gradients(subject.decoder)
    facts = {
        "figures": result.figures,
        "counts": result.counts,
        "seed": subject.seed,
        "zero": [f"gradient of {name}: {why}" for name, why in zero.items()],
        "degenerate": find_degenerate(subject, result),
        "narrow": result.narrow,
        "tensors": norms_and_shapes,
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {"facts": json.dumps(facts)})
    partial.rename(path)


def read_facts(path: Path) -> dict[str, Any]:
    """Return a reference's facts: all but its tensors."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["facts"])


def find_degenerate(subject: Subject, result: RankResult) -> list[str]:
    """Return the degenerate quantities of a reference run: too small to prove anything, or tied.

    Gradients that are zero by the run's maths are excepted: they must be zero in every layout.
    """
    problems = []
    for name, values in result.figures.items():
        problems += [f"{name} is {v:g}" for v in values if not abs(v) > NEGLIGIBLE]
    grads = {piece.name: piece for piece in result.pieces.get("gradients", ())}
    weights = {piece.name: piece for piece in result.pieces.get("weights", ())}
    exempt = zero_gradients(subject.decoder)
    for kind, pieces in (("gradients", grads), ("weights", weights)):
        for name in grads:
            norm = float(pieces[name].tensor.double().norm())
            vanishes = not norm > NEGLIGIBLE and name not in exempt
            problems += [f"{kind} of {name}: {norm:g}"] if vanishes else []
    for name, piece in grads.items():
        if ".experts." in name:
            by_expert = piece.tensor.double().flatten(1).norm(dim=1).tolist()
            problems += _idle_problems(f"gradients of {name}", by_expert, subject, NEGLIGIBLE)
    for name, counts in result.counts.items():
        if name.endswith("load_E"):
            problems += _idle_problems(name, counts, subject, 0)
    # Between equal rows rounding decides an expert's choice. The first rows of documents that begin
    # with equal tokens are equal, since nothing precedes them.
    ffns = (block.ffn for block in subject.decoder.blocks)
    if any(isinstance(spec, LayerSpec) and spec.compares_rows for spec in ffns):
        for number, batch in enumerate(micro_batches(subject)):
            first = batch.ids_T[(batch.positions_T == 0) & batch.valid_T].tolist()
            if len(set(first)) < len(first):
                where = f"documents of micro-batch {number} start alike"
                problems.append(f"experts choose among equal rows: {where}")
    return problems


def zero_gradients(decoder: Decoder) -> dict[str, str]:
    """Return parameters whose gradient is zero by the maths of a decoder, each with the reason.

    Layers declare them (``without_gradient``), such as a router whose softmax is over one expert.
    """
    reasons = {}
    for number, block in enumerate(decoder.blocks):
        for name, spec in (("attention", block.attention), ("ffn", block.ffn)):
            if isinstance(spec, LayerSpec):
                prefix = f"layers.{number}.{spec.prefix or name}"
                for weight, reason in spec.without_gradient():
                    reasons[f"{prefix}.{weight}"] = reason
    return reasons


def _idle_problems(
    quantity: str, values: Sequence[float], subject: Subject, least: float
) -> list[str]:
    problems = []
    for expert, value in enumerate(values):
        if expert in subject.idle and value:
            problems.append(f"{quantity}: expert {expert} must be idle, but has {value:g}")
        elif expert not in subject.idle and not value > least:
            problems.append(f"{quantity}: expert {expert} has {value:g}")
    return problems


# --------------------------------------------------------------------------------- on each rank


def compare_rank(path: Path, result: RankResult) -> dict[str, Any]:
    """Compare a rank's results with the reference; return data that JSON can hold.

    Each piece has its tensor's name, its box, its squared error, and a digest of its bits.
    """
    compared: dict[str, list[Any]] = {}
    with safe_open(path, "pt") as file:
        reference_keys = set(file.keys())
        for kind, pieces in result.pieces.items():
            compared[kind] = []
            for piece in pieces:
                key = kind + SEPARATOR + piece.name
                error = math.nan  # if the reference has no such tensor
                if key in reference_keys:
                    expected = file.get_slice(key)[slices(piece.box) or ...].double()
                    error = float((piece.tensor.double() - expected).square().sum())
                raw = piece.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
                digest = hashlib.blake2b(raw.tobytes(), digest_size=8).hexdigest()
                compared[kind].append([piece.name, piece.box, error, digest])
    return {
        "figures": result.figures,
        "counts": result.counts,
        "pieces": compared,
        "narrow": result.narrow,
        "sites": result.sites,
    }


# ----------------------------------------------------------------------------- over all ranks


def combine_ranks(facts: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> Outcome:
    """Return the outcome of a case from the reference's facts and each rank's ``compare_rank``."""
    outcome = Outcome()
    problems = [f"degenerate: {line}" for line in facts["degenerate"]]
    narrow = set(facts["narrow"]).union(*(rank["narrow"] for rank in ranks))
    problems += [f"not fp64: {line}" for line in sorted(narrow)]
    _compare_figures(outcome, facts, ranks)
    if len(ranks[0]["figures"]["lm_loss"]) == len(facts["figures"]["lm_loss"]):
        missing = facts["tensors"].keys() - {kind for rank in ranks for kind in rank["pieces"]}
        problems += [f"no rank has {kind}" for kind in sorted(missing)]
    problems += _compare_counts(outcome, facts["counts"], ranks)
    replicas: list[str] = []
    for kind in dict.fromkeys(kind for rank in ranks for kind in rank["pieces"]):
        rows = [row for rank in ranks for row in rank["pieces"].get(kind, ())]
        problems += _compare_tensors(outcome, kind, facts["tensors"].get(kind, {}), rows, replicas)
    _record_error(outcome, "replicas", float(len(replicas)), replicas[0] if replicas else "")
    outcome.problems = tuple(problems)
    outcome.zero = tuple(facts["zero"])
    outcome.sites = tuple(sorted({CallSite(*site) for rank in ranks for site in rank["sites"]}))
    return outcome


def _record_error(
    outcome: Outcome, quantity: str, error: float, item: str, rank: int | None = None
) -> None:
    """Record an error of a tensor or step if it is the largest so far; NaN is the largest."""
    if _exceeds(error, outcome.item_errors.get((quantity, item))):
        outcome.item_errors[quantity, item] = error
    if _exceeds(error, outcome.errors.get(quantity)):
        outcome.errors[quantity] = error
        outcome.where[quantity] = item if rank is None else f"{item}, rank {rank}"


def _exceeds(error: float, largest: float | None) -> bool:
    return largest is None or math.isnan(error) or error > largest


def _compare_figures(
    outcome: Outcome, facts: dict[str, Any], ranks: Sequence[dict[str, Any]]
) -> None:
    """Record errors of figures, and of the first step's norm against the reference's gradients.

    The latter is needed because the reference's own norm may be wrong.
    """
    for name, values in facts["figures"].items():
        for number, rank in enumerate(ranks):
            actual = rank["figures"].get(name, [])
            if not actual:
                _record_error(outcome, name, math.inf, f"rank {number} has none")
            for step, (a, b) in enumerate(zip(actual, values, strict=False)):
                error = abs(a - b) / max(abs(b), NEGLIGIBLE)
                _record_error(outcome, name, error, f"step {step + 1}", number)
    total = math.hypot(*(norm for norm, _ in facts["tensors"]["gradients"].values()))
    for number, rank in enumerate(ranks):
        for actual in rank["figures"].get("grad_norm", [])[:1]:
            error = abs(actual - total) / max(total, NEGLIGIBLE)
            _record_error(outcome, "grad_norm", error, "against all gradients", number)


def _compare_counts(
    outcome: Outcome, expected: dict[str, list[int]], ranks: Sequence[dict[str, Any]]
) -> list[str]:
    """Record the fraction of tokens counted for other experts; return missing counts."""
    counted = set()
    for number, rank in enumerate(ranks):
        for name, actual in rank["counts"].items():
            counted.add(name)
            reference = expected.get(name, [])
            error = math.inf
            if len(actual) == len(reference):
                moved = sum(abs(a - b) for a, b in zip(actual, reference, strict=True))
                error = moved / max(sum(reference), 1)
            _record_error(outcome, "counts", error, name, number)
    return [f"no rank has counts of {name}" for name in expected if name not in counted]


def _compare_tensors(
    outcome: Outcome, kind: str, tensors: Tensors, rows: Sequence[Row], replicas: list[str]
) -> Iterator[str]:
    """Record the error of each tensor of a kind, tensors at the floor, and copies that differ.

    Yields the tensors that the ranks' pieces do not cover exactly once.
    """
    copies_of: dict[str, dict[Box, list[Row]]] = {name: {} for name in tensors}
    for row in rows:
        box = tuple((int(start), int(end)) for start, end in row[1])
        copies_of.setdefault(row[0], {}).setdefault(box, []).append(row)
    total = math.hypot(*(norm for norm, _ in tensors.values()))
    elements = sum(math.prod(shape) for _, shape in tensors.values())
    for name, boxes in copies_of.items():
        item = f"{kind} of {name}"
        if any(len({digest for *_, digest in copies}) > 1 for copies in boxes.values()):
            replicas.append(item)
        if name not in tensors:
            yield f"{item}: the reference has no such tensor"
            continue
        norm, shape = tensors[name]
        size = math.prod(shape)
        volume = sum(math.prod(end - start for start, end in box) for box in boxes)
        if volume != size or not boxes:
            yield f"{item}: the ranks have {volume} of {size} elements"
        floor = FLOOR * total * math.sqrt(size / max(elements, 1))
        if norm < floor:
            outcome.floored = (*outcome.floored, item)
        errors = [[error for _, _, error, _ in copies] for copies in boxes.values()]
        error = math.sqrt(
            sum(max(e, key=lambda x: math.inf if math.isnan(x) else x) for e in errors)
        )
        _record_error(outcome, kind, error / max(norm, floor) if error else 0.0, name)
