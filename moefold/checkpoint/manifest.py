"""The manifest: a checkpoint's contents, and the SHA-256 of every byte. Imports no torch.

A checkpoint is a folder with safetensors shards and ``manifest.json``, which is written last. A
tensor is stored as slices, boxes that tile its global shape; one process writes one slice per
tensor, several write one each. A slice is row-major and contiguous in one shard, and has a digest
per ``chunk_bytes``, so that reading a part verifies that part. The header of each shard and the
slices cover the shard's bytes without a gap.

The manifest's first field is the SHA-256 of the file itself, computed with zeros in the digest's
place. This field, ``format`` and ``version`` keep their meaning in every later version.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from operator import gt
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from moefold import __version__
from moefold.checkpoint.disk import DISK, Disk, read_file
from moefold.checkpoint.errors import CheckpointError, DamagedError, VersionError
from moefold.config.base import Record

FORMAT = "moefold-checkpoint"
VERSION = 1
FILE = "manifest.json"
MAX_BYTES = 256 * 2**20
"""Larger manifests are refused unread; this size describes about 10 TB of tensors."""
MAX_META_DEPTH = 50
MAX_HEADER_BYTES = 100 * 10**6
"""The safetensors library reads no larger header."""
CHUNK_BYTES = 4 * 2**20
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of each data type, under safetensors' names."""

Bytes = Annotated[int, Field(ge=0, lt=2**62)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Shape = Annotated[tuple[Bytes, ...], Field(max_length=64)]
ShardName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.safetensors$")]
TensorName = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,500}$")]
DType = Annotated[str, Field(pattern=f"^({'|'.join(ITEM_BYTES)})$")]

USE_OLDER = "use another checkpoint, or restore the file from a copy"
ZEROS = "0" * 64
WRITER = f"moefold {__version__}"
_DIGEST_FIELD = re.compile(rb'\{\n "sha256": "([0-9a-f]{64})"')


class ShardFile(Record):
    """One safetensors file."""

    file: ShardName
    size: Bytes
    """Bytes of the whole file."""
    header: Bytes
    """Bytes before the first tensor's: the length field and the JSON header."""
    header_sha256: Digest
    rank: Bytes = 0
    """Rank that owns the file's slices and wrote them."""


class StoredSlice(Record):
    """A box of a tensor, contiguous in one shard."""

    at: Shape
    """Global index of the box's first element."""
    shape: Shape
    shard: Bytes
    """Position in the list of shards."""
    span: tuple[Bytes, Bytes]
    """Offsets in the file of the first byte and after the last."""
    sha256: tuple[Digest, ...]
    """One digest per chunk; the last chunk may be short, an empty slice has none."""

    @property
    def size(self) -> int:
        """Bytes of the slice."""
        return self.span[1] - self.span[0]

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """Start and stop along each dim."""
        return tuple((a, a + n) for a, n in zip(self.at, self.shape, strict=True))

    @property
    def digest(self) -> str:
        """SHA-256 over the chunks' digests: equal for equal bytes, wherever they are stored."""
        return sha256(b"".join(map(bytes.fromhex, self.sha256))).hexdigest()


