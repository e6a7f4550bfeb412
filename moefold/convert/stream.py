"""Weights of a run that trains, handed on to a consumer from any layout, a bucket at a time.

The consumer (a server, an actor of reinforcement learning) gets the tensors of a Hugging Face
folder, with its names and shapes. Every rank takes part; the first one holds a bucket and what one
other rank sends for it, never more. Ranks that hold copies of a weight: the first of them sends.

The contract: :func:`contract` lists name, shape and type of each tensor, in the order in which they
come, before anything is sent. A tensor larger than a bucket comes as several spans of rows. Router
weights and selection bias stay float32 whatever the type asked for, so that the consumer's router
decides as the trained one does.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import torch
from torch import Tensor

from moefold.comm.agree import tell_first
from moefold.comm.collectives import receive, send
from moefold.comm.group import Group
from moefold.convert.errors import ConvertError
from moefold.convert.plan import targets
from moefold.layers.placement import Box, inside, shared_box
from moefold.model.config import Decoder
from moefold.model.families.names import Layout, find, pieces
from moefold.model.families.registry import family_of
from moefold.parallel.data.sharding import Data

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Dtype = Literal["float32", "bfloat16"]
BUCKET_BYTES = 64 * 2**20
ALIGNED = 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sent:
    """One tensor that is handed on, and which part of ours it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ours: str
    index: tuple[int, ...]
    whole: tuple[int, ...]
    """Shape of ours."""


@dataclass(frozen=True)
class Span:
    """Rows of a tensor in a bucket: all of them unless the tensor is larger than a bucket."""

    sent: Sent
    first: int
    end: int
    offset: int
    """Where its bytes begin in the bucket."""

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
        """These rows as a box of our tensor."""
        fixed = tuple((at, at + 1) for at in self.sent.index)
        rest = self.sent.whole[len(fixed) + 1 :]
        return (*fixed, (self.first, self.end), *((0, size) for size in rest))


@dataclass(frozen=True)
class Bucket:
    """Some tensors' bytes. They are valid until the next bucket is asked for."""

    spans: tuple[Span, ...]
    sha256: tuple[str, ...]
    """Digest of each span's bytes."""
    data: Tensor
    """uint8, on the host."""

    def tensors(self) -> Iterator[tuple[Span, Tensor]]:
        """Yield each span with its values, once its bytes are found to be those that were sent.

        Raises:
            ConvertError: naming the tensor whose bytes are others.
        """
        for span, digest in zip(self.spans, self.sha256, strict=True):
            raw = self.data[span.offset : span.offset + span.size]
            if sha256(raw.numpy().data).hexdigest() != digest:
                raise ConvertError("a bucket", [f"{span.sent.name}: bytes are not as sent"])
            yield span, raw.view(span.sent.dtype).view(span.shape)


def contract(
    decoder: Decoder, dtype: Dtype = "bfloat16", layout: Layout = "per_expert"
) -> list[Sent]:
    """Return every tensor that a decoder is handed on as, in order.

    Raises:
        ValueError: where no known family has this decoder.
    """
    wanted = targets(decoder)
    sent: list[Sent] = []
    for name, (row, layer) in find(family_of(decoder).tensors, wanted).items():
        exact = ".router." in name
        for piece in pieces(row, layer, wanted[name].shape, layout):
            kept = torch.float32 if exact else DTYPES[dtype]
            sent.append(Sent(piece.name, piece.shape, kept, name, piece.index, wanted[name].shape))
    return sent


