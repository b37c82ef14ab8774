"""Compaction of a table without a primary key: append once, whoever dies when.

Lance cannot append and mark in one commit. What it can do in one commit is replace the list of
fragments and the columns' metadata (a ``Merge``), and it refuses that when anything has
changed the rows or the columns since the version it was made for. That gives:

1. Open the newest version and see how far it holds the shard, by marker or tag.
2. Write the rows above that as new data files. Nobody sees them yet.
3. Commit a version that has the old fragments, the new ones, and the tag "this shard is held up
   to generation g" (see :mod:`lancewal.markers`).
4. Commit the marker for g, by a merge of nothing.
5. Remove the tag, once for all shards (:func:`remove_tags`).

**No row is doubled.** Two compactors that both found g missing in version v both try to replace
v. Lance lets one pass; the other is refused, looks at the new version and finds the tag. This
holds however long either of them was stopped, because what counts is the version, not time.
**No row is lost**, because the marker comes after the rows. **Every reader sees each row once**:
rows and tag come in one version, and with the tag the SSTables are left out. **Who is killed**
before 3 leaves files that no version names (Lance's own cleanup removes them), after 3 a tag that
the next compaction turns into a marker.

Appends of others, their merges, updates and deletes are only refused where they were begun
before step 3 and rewrite whole fragments (file compaction), or change columns.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from lance.fragment import FragmentMetadata, write_fragments
from lance.lance import LanceSchema

from lancewal.base import BaseTable
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.maintenance import points
from lancewal.maintenance.commits import (
    AlreadyCompactedError,
    LostRaceError,
    commit_errors,
    commit_marker,
    until_won,
)
from lancewal.maintenance.newest_rows import all_rows
from lancewal.maintenance.plan import ShardPlan
from lancewal.maintenance.report import Progress, ProgressCallback, ShardReport
from lancewal.markers import TAGGED_COLUMNS, appended_generations, tag, tags
from lancewal.objects import ObjectStore

logger = logging.getLogger(__name__)


def _message(name: str, field: str, number: int, kind: int) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"lance_{name}", package="lancewal", syntax="proto3")
    message = file.message_type.add(name=name)
    message.field.add(
        name=field, number=number, type=kind, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"lancewal.{name}"))
