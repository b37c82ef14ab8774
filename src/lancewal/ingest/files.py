"""Finds files to ingest, their formats, and their identity."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import lance
import pyarrow as pa
import pyarrow.fs as pafs

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, StorageError
from lancewal.storage import remember_password, scrub_error, scrubbed


class Format(enum.StrEnum):
    PARQUET = "parquet"
    CSV = "csv"
    TSV = "tsv"
    JSON_LINES = "jsonl"
    ARROW = "arrow"
    LANCE = "lance"


_ENDINGS = {
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
    ".csv": Format.CSV,
    ".tsv": Format.TSV,
    ".jsonl": Format.JSON_LINES,
    ".ndjson": Format.JSON_LINES,
    ".json": Format.JSON_LINES,
    ".arrow": Format.ARROW,
    ".arrows": Format.ARROW,
    ".ipc": Format.ARROW,
    ".feather": Format.ARROW,
    ".lance": Format.LANCE,
}
#: The endings of compressed files, which are unpacked while they are read.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_COMPRESSIBLE = (Format.CSV, Format.TSV, Format.JSON_LINES)
_LANCE_MARK = "_versions"


@dataclass(frozen=True)
class SourceFile:
    """A file, or a Lance table, which counts as one file.

    A file counts as the same as before if its name, ``size`` and ``modified`` (nanoseconds) are the same. For
    a Lance table ``size`` is 0 and ``modified`` is its version.
    """

    filesystem: pafs.FileSystem
    path: str
    source: str
    name: str
    size: int
    modified: int
    format: Format

    def __str__(self) -> str:
        return f"{self.source}/{self.name}"

    @property
    def identity(self) -> tuple[int, int]:
        return self.size, self.modified

    def is_unchanged(self) -> bool:
        """Whether the file is unchanged since it was found; a version of a Lance table never changes."""
        if self.format is Format.LANCE:
            return True
        info = _info(self.filesystem, self.path, str(self))
        return (info.size, info.mtime_ns or 0) == self.identity


def find_files(
    paths: Iterable[str | os.PathLike[str]], format: Format | str | None = None
) -> list[SourceFile]:
    """All files at ``paths``, in the given order; the files of a directory, with subdirectories, by name.

    The ending of a name decides the format, unless ``format`` is given. In a directory, files with other
    endings and hidden files (names that start with ``.`` or ``_``) are left out. A file that is itself among
    ``paths`` and has no known format is refused.

    >>> find_files(["/no/such/file.csv"])
    Traceback (most recent call last):
    ...
    lancewal.errors.InvalidInputError: there is no file or directory /no/such/file.csv
    """
    wanted = None if format is None else _format(format)
    found: dict[str, SourceFile] = {}
    for path in paths:
        for each in _at(os.fspath(path), wanted):
            found.setdefault(str(each), each)
    return list(found.values())


def directories_of(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The directories among ``paths``, and the directory of each file, whether it still exists or not."""
    found = []
    for path in paths:
        filesystem, root, prefix = _filesystem(os.fspath(path))
        is_directory = _info(filesystem, root, root).type == pafs.FileType.Directory
        directory = root if is_directory and not _is_lance(filesystem, root) else root.rpartition("/")[0]
        found.append(prefix + directory)
    return list(dict.fromkeys(found))


def format_of(name: str) -> Format | None:
    """The format by a file's name; ``None`` if its ending is unknown.

    >>> format_of("events-7.jsonl.gz"), format_of("notes.txt")
    (<Format.JSON_LINES: 'jsonl'>, None)
    """
    stem, ending = os.path.splitext(name.lower())
    if ending in COMPRESSIONS:
        inner = _ENDINGS.get(os.path.splitext(stem)[1])
        return inner if inner in _COMPRESSIBLE else None
    return _ENDINGS.get(ending)


def _format(text: Format | str) -> Format:
    try:
        return Format(text)
    except ValueError:
        raise InvalidInputError(f"unknown format {text!r}; there are {', '.join(Format)}") from None


