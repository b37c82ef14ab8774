"""Uninitialize: move all rows to the base table and remove the write path, in steps that may be interrupted.

1. Every shard is drained and sealed, so that no writer of lancewal or Lance can write to it any more.
2. Compaction moves all rows to the base table. A record says that the directory is not needed from now on.
3. One commit drops the MemWAL index. From now on the table is an ordinary Lance table.
4. The shards are listed again. A writer that creates a shard checks for the index afterwards. So either the
   writer sees that the index is gone, or this step sees the shard and puts the index back.
5. The directory of the write path is deleted, and the record last.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from uuid import UUID

import lance

from lancewal.base import BaseTable, lance_errors, locate
from lancewal.errors import ConflictError, InvalidInputError, LanceWalError, NotInitializedError
from lancewal.format import MEM_WAL_INDEX_NAME, ShardStatus, encode_record
from lancewal.initialization.initialize import commit_index
from lancewal.maintenance import drop_checkpoint_tags
from lancewal.service import look_at_owners
from lancewal.shard import discover_manifests
from lancewal.storage import ObjectStore, layout
from lancewal.table import Table

logger = logging.getLogger(__name__)

#: The record that the base table holds all rows of the write path's directory.
_DONE_WITH = f"{layout.OWN_DIR}/uninitialized.json"
#: Shards may appear while others are sealed, so sealing takes several rounds.
_ROUNDS = 5


def uninitialize(
    uri_or_dataset: str | os.PathLike[str] | lance.LanceDataset,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Remove the write path of a table, after moving all its rows to the base table.

    Lance and LanceDB use the table as before :func:`initialize`, which may be called again. The primary key
    stays. The shards and their logs are deleted, so the change feed ends. A tagged version of the base table
    keeps only the rows that were compacted into it.

    The call is refused with :class:`ShardOwnedError` while a writer is alive, here or elsewhere: close it
    first. It is also refused while there are checkpoints, whose rows would be lost: drop them first. Rows
    that only the logs hold are flushed and compacted. If the call fails, the table is as it was. If it was
    killed, call it again.

    >>> import tempfile, lance, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id")
    >>> with table.writer() as writer:
    ...     _ = writer.put({"id": 2})
    >>> lancewal.uninitialize(table.uri)
    >>> lance.dataset(table.uri).count_rows()
    2
    """
    uri, options = locate(uri_or_dataset, storage_options)
    store = ObjectStore.from_uri(uri, options)
    try:
        table = Table.open(uri, options)
    except NotInitializedError:
        if store.head(_DONE_WITH) is None:
            raise
        _remove(store)
        return
    _refuse_owners(store)
    if kept := [each.name for each in table.checkpoints()]:
        raise InvalidInputError(
            f"the table at {store.uri} has the checkpoints {', '.join(kept)}, whose rows would go; drop them "
            "first"
        )
    sealed: list[UUID] = []
    try:
        _seal(table, store, sealed)
        table.compact()
        if table.plan_compaction():
            raise ConflictError("rows came while the table was compacted; try again")
        base = BaseTable.open(uri, options, store=store)
        store.put(_DONE_WITH, encode_record({"base_version": base.version}))
        _drop_index(base)
    except BaseException:
        _take_back(table, store, sealed)
        raise
    late = _unsealed(store)
    if late:
        commit_index(base.dataset, base.details)
        _take_back(table, store, sealed)
        raise ConflictError(
            f"a writer made shard {late[0]} meanwhile, so the table is as it was; close it first"
        )
    _remove(store)


def _refuse_owners(store: ObjectStore) -> None:
    for owner in look_at_owners(store):
        for shard_id in () if owner.gone else owner.shards:
            raise owner.error(shard_id, "a table is not uninitialised while somebody writes to it")


def _seal(table: Table, store: ObjectStore, sealed: list[UUID]) -> None:
    """Seal every shard; append those that were not sealed before to ``sealed``."""
    for _ in range(_ROUNDS):
        unsealed = _unsealed(store)
        if not unsealed:
            return
        for shard_id in unsealed:
            table.seal_shard(shard_id)
            sealed.append(shard_id)
    raise ConflictError(
        f"new shards kept coming while those of {store.uri} were sealed; stop the writers first"
    )


def _unsealed(store: ObjectStore) -> list[UUID]:
    manifests = discover_manifests(store)
    return [each.shard_id for each in manifests if each.status is not ShardStatus.SEALED]


def _take_back(table: Table, store: ObjectStore, sealed: list[UUID]) -> None:
    """Undo the seals and delete the record: it would wrongly cover rows that are written later."""
    try:
        Table.open(store.uri, store.storage_options)
        store.delete(_DONE_WITH)
    except NotInitializedError:
        return  # the drop of the index took effect: the next call goes on from here
    except LanceWalError as error:
        logger.warning("the record %s stays: %s", _DONE_WITH, error)
    _unseal(table, sealed)


def _unseal(table: Table, sealed: list[UUID]) -> None:
    for shard_id in sealed:
        try:
            table.unseal_shard(shard_id)
        except LanceWalError as error:
            logger.warning("shard %s stays sealed, unseal it by hand: %s", shard_id, error)


def _drop_index(base: BaseTable) -> None:
    with lance_errors(f"drop the MemWAL index of {base.uri}", commits=True):
        base.dataset.drop_index(MEM_WAL_INDEX_NAME)


def _remove(store: ObjectStore) -> None:
    """Delete the directory of the write path, and last the record that permits this."""
    unsealed = _unsealed(store)
    if unsealed:
        raise InvalidInputError(
            f"shard {unsealed[0]} of {store.uri} takes writers and may have rows, but the table has no "
            "MemWAL index any more; make it again with LanceDataset.initialize_mem_wal, and see Table.repair"
        )
    with lance_errors(f"open the table at {store.uri}"):
        dataset = lance.dataset(store.uri, storage_options=dict(store.storage_options) or None)
    drop_checkpoint_tags(dataset)  # unfinished checkpoints may have left tags
    for name in store.list_directories(layout.MEM_WAL_DIR):
        path = f"{layout.MEM_WAL_DIR}/{name}"
        if path != layout.OWN_DIR:
            store.delete_prefix(path)
    records = [each.path for each in store.list(layout.OWN_DIR)]
    store.delete_many([path for path in records if path != _DONE_WITH])
    store.delete_prefix(layout.MEM_WAL_DIR)
