"""WAL entries that point to SSTables: how rows that came past the WAL reach the change feed.

A bulk load writes SSTables directly and then a sentinel into each shard's WAL that names them.
Whoever follows the WAL reads the rows there, so the SSTables stay as long as the sentinel does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from lancewal.format.wal_entry import WalEntry

#: The sentinel's tag: a JSON list of SSTable paths, relative to the shard's directory.
SSTABLES_TAG = "sstables"


def pointer_tags(paths: Sequence[str]) -> dict[str, str]:
    """The tags of a pointer, for ``WalAppender.append_pointer``."""
    return {SSTABLES_TAG: json.dumps(list(paths))}


def pointed_sstables(entry: WalEntry) -> list[str]:
    """The SSTable paths that an entry points to; none for entries of other kinds.

    >>> from uuid import UUID
    >>> entry = WalEntry(UUID(int=1), 1, 1, None, [], True, tags=pointer_tags(["0a1b2c3d_gen_4"]))
    >>> pointed_sstables(entry)
    ['0a1b2c3d_gen_4']
    """
    if not entry.sentinel or SSTABLES_TAG not in entry.tags:
        return []
    named = json.loads(entry.tags[SSTABLES_TAG])
    return [path for path in named if isinstance(path, str)]
