"""``lancewal seal`` and ``unseal``: close shards for writers, and open them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from lancewal.cli import console, options
from lancewal.cli.exits import NOT_FOUND, REFUSED, CommandError, guarded

if TYPE_CHECKING:
    from lancewal.table import Table

Shard = Annotated[
    str,
    typer.Argument(metavar="SHARD", help="Id of the shard as lancewal status shows it, or its beginning."),
]


@guarded
def seal(
    table: options.TableArgument,
    shard: Shard,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Close a shard for writers until it is unsealed.

    Its rows are flushed first, by the process that writes to it if there is one. A writer that is open on it
    is fenced. The shard can still be read and compacted.
    """
    opened = options.open_table(table, option)
    found = _shard(opened, shard)
    opened.seal_shard(found)
    console.tell(f"shard {found} is sealed", {"shard_id": str(found), "status": "sealed"}, json=json)


@guarded
def unseal(
    table: options.TableArgument,
    shard: Shard,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Open a sealed shard for writers again.

    Refused if another shard takes the rows of the same sharding value by now.
    """
    opened = options.open_table(table, option)
    found = _shard(opened, shard)
    opened.unseal_shard(found)
    console.tell(
        f"shard {found} takes writers again", {"shard_id": str(found), "status": "active"}, json=json
    )


def _shard(table: Table, text: str) -> UUID:
    """The shard whose id begins with ``text``."""
    found = [each.shard_id for each in table.shards() if str(each.shard_id).startswith(text.lower())]
    if not found:
        raise CommandError(f"the table has no shard {text}; lancewal status shows its shards", NOT_FOUND)
    if len(found) > 1:
        raise CommandError(f"{len(found)} shards begin with {text}; give more of the id", REFUSED)
    return found[0]
