"""``lancewal backup`` and ``restore``."""

from __future__ import annotations

from typing import Annotated

import typer

from lancewal.cli import console, figures, options
from lancewal.cli.exits import PROBLEMS, guarded, resumable

_OtherOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--backup-option",
        metavar="KEY=VALUE",
        help="A storage option for where the backups are; repeat it for more.",
        show_default=False,
    ),
]
_Backups = Annotated[
    str, typer.Argument(metavar="BACKUPS", help="Where the backups of this table are.", show_default=False)
]


@guarded
def backup(
    table: options.TableArgument,
    backups: _Backups,
    check: Annotated[
        bool, typer.Option("--check", help="Read all files of the backup again and compare their checksums.")
    ] = False,
    option: options.StorageOptions = None,
    backup_option: _OtherOptions = None,
    json: options.Json = False,
) -> None:
    """Copy the table as it is now, beside writers and maintenance.

    What an earlier backup has already is not copied again. Ends with code 3 when --check finds damage.
    """
    from lancewal.backup import check_backup
    from lancewal.objects import ObjectStore

    opened = options.open_table(table, option)
    elsewhere = options.storage_options(backup_option)
    with resumable("a backup that was not finished does not count"):
        report = opened.backup(backups, elsewhere)
    damaged = check_backup(ObjectStore.from_uri(backups, elsewhere), report.id) if check else []
    if json:
        console.print_json({**report.to_dict(), "damaged": damaged})
    else:
        console.out().print(
            f"[green]✓[/] backup {report.id}: {figures.plural(report.files, 'file')} "
            f"({figures.size(report.num_bytes)}), {figures.count(report.copied_files)} of them copied "
            f"({figures.size(report.copied_bytes)}) in {figures.duration(report.seconds)}"
        )
        for text in damaged:
            console.out().print(f"  [red]damaged[/] {text}")
    if damaged:
        raise typer.Exit(PROBLEMS)


@guarded
def restore(
    backups: _Backups,
    table: options.TableArgument,
    backup: Annotated[
        str | None,
        typer.Option("--backup", metavar="ID", help="Which one; the newest by default.", show_default=False),
    ] = None,
    option: options.StorageOptions = None,
    backup_option: _OtherOptions = None,
    json: options.Json = False,
) -> None:
    """Make a table of a backup, at a place where nothing is yet; every file's checksum is compared."""
    import lancewal

    with resumable("there is no table yet, delete what is there"):
        restored = lancewal.restore(
            backups,
            table,
            backup=backup,
            source_options=options.storage_options(backup_option),
            storage_options=options.storage_options(option),
        )
    shards = len(restored.shards())
    if json:
        console.print_json({"table": restored.uri, "shards": shards})
    else:
        console.out().print(f"[green]✓[/] restored {restored.uri} with {figures.plural(shards, 'shard')}")
