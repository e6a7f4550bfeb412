"""Streams a training run's weights to a consumer, from any layout, one bucket at a time.

The consumer (a server, an actor of reinforcement learning) gets the tensors of a Hugging Face
folder, with its names and shapes. Every rank takes part; the first one holds a bucket and one other
rank's message, never more. Of ranks with copies of a weight, the first sends it.

The contract: :func:`moefold.convert.plan.contract` lists name, shape and dtype of each tensor, in
stream order, before anything is sent. A tensor larger than a bucket is sent as several ranges of
rows. Router weights and selection bias stay float32 whatever ``dtype`` is, so that the consumer's
router decides as the trained one.
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
from moefold.convert.plan import Dtype, Sent, contract
from moefold.convert.source import ConvertError
from moefold.layers.placement import Box, inside, shared_box
from moefold.model.families.names import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.spec.tuning import adapter_scales

BUCKET_BYTES = 64 * 2**20
ALIGNED = 16


@dataclass(frozen=True)
class RowRange:
    """Rows of a tensor in a bucket: all, unless the tensor is larger than a bucket."""

    sent: Sent
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
        """These rows as a box of the model's tensor; all of it if rows do not correspond."""
        if not by_rows(self.sent):
            return whole_box(self.sent)
        fixed = tuple((at, at + 1) for at in self.sent.index)
        rest = self.sent.whole[len(fixed) + 1 :]
        return (*fixed, (self.first, self.end), *((0, size) for size in rest))


def whole_box(sent: Sent) -> Box:
    """Return the box of the whole tensor of the model."""
    return tuple((0, size) for size in sent.whole)


def by_rows(sent: Sent) -> bool:
    """Return whether rows of a tensor on disk are rows of the model's, so that it can be split."""
    return sent.rows is None and sent.shape[:1] == sent.whole[len(sent.index) :][:1]


@dataclass(frozen=True)
class TensorBatch:
    """A bucket: the bytes of some tensors, valid until the next bucket is requested."""

    spans: tuple[RowRange, ...]
    sha256: tuple[str, ...]
    """Digest of each span's bytes."""
    data: Tensor
    """uint8, on the host."""

    def tensors(self) -> Iterator[tuple[RowRange, Tensor]]:
        """Yield each span with its values, after verifying its digest.

        Raises:
            ConvertError: with the tensor whose bytes differ.
        """
        for span, digest in zip(self.spans, self.sha256, strict=True):
            raw = self.data[span.offset : span.offset + span.size]
            if sha256(raw.numpy().data).hexdigest() != digest:
                raise ConvertError("a bucket", [f"{span.sent.name}: bytes differ from those sent"])
            yield span, raw.view(span.sent.dtype).view(span.shape)


