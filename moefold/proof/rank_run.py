"""One rank's part of a case: a step's gradients, an evaluation, and three updates.

Its results are tensor pieces with their boxes, by *kind*: ``gradients``, ``weights`` (the change
over three steps) and ``optimizer/<state>``. Documents are packed and of uneven lengths, and most
micro-batches end with padding.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from moefold.comm.recorder import CallRecord as Operation
from moefold.comm.recorder import CallSite
from moefold.comm.world import World
from moefold.config.slot import build
from moefold.data.batch import IGNORE_INDEX, MicroBatch, assemble
from moefold.layers.placement import Shard
from moefold.layers.precision import DTYPES
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise, normal_slice
from moefold.optim.base import Optimizer
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import ModelParts
from moefold.parallel.apply import build_parts as build_parts
from moefold.parallel.data.sharding import LocalSlice, ShardedState
from moefold.proof.case import ProofCase, Subject
from moefold.proof.modes import NarrowWatch, ShuffledSums
from moefold.spec.decoder import LORA_B
from moefold.training.evaluate import evaluate
from moefold.training.losses.base import Objective
from moefold.training.step import gradients

STEPS = 3
LOSS_CHUNK = 24
"""Rows whose logits exist at a time: fewer than a micro-batch has, so there are several chunks."""


# --------------------------------------------------------- rows and values, functions of a subject

BIAS = 0.1
"""Initial selection biases range from -BIAS to BIAS."""
EXCLUDED_BIAS = -100.0
"""Selection bias of an expert that no token may choose."""


def micro_batches(subject: Subject) -> list[MicroBatch]:
    """Return a step's full micro-batches: three documents each, two pairs, or empty."""
    batches = []
    for number in range(subject.micro_batches):
        valid = subject.rows - (number % 3) * subject.padding
        first = valid // 5 + number % 3
        second = valid // 3
        third = valid - first - second
        documents = (first, second, third)
        if subject.loss.pairs:
            documents = (first, second, third // 2, third - third // 2)
        lengths = () if number in subject.empty else documents
        generator = np.random.Generator(np.random.PCG64((subject.seed, number)))
        ids_T = generator.integers(0, subject.decoder.vocab, sum(lengths))
        labels_T = np.append(ids_T[1:], IGNORE_INDEX)[: len(ids_T)]
        ends = np.cumsum(lengths, dtype=np.int64)
        labels_T[ends - 1] = IGNORE_INDEX
        for length, end in zip(lengths, ends, strict=True) if subject.masked else ():
            masked_end = end - length // (2 + number % 3)
            labels_T[end - length : masked_end] = IGNORE_INDEX
        token_T = np.arange(subject.rows) + number * subject.rows
        batches.append(assemble(ids_T, labels_T, lengths, rows=subject.rows, token_T=token_T))
    return batches


@torch.no_grad()
def initialise_model(model: DecoderModel, subject: Subject, shards: Mapping[str, Shard]) -> None:
    """Initialise this rank's parameters, including random vectors and uneven selection biases."""
    initialise(model, subject.decoder, subject.seed, shards)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith(LORA_B):  # in training B starts at zero
            parameter.add_(normal_slice(subject.seed, shards[name], 0.1))
    for _, moe in model.moe_layers():
        bias_E = moe.router.selection_bias
        if bias_E is not None:
            bias_E.copy_(torch.linspace(-BIAS, BIAS, bias_E.shape[0]))
            bias_E[list(subject.idle)] = EXCLUDED_BIAS


# --------------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class InjectedFault:
    """Deliberate fault, which a proof must notice."""

    site: CallSite | None = None
    """Call site, normalised, whose result every rank replaces each time."""
    how: str = "alone"
    """``alone``: by the result without other ranks; ``half``: by its half."""
    parameter: str = ""
    """Parameter whose first gradient is scaled on one rank, that with its first element."""
    factor: float = 1.0

    @property
    def text(self) -> str:
        """Description of the fault."""
        if self.site is None:
            return f"gradient of {self.parameter} on one rank times {self.factor!r}"
        label, op, group, direction = self.site
        return f"{op} over {group} in {label or 'the step'}, {direction}: {self.how}"

    def apply(self, record: Operation, result: Tensor, local: Tensor) -> Tensor:
        """Return an operation's result, replaced if the operation is at the site."""
        if normalise_site(record.site) != self.site:
            return result
        return local if self.how == "alone" else result / 2


def normalise_site(site: CallSite) -> CallSite:
    """Return a call site without layer numbers and further names of its group."""
    label = re.sub(r"\d+", "*", site.label)
    group = site.group.partition("+")[0]
    return site._replace(label=label, group=group)


@dataclass
class RankResult:
    """Results of one rank."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    """Loss, norm, clip factor and router terms of each step; losses of an evaluation."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Tokens by expert of each layer on this rank, over the whole first step."""
    pieces: dict[str, list[LocalSlice]] = field(default_factory=dict)
    narrow: tuple[str, ...] = ()
    """Operations that created a narrower tensor in an fp64 step."""
    sites: tuple[CallSite, ...] = ()
    """Normalised call sites of exchanges."""


def run_rank(case: ProofCase, world: World, fault: InjectedFault | None = None) -> RankResult:
    """Run a case on this rank and return its results."""
    run = RankRun(case, world)
    world.recorder.inject_fault = None if fault is None or fault.site is None else fault.apply
    dtype = DTYPES[run.precision]
    try:
        with nullcontext() if case.shuffle is None else ShuffledSums(case.shuffle, dtype):
            return run.run(fault)
    finally:
        world.recorder.inject_fault = None


class RankRun:
    """A case's model, data and optimizer on this rank."""

    def __init__(self, case: ProofCase, world: World) -> None:
        self.subject = case.subject
        self.world = world
        self.precision = case.precision or case.subject.precision
        self.updates = STEPS if case.precision is None else 0
        decoder = case.subject.decoder
        self.parts: ModelParts = build_parts(decoder, self.precision, case.layout, world)
        initialise_model(self.parts.model, case.subject, self.parts.shards)
        position = world.attention
        dp = world.folding.dp
        self.batches: list[MicroBatch] = micro_batches(case.subject)[position.dp :: dp]
        self.state = ShardedState(self.parts)
        self.parts = self.state.parts
        self.optimizer: Optimizer = self.state.optimizer(case.subject.optim)
        self.objective: Objective = build(case.subject.loss).for_proof(
            self.parts, case.subject.decoder, case.subject.seed
        )
        self.result = RankResult()

    def run(self, fault: InjectedFault | None) -> RankResult:
        """Run the steps and return their results.

        Gradients and counts are those of the first step, weights the changes over all steps.
        """
        before = _copy_slices(self.state.weights())
        result = self.result
        position = self.world.attention
        # All ranks of a stage run the same operations, so one is enough.
        watched = self.precision == "fp64" and not (position.tp or position.cp or position.dp)
        watch = NarrowWatch() if watched else None
        with watch or nullcontext():
            scale = self._gradients(fault)
        result.narrow = tuple(sorted(watch.operations)) if watch else ()
        result.pieces["gradients"] = _copy_slices(self.state.gradients())
        for number, moe in self.parts.model.moe_layers():
            for counter in ("load_E", "sent_E", "tokens"):
                counted = getattr(moe.balance.counters, counter)
                result.counts[f"layers.{number}.{counter}"] = counted.reshape(-1).tolist()
        totals, units, _ = evaluate(self.parts, self.batches, LOSS_CHUNK, self.objective)
        result.figures["evaluation"] = [total / max(units, 1) for total in totals]
        for step in range(self.updates):
            scale = scale if step == 0 else self._gradients(None)
            self.optimizer.step(scale)
            self.state.end_step()
        if self.updates:
            after = _copy_slices(self.state.weights())
            changes = []
            for old, new in zip(before, after, strict=True):
                changes.append(replace(new, tensor=new.tensor - old.tensor))
            result.pieces["weights"] = changes
            for piece in _copy_slices(self.state.optimizer_state(self.optimizer)):
                parameter, _, kind = piece.name.removeprefix("optim.").rpartition(".")
                state = result.pieces.setdefault(f"optimizer/{kind}", [])
                state.append(replace(piece, name=parameter))
        result.sites = tuple(sorted({normalise_site(site) for site in self.world.recorder.totals}))
        return result

    def _gradients(self, fault: InjectedFault | None) -> float:
        """Compute a step's gradients, record its figures, and return the clipping factor."""
        figures = gradients(self.state, self.batches, LOSS_CHUNK, objective=self.objective)
        required = {
            "dispatch.max_rows": figures.needed_rows, "offload.pages.load": figures.needed_load
        }  # fmt: skip
        if any(required.values()):
            needed = ", ".join(f"layout.{name} must be {n}" for name, n in required.items() if n)
            raise ValueError(
                f"{needed} or more for this model; with less, alltoall repeats the step and the "
                "proof does not cover this dispatcher"
            )
        if fault is not None and fault.parameter:
            for piece in self.state.gradients():
                at_start = piece.is_first and not any(start for start, _ in piece.box)
                if piece.name == fault.parameter and at_start:
                    piece.tensor.mul_(fault.factor)
        scale = clip_scale(figures.grad_norm, self.subject.optim.clip_norm)  # type: ignore[attr-defined]
        values = {"lm_loss": figures.lm_loss, "grad_norm": figures.grad_norm, "clip": scale}
        values |= {f"router/{name}": value for name, value in figures.router_terms.items()}
        values |= figures.extra_figures
        for name, value in values.items():
            self.result.figures.setdefault(name, []).append(value)
        return scale


def _copy_slices(pieces: Iterable[LocalSlice]) -> list[LocalSlice]:
    return [replace(piece, tensor=piece.tensor.clone()) for piece in pieces]