def _at(path: str, wanted: Format | None) -> Iterator[SourceFile]:
    filesystem, root, prefix = _filesystem(path)
    shown = scrubbed(path)
    info = _info(filesystem, root, shown)
    if info.type == pafs.FileType.NotFound:
        raise InvalidInputError(f"there is no file or directory {shown}")
    if info.type == pafs.FileType.File:
        kind = wanted or format_of(info.base_name)
        if kind is None:
            raise InvalidInputError(
                f"the ending of {shown} does not tell its format; say which of {', '.join(Format)} it is"
            )
        yield _file(filesystem, info, prefix, kind)
    elif _is_lance(filesystem, root):
        yield _lance(filesystem, root, prefix)
    else:
        yield from _below(filesystem, root, prefix, wanted, shown)


def _below(
    filesystem: pafs.FileSystem, root: str, prefix: str, wanted: Format | None, shown: str
) -> Iterator[SourceFile]:
    try:
        infos = filesystem.get_file_info(pafs.FileSelector(root))
    except OSError as error:
        raise StorageError(f"cannot list {shown}: {first_line(error)}") from scrub_error(error)
    for info in sorted(infos, key=lambda each: str(each.path)):
        if info.base_name.startswith((".", "_")):
            continue
        if info.type == pafs.FileType.Directory:
            if _is_lance(filesystem, info.path):
                yield _lance(filesystem, info.path, prefix)
            else:
                yield from _below(filesystem, info.path, prefix, wanted, info.path)
        elif info.type == pafs.FileType.File:
            kind = format_of(info.base_name)
            # In a directory the ending still selects files. A given format is for files without an ending.
            if kind is None and wanted is not None and "." not in info.base_name:
                kind = wanted
            if kind is not None and kind is not Format.LANCE and wanted in (None, kind):
                yield _file(filesystem, info, prefix, kind)


def _filesystem(path: str) -> tuple[pafs.FileSystem, str, str]:
    """The file system, the path in it, and the prefix for paths in messages."""
    if "://" not in path:
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path)), ""
    # Unlike a table's URI, pyarrow's URIs may contain a key and its secret.
    remember_password(path)
    try:
        filesystem, root = pafs.FileSystem.from_uri(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidInputError(f"cannot read from {scrubbed(path)}: {first_line(error)}") from None
    scheme = path.partition("://")[0]
    return filesystem, root, "" if scheme == "file" else f"{scheme}://"


def _info(filesystem: pafs.FileSystem, root: str, shown: str) -> pafs.FileInfo:
    try:
        return filesystem.get_file_info(root)
    except OSError as error:
        raise StorageError(f"cannot look at {shown}: {first_line(error)}") from scrub_error(error)


def _file(filesystem: pafs.FileSystem, info: pafs.FileInfo, prefix: str, kind: Format) -> SourceFile:
    directory, _, name = info.path.rpartition("/")
    return SourceFile(filesystem, info.path, prefix + directory, name, info.size, info.mtime_ns or 0, kind)


def _is_lance(filesystem: pafs.FileSystem, path: str) -> bool:
    mark = filesystem.get_file_info(f"{path}/{_LANCE_MARK}")
    return bool(mark.type == pafs.FileType.Directory)


def _lance(filesystem: pafs.FileSystem, path: str, prefix: str) -> SourceFile:
    directory, _, name = path.rstrip("/").rpartition("/")
    with lance_errors(f"open {prefix}{path}"):
        version = lance.dataset(prefix + path).version
    return SourceFile(filesystem, prefix + path, prefix + directory, name, 0, version, Format.LANCE)


def first_line(error: BaseException) -> str:
    """The first line of a library's error, without secrets."""
    text = str(error).strip()
    return scrubbed(text.splitlines()[0]) if text else type(error).__name__


def watch(
    paths: Iterable[str | os.PathLike[str]],
    *,
    stop: Callable[[], bool],
    format: Format | str | None = None,
    poll_interval: float = 2.0,
    wait: Callable[[float], object] | None = None,
) -> Iterator[list[SourceFile]]:
    """The complete files, polled until ``stop()`` is true.

    A file counts as complete if two polls in a row found it unchanged. Its age does not count, because the
    clock that stamped it may differ from this machine's. A slow writer should use a name that starts with a
    dot and rename the file when it is complete.
    """
    pause = wait or threading.Event().wait
    places = list(paths)
    seen: dict[str, tuple[int, int]] = {}
    while not stop():
        found = find_files(places, format)
        whole = [
            file for file in found if file.format is Format.LANCE or seen.get(str(file)) == file.identity
        ]
        seen = {str(file): file.identity for file in found}
        yield whole
        if not stop():
            pause(poll_interval)