def stream(
    data: ShardedState,
    dtype: Dtype = "bfloat16",
    layout: Layout = "per_expert",
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[TensorBatch]:
    """Yield the weights of a run on its first rank, and nothing on the others.

    Every rank calls it between two steps and exhausts the iterator.

    Args:
        data: the run's state.
        dtype: dtype of the weights, except those that stay float32.
        layout: one tensor per expert, or all experts in one tensor.
        bucket_bytes: most bytes of a bucket.

    Raises:
        ValueError: if a row of a tensor is larger than a bucket, or the run trains adapters.
    """
    ranks, decoder = data.placed.world.on_host, data.placed.model.record
    if adapter_scales(decoder):
        raise ValueError(
            "cannot stream the weights of a run with adapters; save a checkpoint and use moefold "
            "export, with --merged for the whole model"
        )
    held = {(each.name, each.box): each.tensor.detach() for each in data.weights() if each.first}
    mine = list(held)
    boxes = [
        [(name, tuple((start, end) for start, end in box)) for name, box in said]
        for said in gather_to_first(mine, ranks)
    ]
    buffer = torch.empty(bucket_bytes if ranks.index == 0 else 0, dtype=torch.uint8)
    for spans in buckets(contract(decoder, dtype, layout), bucket_bytes):
        own = _packed(_shared(spans, mine), held)
        if ranks.index:
            if own.numel():
                send(own, ranks.ranks[0], ranks).wait()
            continue
        used = spans[-1].offset + spans[-1].size
        filled = 0
        for index, (rank, theirs) in enumerate(zip(ranks.ranks, boxes, strict=True)):
            parts, message = list(_shared(spans, theirs)), own
            size = sum(part.size for part in parts)
            if index and size:
                message = torch.empty(size, dtype=torch.uint8)
                receive(message, rank, ranks).wait()
            _unpack(parts, message, buffer)
            filled += size
        assert filled == sum(span.size for span in spans), "every element is on one rank"
        digests = tuple(
            sha256(buffer[s.offset : s.offset + s.size].numpy().data).hexdigest() for s in spans
        )
        yield TensorBatch(spans, digests, buffer[:used])


Named = tuple[str, Box]


class Part(NamedTuple):
    """The intersection of a box that a rank holds with a span."""

    span: RowRange
    held: Named
    box: Box
    """The intersection, as a box of the model's tensor."""
    sent: Sent
    """The entry of the span's tensor, or of its ``others``, for the model's tensor."""

    @property
    def shape(self) -> list[int]:
        """Shape of the intersection."""
        return [end - start for start, end in self.box]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.span.sent.dtype.itemsize


def buckets(sent: Iterable[Sent], bucket_bytes: int) -> Iterator[tuple[RowRange, ...]]:
    """Yield tensors in order, as many as fit each bucket; larger ones are split by rows."""
    spans: list[RowRange] = []
    offset = 0
    for each in sent:
        row = math.prod(each.shape[1 if by_rows(each) else 0 :]) * each.dtype.itemsize
        if row > bucket_bytes:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; {each.name} needs at least {row}")
        first = 0
        if not by_rows(each):  # never split
            row //= each.shape[0]
        while first < each.shape[0]:
            small = each.shape[0] * row <= bucket_bytes
            rows = each.shape[0] if small else (bucket_bytes - offset) // row
            if rows == 0 or offset + rows * row > bucket_bytes:
                yield tuple(spans)
                spans, offset = [], 0
                continue
            end = min(first + rows, each.shape[0])
            spans.append(RowRange(each, first, end, offset))
            offset = -(-(offset + (end - first) * row) // ALIGNED) * ALIGNED
            first = end
            offset = min(offset, bucket_bytes)
    if spans:
        yield tuple(spans)


def _shared(spans: Iterable[RowRange], mine: Sequence[Named]) -> Iterator[Part]:
    """Yield the intersections of boxes with spans, in one order on all ranks."""
    by_name: dict[str, list[Named]] = {}
    for named in mine:
        by_name.setdefault(named[0], []).append(named)
    for span in spans:
        for sent in (span.sent, *span.sent.others):
            whole = span.box if sent is span.sent else whole_box(sent)
            for named in by_name.get(sent.ours, ()):
                shared = shared_box(whole, named[1])
                if shared is not None:
                    yield Part(span, named, shared, sent)


def _packed(parts: Iterable[Part], held: dict[Named, Tensor]) -> Tensor:
    """Return this rank's parts of a bucket as bytes, concatenated."""
    found = [torch.empty(0, dtype=torch.uint8)]
    for span, named, box, _ in parts:
        cut = held[named][inside(box, named[1])]
        found.append(cut.to("cpu", span.sent.dtype).reshape(-1).view(torch.uint8))
    return torch.cat(found)


def _unpack(parts: Iterable[Part], packed: Tensor, into: Tensor) -> None:
    """Copy a rank's parts into a bucket."""
    at = 0
    for part in parts:
        span, dtype = part.span, part.span.sent.dtype
        raw = into[span.offset : span.offset + span.size].view(dtype)
        values = packed[at : at + part.size].clone().view(dtype).view(part.shape)
        if part.sent.rows is None:
            whole = [end - start for start, end in span.box]
            span.sent.from_hf(raw, (*whole,))[inside(part.box, span.box)] = values
        else:
            rows = part.sent.rows.disk_rows(*part.box[0])
            columns = (slice(*bounds) for bounds in part.box[1:])
            raw.view(span.shape)[(rows, *columns)] = values
        at += part.size
