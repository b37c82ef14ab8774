"""Table: the front door to one Lance table and its write path."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa

from lancewal import layout
from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, PartialWriteError
from lancewal.format.index_details import MemWalDetails
from lancewal.format.shard_manifest import ShardManifest, ShardStatus
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.sharding import UNSHARDED, Shard, ShardRouter, decoded_values, discover_manifests
from lancewal.wal.tailer import WalTailer
from lancewal.wal.tip import find_tip, first_unsettled
from lancewal.writer.config import ShardWriterConfig
from lancewal.writer.open import open_shard_writer
from lancewal.writer.registry import live_writer
from lancewal.writer.shard_writer import ShardWriter
from lancewal.writer.table_writer import TableWriter