class TensorMeta(Record):
    """One tensor: its data type, its global shape and its slices."""

    dtype: DType
    shape: Shape
    slices: tuple[StoredSlice, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Manifest(Record):
    """The contents of one checkpoint."""

    sha256: Digest = ZEROS
    """Digest of the manifest file with zeros in this field; identifies the checkpoint's content."""
    format: Literal["moefold-checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    writer: Annotated[str, Field(max_length=200)]
    """Program that wrote the checkpoint."""
    step: Annotated[int, Field(ge=0, lt=10**15)]
    chunk_bytes: Annotated[int, Field(ge=1, le=2**30)] = CHUNK_BYTES
    shards: tuple[ShardFile, ...]
    tensors: dict[TensorName, TensorMeta]
    meta: dict[str, Any]
    """Plain JSON of the caller."""

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)


StartAndShape = tuple[tuple[int, ...], tuple[int, ...]]
"""Index of a box's first element, and the box's shape."""
ShardSlices = list[tuple[str, StoredSlice]]
"""Slices of one shard in file order, each with its tensor's name."""


class HeaderEntry(NamedTuple):
    """A tensor's entry in a shard's header; offsets count from the first data byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Envelope(BaseModel):
    """Fields of the manifest in every version."""

    format: Any = None
    version: Any = None
    writer: Any = "an unknown program"


def slices_by_shard(manifest: Manifest) -> list[ShardSlices]:
    """Return the slices of each shard in file order."""
    by_shard: list[ShardSlices] = [[] for _ in manifest.shards]
    for name, stored in manifest.tensors.items():
        for part in stored.slices:
            by_shard[part.shard].append((name, part))
    return [sorted(slices, key=lambda named: named[1].span) for slices in by_shard]


def shard_header(entries: Mapping[str, HeaderEntry], **metadata: str) -> bytes:
    """Return a shard's bytes before its data, for entries in file order."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    for name, e in entries.items():
        offsets = [e.start, e.stop]
        fields[name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_entries(
    slices: Iterable[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
) -> dict[str, HeaderEntry]:
    """Return a shard's header entries for slices in file order.

    Each slice: (tensor's name, data type, tensor's shape, index of its first element, its shape).
    An entry is named after the tensor, with the box appended unless it is the whole tensor.
    """
    entries = dict[str, HeaderEntry]()
    end = 0
    for name, dtype, full_shape, at, shape in slices:
        start = end
        end += math.prod(shape) * ITEM_BYTES[dtype]
        box = ",".join(f"{a}:{a + n}" for a, n in zip(at, shape, strict=True))
        entry = name if shape == full_shape else f"{name}[{box}]"
        entries[entry] = HeaderEntry(dtype, shape, start, end)
    return entries


def dump(manifest: Manifest) -> bytes:
    """Return the manifest file's content: one line per shard and tensor, with its own digest."""
    fields: dict[str, Any] = {**manifest.model_dump(mode="json"), "sha256": ZEROS}
    shards, tensors, meta = (fields.pop(key) for key in ("shards", "tensors", "meta"))
    lines = [f" {_json(key)}: {_json(value)}" for key, value in fields.items()]
    lines += [' "shards": ' + _join_rows("[", [_json(shard) for shard in shards], "]")]
    rows = [f"{_json(name)}: {_json(stored)}" for name, stored in tensors.items()]
    lines += [' "tensors": ' + _join_rows("{", rows, "}")]
    lines += [f' "meta": {_json(meta)}']
    return with_digest(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def with_digest(text: bytes) -> bytes:
    """Return a manifest's text with the SHA-256 that it has with zeros in the digest's place."""
    field = _DIGEST_FIELD.match(text)
    assert field is not None, "the digest is the first field"
    before = text[: field.start(1)]
    after = text[field.end(1) :]
    return before + sha256(before + ZEROS.encode() + after).hexdigest().encode() + after


def parse(raw: bytes, folder: Path) -> Manifest:
    """Return the manifest in ``raw``, the content of ``folder``'s manifest file.

    Raises ``DamagedError`` if it was altered since it was written, and ``VersionError`` for another
    format or version, which the digest confirms to be intended.
    """
    try:
        envelope = _Envelope.model_validate_json(raw)
    except ValidationError:
        raise DamagedError(folder, FILE, "is not JSON; " + USE_OLDER) from None
    if envelope.format is None:
        raise DamagedError(folder, FILE, "has no field `format`; " + USE_OLDER)
    is_own = envelope.format == FORMAT
    version = envelope.version
    has_digest = _DIGEST_FIELD.match(raw) is not None
    if (is_own or has_digest) and not (has_digest and with_digest(raw) == raw):
        raise DamagedError(folder, FILE, "does not match its own SHA-256; " + USE_OLDER)
    if not is_own or type(version) is not int or version != VERSION:
        raise VersionError(
            f"{folder / FILE}: is {envelope.format} version {version}, written by "
            f"{envelope.writer}; this is {WRITER}, which reads {FORMAT} version {VERSION}. "
            "Use the program that wrote it, or a newer moefold"
        )
    return validate(raw, folder)


def validate(raw: bytes, folder: Path) -> Manifest:
    """Return the manifest in ``raw``, checked by its schema alone; else raise ``DamagedError``."""
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[:10]
        listed = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in first)
        raise DamagedError(folder, FILE, f"does not match the schema: {listed}") from None
    for tensor, what in contradictions(manifest):
        raise DamagedError(folder, FILE, what, tensor)
    return manifest


def read(folder: Path, disk: Disk = DISK) -> Manifest:
    """Return the manifest of the checkpoint in ``folder``, without reading its shards."""
    return parse(read_raw(folder, disk), folder)


def read_raw(folder: Path, disk: Disk = DISK) -> bytes:
    """Return the manifest file's content."""
    try:
        return read_file(disk, folder / FILE, MAX_BYTES)
    except FileNotFoundError:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such checkpoint folder") from None
        what = "is missing: the save was interrupted, or this is not a checkpoint"
        raise DamagedError(folder, FILE, what) from None
    except (OSError, ValueError) as error:
        raise DamagedError(folder, FILE, f"cannot be read: {error}") from error


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _join_rows(opening: str, rows: list[str], closing: str) -> str:
    """Return a JSON list or object with one row per line."""
    lines = ",\n".join(f"  {row}" for row in rows)
    return f"{opening}\n{lines}\n {closing}" if rows else opening + closing


def contradictions(manifest: Manifest) -> Iterator[tuple[str | None, str]]:
    """Yield ``(tensor, what)`` for contradictions between fields, which the schema cannot check."""
    files = [shard.file for shard in manifest.shards]
    if len(set(files)) < len(files):
        yield None, "lists a shard file twice"
    for name, stored in manifest.tensors.items():
        if math.prod(n for n in stored.shape if n) >= 2**62:
            yield name, f"has the impossible shape {list(stored.shape)}"
        for part in stored.slices:
            size = math.prod(part.shape) * ITEM_BYTES[stored.dtype]
            if part.shard >= len(manifest.shards):
                yield name, f"refers to shard {part.shard}, but there are {len(manifest.shards)}"
            if part.size != size:
                yield name, f"has a slice of {size} bytes in a span of {part.size}"
            if len(part.sha256) != -(-size // manifest.chunk_bytes):
                yield name, f"has {len(part.sha256)} digests for {size} bytes"
        if not tiles(stored.shape, [(part.at, part.shape) for part in stored.slices]):
            yield name, f"has slices that do not tile its shape {list(stored.shape)}"
    for shard, slices in zip(manifest.shards, slices_by_shard(manifest), strict=True):
        starts = [*(part.span[0] for _, part in slices), shard.size]
        ends = [shard.header, *(part.span[1] for _, part in slices)]
        if starts != ends or not 8 <= shard.header <= MAX_HEADER_BYTES + 8:
            yield None, f"does not cover every byte of {shard.file} exactly once"


def tiles(shape: tuple[int, ...], boxes: Sequence[StartAndShape]) -> bool:
    """Return whether the boxes lie in ``shape``, are disjoint and cover it.

    Boxes are swept along the first dim, so that only those that share a row are compared: usual
    splits cost little more than a sort.
    """
    for at, size in boxes:
        ends = [a + n for a, n in zip(at, size, strict=False)]
        if not len(at) == len(size) == len(shape) or any(map(gt, ends, shape)):
            return False
    non_empty = [box for box in boxes if math.prod(box[1])]
    if not boxes or sum(math.prod(box[1]) for box in non_empty) != math.prod(shape):
        return False
    if not shape:
        return True
    open_boxes: list[StartAndShape] = []
    for at, size in sorted(non_empty):
        open_boxes = [other for other in open_boxes if other[0][0] + other[1][0] > at[0]]
        for other in open_boxes:
            sides = zip(at, size, *other, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in sides):
                return False
        open_boxes.append((at, size))
    return True


def check_meta(value: Any, at: str = "meta", depth: int = 0) -> None:
    """Raise ``CheckpointError`` with the place of a value that JSON would not reproduce exactly."""
    if depth > MAX_META_DEPTH:
        raise CheckpointError(f"{at} is nested deeper than {MAX_META_DEPTH} levels")
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{at} has the key {key!r}; keys must be text")
            check_meta(key, f"a key of {at}", depth)
            check_meta(inner, f"{at}.{key}", depth + 1)
    elif type(value) is list:
        for i, inner in enumerate(value):
            check_meta(inner, f"{at}[{i}]", depth + 1)
    elif type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            what = f"{at} is {value!r}, which is not valid Unicode: {error.reason}"
            raise CheckpointError(what) from None
    elif type(value) is float and not math.isfinite(value):
        raise CheckpointError(f"{at} is {value}, which JSON cannot store; use text or a tensor")
    elif type(value) is int and value.bit_length() > 4096:
        raise CheckpointError(f"{at} is an integer of {value.bit_length()} bits; the limit is 4096")
    elif value is not None and type(value) not in (int, float, bool):
        kinds = "dict, list, str, int, float, bool or None"
        raise CheckpointError(f"{at} is a {type(value).__name__}; it must be {kinds}")
