"""Table locations: URIs in pylance's spelling, and paths below a table."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from lancewal.errors import InvalidInputError
from lancewal.storage.secrets import scrubbed

Kind = Literal["local", "memory", "s3", "azure", "gs"]

_SCHEMES: dict[str, Kind] = {
    "memory": "memory",
    "s3": "s3",
    "az": "azure",
    "abfss": "azure",
    "gs": "gs",
}
_LOCAL_SCHEMES = ("file", "file-object-store")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed table URI. ``container`` is a bucket, an Azure container or a memory store, empty for local.

    ``prefix`` is the key prefix without slashes at its ends, or the absolute local directory.
    """

    kind: Kind
    uri: str
    container: str
    prefix: str
    account: str | None = None


def path_text(uri: str | os.PathLike[str]) -> str:
    """An address as text; refuses anything that is neither a text nor a path.

    >>> import pathlib
    >>> path_text(pathlib.PurePosixPath("some/table"))
    'some/table'
    """
    text = os.fspath(uri) if isinstance(uri, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidInputError(f"{uri!r} is no address; pass a text or a path")
    return text


def parse_location(uri: str | os.PathLike[str]) -> Location:
    """Parse a table's URI.

    >>> parse_location("s3://bucket/some/table/").prefix
    'some/table'
    >>> parse_location("abfss://box@account.dfs.core.windows.net/t").account
    'account'
    """
    text = path_text(uri)
    if not text or not text.isprintable():
        raise InvalidInputError(f"table URI {scrubbed(repr(text))} must be printable text, not empty")
    scheme = _SCHEME.match(text)
    if scheme is None or scheme.group(1).lower() in _LOCAL_SCHEMES:
        return _local(text)
    name, rest = scheme.group(1).lower(), text[scheme.end() :]
    kind = _SCHEMES.get(name)
    if kind is None:
        known = ", ".join(f"{each}://" for each in ("file", *_SCHEMES))
        raise InvalidInputError(f"{name}:// is not supported; use a local path or one of {known}")
    if "?" in rest or "#" in rest:
        raise InvalidInputError(f"{name}:// URIs take no '?' or '#'; pass settings as storage_options")
    authority, _, path = rest.partition("/")
    container, account = _authority(name, authority)
    prefix = unquote(path).strip("/")
    if prefix:
        check_path(prefix, "the path in the URI")
    return Location(kind, text.rstrip("/"), container, prefix, account)


def _local(text: str) -> Location:
    # Hadoop and Spark write file:/a/b where everybody else writes file:///a/b.
    hadoop = text.startswith("file:/")
    if _SCHEME.match(text) or hadoop:
        rest = text.split(":", 1)[1]
        if rest.startswith("//"):
            host, slash, path = rest[2:].partition("/")
            if host not in ("", "localhost") or not slash:
                raise InvalidInputError(f"{scrubbed(text)!r} names a host; write file:///absolute/path")
            rest = "/" + path
        directory = unquote(rest)
    else:
        directory = os.path.expanduser(text)
    # Absolute from the start: a later chdir must not move the table.
    directory = os.path.abspath(directory)
    return Location("local", directory, "", directory)


def _authority(scheme: str, authority: str) -> tuple[str, str | None]:
    container, at, host = authority.rpartition("@")
    if not at:
        container, host = authority, ""
    if at and _SCHEMES[scheme] != "azure":
        raise InvalidInputError(
            f"{scheme}:// URIs carry no user or password; pass credentials as storage_options"
        )
    if scheme == "abfss" and not host:
        raise InvalidInputError(
            "abfss:// needs its account: abfss://container@account.dfs.core.windows.net/path"
        )
    if not container:
        raise InvalidInputError(f"{scheme}:// lacks a name: write {scheme}://name/path")
    return container, (host.split(".", 1)[0] or None) if at else None


def check_path(path: str, what: str = "path") -> None:
    """Refuse a path that is not plain and relative, because it could lead out of the table's directory."""
    if not isinstance(path, str) or not path:
        raise InvalidInputError(f"{what} {path!r} must be text and not empty")
    # A fast test for the common case; only suspicious paths are checked by segment.
    if path[0] == "." or "//" in path or "/." in path or path[0] == "/" or path[-1] == "/":
        for segment in path.split("/"):
            if segment in ("", ".", ".."):
                raise InvalidInputError(
                    f"{what} {path!r} must be relative, without '.', '..' or empty segments"
                )
    if "\\" in path or not path.isprintable():
        raise InvalidInputError(f"{what} {path!r} holds a backslash or an unprintable character")


def check_prefix(prefix: str) -> str:
    """A directory's path without a slash at its end; ``""`` is the root."""
    if prefix == "":
        return prefix
    trimmed = prefix.removesuffix("/") if isinstance(prefix, str) else prefix
    check_path(trimmed, "prefix")
    return trimmed


def is_staging_name(name: str) -> bool:
    """Whether a file name is the temporary name of an unfinished write.

    >>> is_staging_name(".entry.arrow.1f2e.tmp"), is_staging_name("entry.arrow")
    (True, False)
    """
    # Our and Lance's hidden files, Lance's creates, and the numbered files of object_store. No
    # finished file of a table has such a name.
    return (
        (name.startswith(".") and (name.endswith(".tmp") or name.startswith(".tmp")))
        or ".tmp." in name
        or ("#" in name and name.rpartition("#")[2].isdecimal())
    )
