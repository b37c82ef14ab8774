"""Arguments that many commands share, and their parsing."""

from __future__ import annotations

import enum
import glob
import os
from typing import TYPE_CHECKING, Annotated

import typer

from lancewal.cli.exits import NOT_FOUND, CommandError
from lancewal.errors import NotInitializedError, TableNotFoundError

if TYPE_CHECKING:
    from lancewal.reader import TableView
    from lancewal.table import Table


def complete_path(incomplete: str) -> list[str]:
    """Directories and files that begin with ``incomplete``, for the shell's completion."""
    found = glob.glob(glob.escape(os.path.expanduser(incomplete)) + "*")
    return [f"{path}/" if os.path.isdir(path) else path for path in sorted(found)]


class Engine(enum.StrEnum):
    """Where a command does its work."""

    LOCAL = "local"
    SPARK = "spark"


class TakeOver(enum.StrEnum):
    """When the command may take over the shards of another process."""

    WHEN_GONE = "when_gone"
    NOW = "now"
    NEVER = "never"


TakeOverOption = Annotated[
    TakeOver,
    typer.Option(
        "--take-over",
        help="Shards that another process has: take them when it is gone, now (it is fenced), or never.",
    ),
]
TableArgument = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="Path or URI of the Lance table: a directory, s3://…, az://…, gs://….",
        autocompletion=complete_path,
    ),
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        envvar="LANCEWAL_OPTIONS",
        help="Storage option, as Lance takes it; repeat for more. Others come from the environment (AWS_…, "
        "AZURE_…, GOOGLE_…), which is the better place for credentials.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
JobEngine = Annotated[
    Engine,
    typer.Option("--engine", help="local: this process; spark: a Spark session, in many tasks."),
]
Columns = Annotated[
    str | None,
    typer.Option("--columns", "-c", metavar="A,B", help="Columns to show, all by default."),
]
At = Annotated[
    str | None,
    typer.Option("--at", metavar="CHECKPOINT", help="Read a checkpoint instead of the newest rows."),
]
Bucket = Annotated[
    str | None,
    typer.Option("--bucket", metavar="COLUMN:N", help="Shard by the hash of a key column, into N shards."),
]
Identity = Annotated[
    str | None,
    typer.Option("--identity", metavar="COLUMN", help="One shard for each value of a key column."),
]
Unsharded = Annotated[bool, typer.Option("--unsharded", help="One shard for all rows.")]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="A,B", help="Primary key of a table that is created or has none."),
]
Vectors = Annotated[
    list[str] | None,
    typer.Option(
        "--vector-column",
        metavar="COLUMN[:DIM]",
        help="Make lists of this column vectors of one dimension, by default that of the first row.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Writer setting that the table keeps, such as max_memtable_size=64000000; durations end in _ms.",
    ),
]


def pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """``KEY=VALUE`` texts as a mapping."""
    found = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint=option)
        found[key.strip()] = value
    return found


def storage_options(texts: list[str] | None) -> dict[str, str]:
    return pairs(texts, "--option")


def names(text: str | None) -> list[str] | None:
    """``a,b`` as a list; ``None`` stays ``None``."""
    if text is None:
        return None
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise typer.BadParameter("name at least one column")
    return found


def bucket(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    column, colon, number = text.rpartition(":")
    if not colon or not column or not number.isdigit():
        raise typer.BadParameter(f"{text!r} is not COLUMN:N, such as id:8", param_hint="--bucket")
    return column, int(number)


def check_sharding(by_bucket: str | None, identity: str | None, unsharded: bool) -> None:
    if (by_bucket is not None) + (identity is not None) + unsharded > 1:
        raise typer.BadParameter("choose one of --bucket, --identity and --unsharded")


def open_table(uri: str, options: list[str] | None) -> Table:
    """The table, or an error with advice for the command line."""
    import lancewal

    try:
        return lancewal.open(uri, storage_options(options))
    except NotInitializedError:
        raise CommandError(
            f"the Lance table at {uri} has no write path yet; give it one with: lancewal init {uri}",
            NOT_FOUND,
        ) from None
    except TableNotFoundError as error:
        raise CommandError(
            f"there is no Lance table at {uri}; check the path, or create one with lancewal ingest --create",
            NOT_FOUND,
        ) from error


def open_view(uri: str, options: list[str] | None, at: str | None) -> TableView:
    """The table as it is now, or as it was at a checkpoint."""
    table = open_table(uri, options)
    return table if at is None else table.at(at)


def is_missing(uri: str, storage: dict[str, str]) -> bool:
    """Whether there is no Lance table, with or without a write path."""
    from lancewal.base import BaseTable

    try:
        BaseTable.open(uri, storage)
    except TableNotFoundError:
        return True
    except NotInitializedError:
        return False
    return False
