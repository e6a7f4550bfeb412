"""Streams a training run's weights to a consumer, from any layout, one bucket at a time.

The consumer, such as an inference server or an RL actor, gets the tensors of a Hugging Face folder,
with its names and shapes. Every rank takes part; the first keeps at most a bucket and one other
rank's message in memory. Of the ranks with copies of a weight, the first sends it.

The contract: :func:`moefold.convert.plan.contract` lists name, shape and dtype of each tensor, in
stream order, before anything is sent. A tensor larger than a bucket is sent as several ranges of
rows. Router weights and selection bias stay float32 for any ``dtype``, so that the consumer's
router makes the same choices.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.agree import gather_to_first
from moefold.comm.collectives import receive, send
from moefold.convert.plan import Dtype, ExportTensor, contract
from moefold.convert.source import ConvertError
from moefold.layers.placement import Box, intersection, relative_slices
from moefold.model.families.names import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.spec.tuning import adapter_scales

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 16


@dataclass(frozen=True)
class RowRange:
    """Rows of a tensor in a bucket: all of them, unless the tensor is larger than a bucket."""

    sent: ExportTensor
    first: int
    end: int
    offset: int
    """Offset of its first byte in the bucket."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows."""
        return (self.end - self.first, *self.sent.shape[1:])

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.sent.dtype.itemsize

    @property
    def box(self) -> Box:
        """These rows as a box of the model's tensor; the full box if rows do not correspond."""
        if not is_splittable(self.sent):
            return full_box(self.sent)
        fixed = tuple((i, i + 1) for i in self.sent.index)
        rest = self.sent.full_shape[len(fixed) + 1 :]
        return (*fixed, (self.first, self.end), *((0, size) for size in rest))


def full_box(sent: ExportTensor) -> Box:
    """Return the box of the model's full tensor."""
    return tuple((0, size) for size in sent.full_shape)


def is_splittable(sent: ExportTensor) -> bool:
    """Return whether a tensor can be split by rows: whether its rows are rows of the model's."""
    shape = sent.full_shape[len(sent.index) :]
    return sent.rows is None and sent.shape[:1] == shape[:1]


@dataclass(frozen=True)
class TensorBatch:
    """A bucket: the bytes of some tensors, valid until the next one is requested."""

    spans: tuple[RowRange, ...]
    sha256: tuple[str, ...]
    """Digest of each span's bytes."""
    data: Tensor
    """uint8, on the host."""

    def tensors(self) -> Iterator[tuple[RowRange, Tensor]]:
        """Yield each span with its values, after verifying its digest.

        Raises:
            ConvertError: naming the tensor whose bytes differ.
        """
        for span, digest in zip(self.spans, self.sha256, strict=True):
            raw = self.data[span.offset : span.offset + span.size]
            if sha256(raw.numpy().data).hexdigest() != digest:
                raise ConvertError("a bucket", [f"{span.sent.name}: bytes differ from those sent"])
            yield span, raw.view(span.sent.dtype).view(span.shape)


