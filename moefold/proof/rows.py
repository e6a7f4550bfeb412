"""The rows and the values that a proof runs on: pure functions of a subject.

Documents are packed, of uneven lengths, and most micro-batches end with padding.
"""

from collections.abc import Mapping

import numpy as np
import torch

from moefold.data.batch import IGNORED, MicroBatch, assemble
from moefold.layers.placement import Shard
from moefold.model.decoder import DecoderModel
from moefold.model.init import initialise, normal_piece
from moefold.proof.case import Subject

BIAS = 0.1
"""Spread of the selection bias at the start."""
NEVER = -100.0
"""Selection bias of an expert that no token may choose."""


def micro_batches(subject: Subject) -> list[MicroBatch]:
    """Return the micro-batches of a step, whole."""
    return [_micro_batch(subject, number) for number in range(subject.micro_batches)]


def lengths_of(subject: Subject, number: int) -> tuple[int, ...]:
    """Return the lengths of a micro-batch's three documents; an empty one has none."""
    if number in subject.empty:
        return ()
    valid = subject.rows - (number % 3) * subject.padding
    first, second = valid // 5 + number % 3, valid // 3
    return first, second, valid - first - second


def _micro_batch(subject: Subject, number: int) -> MicroBatch:
    lengths = lengths_of(subject, number)
    draws = np.random.Generator(np.random.PCG64((subject.seed, number)))
    ids_T = draws.integers(0, subject.decoder.vocab, sum(lengths))
    labels_T = np.append(ids_T[1:], IGNORED)[: len(ids_T)]
    labels_T[np.cumsum(lengths, dtype=np.int64) - 1] = IGNORED
    token_T = np.arange(subject.rows) + number * subject.rows
    return assemble(ids_T, labels_T, lengths, rows=subject.rows, token_T=token_T)


@torch.no_grad()
def fill(model: DecoderModel, subject: Subject, shards: Mapping[str, Shard]) -> None:
    """Give this rank's pieces their values; vectors and selection biases differ by place too."""
    initialise(model, subject.decoder, subject.seed, shards)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(normal_piece(subject.seed, shards[name], 0.1))
    for _, mixture in model.mixtures():
        bias_E = mixture.router.selection_bias
        if bias_E is not None:
            bias_E.copy_(torch.linspace(-BIAS, BIAS, bias_E.shape[0]))
            bias_E[list(subject.idle)] = NEVER
