"""The rows and the values that a proof runs on: pure functions of a subject.

Documents are packed, of uneven lengths, and most micro-batches end with padding.
"""

from collections.abc import Mapping, Sequence

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


def micro_batches(subject: Subject, order: Sequence[int] = (0, 1, 2)) -> list[MicroBatch]:
    """Return the micro-batches of a step, whole.

    Args:
        subject: says how many, and of how many rows.
        order: in which the documents of a micro-batch stand; the maths is the same in each.
    """
    return [_micro_batch(subject, number, order) for number in range(subject.micro_batches)]


def lengths_of(subject: Subject, number: int) -> tuple[int, ...]:
    """Return the lengths of a micro-batch's three documents; an empty one has none."""
    if number in subject.empty:
        return ()
    valid = subject.rows - (number % 3) * subject.padding
    first, second = valid // 5 + number % 3, valid // 3
    return first, second, valid - first - second


def _micro_batch(subject: Subject, number: int, order: Sequence[int]) -> MicroBatch:
    lengths = lengths_of(subject, number)
    draws = np.random.Generator(np.random.PCG64((subject.seed, number)))
    ids_T = draws.integers(0, subject.decoder.vocab, sum(lengths))
    # Numbers of tokens go with their documents, so that ties are broken alike in each order.
    token_T = np.arange(sum(lengths)) + number * subject.rows
    ends = np.cumsum(lengths)[:-1]
    documents = list(zip(np.split(ids_T, ends), np.split(token_T, ends), strict=True))
    documents = [documents[i] for i in order] if lengths else []
    labels = [np.append(ids[1:], IGNORED) for ids, _ in documents]
    nothing = np.zeros(0, np.int64)
    tokens = [nothing, *(token for _, token in documents)]
    padding = np.arange(sum(lengths), subject.rows) + number * subject.rows
    return assemble(
        np.concatenate([nothing, *(ids for ids, _ in documents)]),
        np.concatenate([nothing, *labels]),
        [len(ids) for ids, _ in documents],
        rows=subject.rows,
        token_T=np.concatenate([*tokens, padding]),
    )


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
