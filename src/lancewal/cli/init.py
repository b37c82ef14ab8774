"""``lancewal init``."""

from __future__ import annotations

from typing import Annotated

import typer

from lancewal.cli import console, options
from lancewal.cli.console import plain
from lancewal.cli.creating import WritePath, create, set_key
from lancewal.cli.exits import NOT_FOUND, CommandError, guarded


@guarded
def init(
    table: options.TableArgument,
    bucket: options.Bucket = None,
    identity: options.Identity = None,
    unsharded: options.Unsharded = False,
    by_hand: Annotated[
        bool, typer.Option("--by-hand", help="No sharding: writers name their shard.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="FILE",
            help="Create the table, empty, with the columns of this file.",
            show_default=False,
        ),
    ] = None,
    key: options.Key = None,
    vector_column: options.Vectors = None,
    index: Annotated[
        list[str] | None,
        typer.Option(
            "--index",
            metavar="NAME",
            help="Index that writers keep up to date on fresh rows; repeat for more, all by default.",
            show_default=False,
        ),
    ] = None,
    no_indexes: Annotated[bool, typer.Option("--no-indexes", help="Writers maintain no index.")] = False,
    settings: options.Settings = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Give a Lance table a write path.

    Done once per table. Without a choice of sharding, rows go to 4 buckets of the first key column, or
    to a single shard when the table has no key.
    """
    options.check_sharding(bucket, identity, unsharded)
    if by_hand and (bucket or identity or unsharded):
        raise typer.BadParameter("--by-hand excludes --bucket, --identity and --unsharded")
    if no_indexes and index:
        raise typer.BadParameter("choose --index or --no-indexes")
    path = WritePath(
        bucket=options.bucket(bucket),
        identity=identity,
        unsharded=unsharded,
        by_hand=by_hand,
        indexes=[] if no_indexes else index,
        settings=options.pairs(settings, "--set"),
    )
    storage = options.storage_options(option)
    key_columns = options.names(key)
    if like is not None:
        _create_like(table, storage, like, key_columns, vector_column, path)
    elif options.is_missing(table, storage):
        raise CommandError(
            f"there is no Lance table at {table}; write one with Lance, or create it here with --like FILE",
            NOT_FOUND,
        )
    elif key_columns is not None:
        set_key(table, storage, key_columns, path)
    made = path.initialize(table, storage)
    status = made.status()
    if json:
        console.print_json(status.to_dict())
        return
    keyed = f"key {', '.join(status.primary_key)}" if status.primary_key else "no key: append-only"
    out = console.out()
    out.print(
        f"[green]✓[/] {plain(made.uri)} has a write path: {plain(keyed)}, {plain(status.sharding)}, "
        f"{len(status.shards)} shards"
    )
    uri = plain(table)
    out.print(
        f"  next: [bold]lancewal ingest {uri} FILE…[/], or lancewal.open({plain(repr(table))}).writer()"
    )


def _create_like(
    table: str,
    storage: dict[str, str],
    like: str,
    key: list[str] | None,
    vectors: list[str] | None,
    path: WritePath,
) -> None:
    from lancewal.ingest import find_files

    if not options.is_missing(table, storage):
        raise CommandError(f"there is a Lance table at {table} already; leave --like out", 2)
    files = find_files([like])
    if not files:
        raise CommandError(f"{like} has no file to take columns from", 2)
    create(table, storage, files[0], key, vectors, path)