def stream_weights(
    state: ShardedState,
    dtype: Dtype = "bfloat16",
    layout: Layout = "per_expert",
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[TensorBatch]:
    """Yield the weights of a run on its first rank, and nothing on the others.

    Every rank must call it between two steps and exhaust the iterator.

    Args:
        state: what the run trains, as this rank has it.
        dtype: dtype of the weights that need not stay float32.
        layout: one tensor per expert, or all experts in one tensor.
        bucket_bytes: most bytes of a bucket.

    Raises:
        ValueError: if a row of a tensor is larger than a bucket, or the run trains adapters.
    """
    ranks = state.parts.world.on_host
    decoder = state.parts.model.record
    if adapter_scales(decoder):
        raise ValueError(
            "cannot stream the weights of a run with adapters; save a checkpoint and use moefold "
            "export, with --merged for the whole model"
        )
    tensors = {(w.name, w.box): w.tensor.detach() for w in state.weights() if w.is_first}
    mine = list(tensors)
    # A message has lists where keys have tuples.
    boxes = [
        [(name, tuple(map(tuple, box))) for name, box in names]
        for names in gather_to_first(mine, ranks)
    ]
    buffer = torch.empty(bucket_bytes if ranks.index == 0 else 0, dtype=torch.uint8)
    for spans in pack_buckets(contract(decoder, dtype, layout), bucket_bytes):
        own = _pack(_intersections(spans, mine), tensors)
        if ranks.index:
            if own.numel():
                send(own, ranks.ranks[0], ranks).wait()
            continue
        used = spans[-1].offset + spans[-1].size
        filled = 0
        for index, (rank, named) in enumerate(zip(ranks.ranks, boxes, strict=True)):
            parts = list(_intersections(spans, named))
            message = own
            size = sum(part.size for part in parts)
            if index and size:
                message = torch.empty(size, dtype=torch.uint8)
                receive(message, rank, ranks).wait()
            _unpack(parts, message, buffer)
            filled += size
        assert filled == sum(span.size for span in spans), "every element is on one rank"
        values = [buffer[span.offset : span.offset + span.size] for span in spans]
        digests = tuple(sha256(value.numpy().data).hexdigest() for value in values)
        yield TensorBatch(spans, digests, buffer[:used])


NamedBox = tuple[str, Box]


class SpanPart(NamedTuple):
    """The intersection of a rank's box with a span."""

    span: RowRange
    source: NamedBox
    box: Box
    """The intersection, as a box of the model's tensor."""
    sent: ExportTensor
    """The span's entry, or one of its ``others``, for the model's tensor."""

    @property
    def shape(self) -> list[int]:
        """Shape of the intersection."""
        return [end - start for start, end in self.box]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.span.sent.dtype.itemsize


def pack_buckets(sent: Iterable[ExportTensor], bucket_bytes: int) -> Iterator[tuple[RowRange, ...]]:
    """Pack tensors into buckets, in order; tensors larger than a bucket are split by rows."""
    spans: list[RowRange] = []
    offset = 0
    for entry in sent:
        row = math.prod(entry.shape[1 if is_splittable(entry) else 0 :]) * entry.dtype.itemsize
        if row > bucket_bytes:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; {entry.name} needs at least {row}")
        first = 0
        if not is_splittable(entry):
            row //= entry.shape[0]
        while first < entry.shape[0]:
            small = entry.shape[0] * row <= bucket_bytes
            rows = entry.shape[0] if small else (bucket_bytes - offset) // row
            if rows == 0 or offset + rows * row > bucket_bytes:
                yield tuple(spans)
                spans = []
                offset = 0
                continue
            end = min(first + rows, entry.shape[0])
            spans.append(RowRange(entry, first, end, offset))
            size = (end - first) * row
            offset = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
            first = end
            offset = min(offset, bucket_bytes)
    if spans:
        yield tuple(spans)


def _intersections(spans: Iterable[RowRange], mine: Sequence[NamedBox]) -> Iterator[SpanPart]:
    """Yield the intersections of boxes with spans, in the same order on all ranks."""
    by_name: dict[str, list[NamedBox]] = {}
    for named in mine:
        by_name.setdefault(named[0], []).append(named)
    for span in spans:
        for sent in (span.sent, *span.sent.others):
            box = span.box if sent is span.sent else full_box(sent)
            for named in by_name.get(sent.param, ()):
                shared = intersection(box, named[1])
                if shared is not None:
                    yield SpanPart(span, named, shared, sent)


def _pack(parts: Iterable[SpanPart], tensors: dict[NamedBox, Tensor]) -> Tensor:
    """Return this rank's parts of a bucket as concatenated bytes."""
    packed = [torch.empty(0, dtype=torch.uint8)]
    for span, named, box, _ in parts:
        part = tensors[named][relative_slices(box, named[1])]
        packed.append(part.to("cpu", span.sent.dtype).reshape(-1).view(torch.uint8))
    return torch.cat(packed)


def _unpack(parts: Iterable[SpanPart], packed: Tensor, bucket: Tensor) -> None:
    """Copy a rank's parts into a bucket."""
    start = 0
    for part in parts:
        span = part.span
        dtype = part.span.sent.dtype
        raw = bucket[span.offset : span.offset + span.size].view(dtype)
        values = packed[start : start + part.size].clone().view(dtype).view(part.shape)
        if part.sent.rows is None:
            shape = tuple(end - first for first, end in span.box)
            span.sent.from_hf(raw, shape)[relative_slices(part.box, span.box)] = values
        else:
            rows = part.sent.rows.disk_rows(*part.box[0])
            columns = (slice(*bounds) for bounds in part.box[1:])
            raw.view(span.shape)[(rows, *columns)] = values
        start += part.size