def stream(
    data: Data,
    dtype: Dtype = "bfloat16",
    layout: Layout = "per_expert",
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[Bucket]:
    """Yield the weights of a run on its first rank, and nothing on the others.

    Every rank calls it between two steps and goes through it to its end.

    Args:
        data: the run's state.
        dtype: type of the weights, but for those that stay float32.
        layout: experts each on their own, or all in one tensor.
        bucket_bytes: most bytes of a bucket.

    Raises:
        ValueError: where a row of a tensor is larger than a bucket.
    """
    ranks = data.placed.world.on_host
    held = {(each.name, each.box): each.tensor.detach() for each in data.weights() if each.first}
    mine = list(held)
    boxes = [_boxes(said) for said in tell_first(mine, ranks)]
    buffer = torch.empty(bucket_bytes if ranks.index == 0 else 0, dtype=torch.uint8)
    for spans in buckets(contract(data.placed.model.record, dtype, layout), bucket_bytes):
        own = _packed(spans, mine, held)
        if ranks.index:
            if own.numel():
                send(own, ranks.ranks[0], ranks).wait()
            continue
        used = spans[-1].offset + spans[-1].size
        filled = sum(
            _unpack(spans, mine, own, buffer) for own, mine in _all(spans, own, boxes, ranks)
        )
        assert filled == sum(span.size for span in spans), "every element is on one rank"
        digests = tuple(
            sha256(buffer[s.offset : s.offset + s.size].numpy().data).hexdigest() for s in spans
        )
        yield Bucket(spans, digests, buffer[:used])


Named = tuple[str, Box]


def _boxes(said: Sequence[Any]) -> list[Named]:
    return [(name, tuple((start, end) for start, end in box)) for name, box in said]


def _all(
    spans: Sequence[Span], own: Tensor, boxes: Sequence[list[Named]], ranks: Group
) -> Iterator[tuple[Tensor, list[Named]]]:
    """Yield what each rank has for a bucket, one after the other."""
    yield own, boxes[0]
    for rank, theirs in zip(ranks.ranks[1:], boxes[1:], strict=True):
        size = sum(
            math.prod(_size(shared)) * s.sent.dtype.itemsize
            for s, _, shared in _shared(spans, theirs)
        )
        if size:
            message = torch.empty(size, dtype=torch.uint8)
            receive(message, rank, ranks).wait()
            yield message, theirs


def buckets(sent: Iterable[Sent], bucket_bytes: int) -> Iterator[tuple[Span, ...]]:
    """Yield tensors in their order, as many as a bucket takes; larger ones by rows."""
    spans: list[Span] = []
    offset = 0
    for each in sent:
        row = math.prod(each.shape[1:]) * each.dtype.itemsize
        if row > bucket_bytes:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a row of {each.name} has {row} bytes")
        first = 0
        while first < each.shape[0]:
            small = each.shape[0] * row <= bucket_bytes
            rows = each.shape[0] if small else (bucket_bytes - offset) // row
            if rows == 0 or offset + rows * row > bucket_bytes:
                yield tuple(spans)
                spans, offset = [], 0
                continue
            end = min(first + rows, each.shape[0])
            spans.append(Span(each, first, end, offset))
            offset = -(-(offset + (end - first) * row) // ALIGNED) * ALIGNED
            first = end
            offset = min(offset, bucket_bytes)
    if spans:
        yield tuple(spans)


def _shared(spans: Iterable[Span], mine: Sequence[Named]) -> Iterator[tuple[Span, Named, Box]]:
    """Yield which boxes reach into which spans, and where, in one order on all ranks."""
    by_name: dict[str, list[Named]] = {}
    for named in mine:
        by_name.setdefault(named[0], []).append(named)
    for span in spans:
        for named in by_name.get(span.sent.ours, ()):
            shared = shared_box(span.box, named[1])
            if shared is not None:
                yield span, named, shared


def _size(box: Box) -> list[int]:
    return [end - start for start, end in box]


def _packed(spans: Sequence[Span], mine: Sequence[Named], held: dict[Named, Tensor]) -> Tensor:
    """Return what is here for a bucket as bytes, one box after the other."""
    found = [
        held[named][inside(shared, named[1])].to(CPU, span.sent.dtype).reshape(-1).view(torch.uint8)
        for span, named, shared in _shared(spans, mine)
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8)


def _unpack(spans: Sequence[Span], theirs: Sequence[Named], packed: Tensor, into: Tensor) -> int:
    """Put a rank's boxes into their places in a bucket; return their bytes."""
    at = 0
    for span, _, shared in _shared(spans, theirs):
        dtype = span.sent.dtype
        size = math.prod(_size(shared)) * dtype.itemsize
        raw = into[span.offset : span.offset + span.size].view(dtype).view(_size(span.box))
        part = packed[at : at + size].clone().view(dtype)
        raw[inside(shared, span.box)] = part.view(_size(shared))
        at += size
    return at
