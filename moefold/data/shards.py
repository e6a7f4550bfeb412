"""Tars of WebDataset: samples whose members share a name up to its first dot.

Which members make a sample, and what each is called in it, is decided by the ``webdataset``
library. Members are read from the stream one by one; none is extracted to disk.
"""

import re
import tarfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from moefold.data.config import DataError, WebDataset
from moefold.data.corpora.records import BadDocument, hint, parse_json_object, text_field
from moefold.data.corpora.sources import Document, FileReader, Skipped
from moefold.data.corpora.streams import MAX_DOCUMENT, decode_utf8, open_stream

_META = re.compile(r"__[^/]*__($|/)")
"""Members that describe the tar and belong to no sample."""


class TarSample(NamedTuple):
    """One sample of a tar."""

    name: str
    """``tar:key``."""
    content: bytes | None
    """The chosen member, None if the sample lacks it."""
    members: list[str]
    """Names of the sample's members, from the first dot on."""


def require_webdataset() -> None:
    """Raise ``ModuleNotFoundError`` if the library is not installed."""
    if find_spec("webdataset") is None:
        raise ModuleNotFoundError("No module named 'webdataset'", name="webdataset")


def iter_samples(path: Path, member: str) -> Iterator[TarSample]:
    """Yield the samples of a tar, in order, with one member of each.

    Raises:
        DataError: if the file is not a tar, is damaged, or has strange members: links, devices,
            names that leave the folder, twice the same name, or more than ``MAX_DOCUMENT`` bytes.
    """
    with open_stream(path, tar=True) as stream:
        try:
            tar = tarfile.open(fileobj=stream, mode="r|")  # noqa: SIM115  (nothing to close)
            files = _read_members(path, tar, member)
            # The library imports torch, if installed: only for a tar whose first member is sound.
            first = next(files, None)
            if first is None:
                return
            group = import_module("webdataset.tariterators").group_by_keys
            for sample in group(_chain(first, files)):
                names = [name for name in sample if not name.startswith("__")]
                name = f"{path.as_posix()}:{sample['__key__']}"
                yield TarSample(name, sample.get(member), names)
        except tarfile.TarError as error:
            raise DataError(f"{path}: is damaged: {error}; get a new copy") from error
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            reason = str(error.args[0] if error.args else error)
            raise DataError(f"{path}: {reason}; write the tar again") from error


def tar_objects(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the ``json`` member of each sample of a tar.

    Raises:
        DataError: as :func:`iter_samples`, or if a sample has no such member.
    """
    for sample in iter_samples(path, "json"):
        if sample.content is None:
            raise DataError(
                f"{sample.name}: has no member 'json', but {sample.members[:20]}; write each "
                "conversation as KEY.json, or unpack the tar and name the files in it"
            )
        yield sample.name, sample.content


def _chain(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest


def _read_members(path: Path, tar: tarfile.TarFile, member: str) -> Iterator[dict[str, Any]]:
    """Yield name and content of the files in a tar; of members not chosen the content is empty."""
    for info in tar:
        _check_member(path, info)
        tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  (each takes memory)
        if info.isdir() or _META.match(info.name):
            continue
        chosen = info.name.rpartition("/")[2].partition(".")[2].lower() == member
        content = b""
        if chosen:
            file = tar.extractfile(info)
            assert file is not None
            content = file.read()
            if len(content) != info.size:
                raise tarfile.ReadError(f"{info.name} is cut off")
        yield {"fname": info.name, "data": content, "__url__": str(path)}


def _check_member(path: Path, info: tarfile.TarInfo) -> None:
    """Raise ``DataError`` for a member that no tar of samples has."""
    if info.issym() or info.islnk():
        problem = f"is a link to {info.linkname!r}"
    elif not (info.isdir() or info.isreg()):
        problem = "is a device or a pipe"
    elif info.name.startswith("/") or ".." in info.name.split("/"):
        problem = "leaves the folder"
    elif info.size > MAX_DOCUMENT:
        limit = f"more than the {MAX_DOCUMENT >> 20} MiB that one document may have"
        problem = f"has {info.size:,} bytes, {limit}"
    else:
        return
    raise DataError(f"{path}: member {info.name!r} {problem}; write the tar again without it")


class WebDatasetReader(FileReader):
    """Each sample of a tar is a document: a member with text, or a field of a member with JSON."""

    def __init__(self, record: WebDataset) -> None:
        super().__init__(record)
        self._member = record.member.lower().lstrip(".")
        self._field = record.field
        require_webdataset()  # an optional dependency: fail before anything is read

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the samples of all files, named ``path:key``."""
        for path in self.files():
            for sample in iter_samples(path, self._member):
                try:
                    yield Document(sample.name, self._text(sample))
                except BadDocument as error:
                    self.refuse(sample.name, *error.args, skipped=skipped)

    def _text(self, sample: TarSample) -> str:
        if sample.content is None:
            detail = f"the sample has {sample.members[:20]}; choose with {hint('member', 'NAME')}"
            raise BadDocument(f"no member {self._member!r}", detail)
        if self._member.rpartition(".")[2] == "json":
            return text_field(parse_json_object(sample.content), self._field)
        try:
            return decode_utf8(sample.content)
        except UnicodeDecodeError as error:
            raise BadDocument("not UTF-8", f"byte {error.start}: {error.reason}") from error
