"""Exactly-once writes of jobs that may be rerun, and the change feed."""

from lancewal.publish.feed import (
    CHANGE_TYPE,
    DELETE,
    FEED_COLUMNS,
    INSERT,
    SHARD_ID,
    UPSERT,
    ChangeFeed,
    Positions,
    ending_before_pointers,
    feed_schema,
)
from lancewal.publish.publishing import (
    Adopt,
    Adoption,
    StagedAge,
    adopt_sstables,
    append_rows,
    append_transaction,
    begin_append,
    finish_append,
    publish,
)
from lancewal.publish.sstable_pointers import SsTablePointer
from lancewal.publish.staging import DEFAULT_STAGING_BYTES, STAGED_DELETION_AGE, Staged, Stager, is_staged
from lancewal.publish.transactions import (
    TRANSACTIONS_DIR,
    Run,
    ShardWrite,
    Transaction,
    TransactionLog,
    Unsettled,
)

__all__ = [
    "CHANGE_TYPE",
    "DEFAULT_STAGING_BYTES",
    "DELETE",
    "FEED_COLUMNS",
    "INSERT",
    "SHARD_ID",
    "STAGED_DELETION_AGE",
    "TRANSACTIONS_DIR",
    "UPSERT",
    "Adopt",
    "Adoption",
    "ChangeFeed",
    "Positions",
    "Run",
    "ShardWrite",
    "SsTablePointer",
    "Staged",
    "StagedAge",
    "Stager",
    "Transaction",
    "TransactionLog",
    "Unsettled",
    "adopt_sstables",
    "append_rows",
    "append_transaction",
    "begin_append",
    "ending_before_pointers",
    "feed_schema",
    "finish_append",
    "is_staged",
    "publish",
]
