"""A streaming write path for Lance tables: rows are durable, readable and searchable at once.

>>> import tempfile, lancewal
>>> uri = tempfile.mkdtemp() + "/table"
>>> table = lancewal.create(uri, [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}], key="id")
>>> with table.writer() as writer:
...     _ = writer.put({"id": 2, "text": "newer"})
...     _ = writer.delete(1)
>>> lancewal.open(uri).scan().to_table().to_pylist()
[{'id': 2, 'text': 'newer'}]
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lancewal import errors

if TYPE_CHECKING:
    from lancewal.config import ShardWriterConfig
    from lancewal.format import PutId, WalEntry
    from lancewal.gateway import (
        AsyncTable,
        AsyncWriter,
        Gateway,
        RemoteTable,
        RemoteWriter,
        SharedTable,
        connect,
        share,
    )
    from lancewal.initialization import create, initialize, restore, uninitialize
    from lancewal.maintenance import Checkpoint, UpkeepSettings
    from lancewal.reader import LookupResult, Scan, TableView
    from lancewal.shard import ShardRouter, WalAppender, WalTailer
    from lancewal.status import ShardInfo
    from lancewal.table import Table
    from lancewal.table import open_table as open
    from lancewal.upkeep import UpkeepPlan, UpkeepReport
    from lancewal.writer import ShardWriter, TableWriter, TableWriteResult, WriteResult

    __version__: str

# Lance logs an error about its own system index, which has no fields, each time indexes are listed.
# The message is harmless and tells a user nothing. Lance reads the variable at its import, so it must be
# set before; a value that the user has set stays.
os.environ.setdefault("LANCE_LOG", "warn,lance::index=off")

#: Where each public name lives. Loaded at first use: pylance alone takes most of a second.
_HOMES = {
    "AsyncTable": ("lancewal.gateway", "AsyncTable"),
    "AsyncWriter": ("lancewal.gateway", "AsyncWriter"),
    "Checkpoint": ("lancewal.maintenance", "Checkpoint"),
    "Gateway": ("lancewal.gateway", "Gateway"),
    "LookupResult": ("lancewal.reader", "LookupResult"),
    "PutId": ("lancewal.format", "PutId"),
    "RemoteTable": ("lancewal.gateway", "RemoteTable"),
    "RemoteWriter": ("lancewal.gateway", "RemoteWriter"),
    "Scan": ("lancewal.reader", "Scan"),
    "SharedTable": ("lancewal.gateway", "SharedTable"),
    "ShardInfo": ("lancewal.status", "ShardInfo"),
    "ShardRouter": ("lancewal.shard", "ShardRouter"),
    "ShardWriter": ("lancewal.writer", "ShardWriter"),
    "ShardWriterConfig": ("lancewal.config", "ShardWriterConfig"),
    "Table": ("lancewal.table", "Table"),
    "TableView": ("lancewal.reader", "TableView"),
    "TableWriteResult": ("lancewal.writer", "TableWriteResult"),
    "TableWriter": ("lancewal.writer", "TableWriter"),
    "UpkeepPlan": ("lancewal.upkeep", "UpkeepPlan"),
    "UpkeepReport": ("lancewal.upkeep", "UpkeepReport"),
    "UpkeepSettings": ("lancewal.maintenance", "UpkeepSettings"),
    "WalAppender": ("lancewal.shard", "WalAppender"),
    "WalEntry": ("lancewal.format", "WalEntry"),
    "WalTailer": ("lancewal.shard", "WalTailer"),
    "WriteResult": ("lancewal.writer", "WriteResult"),
    "connect": ("lancewal.gateway", "connect"),
    "create": ("lancewal.initialization", "create"),
    "initialize": ("lancewal.initialization", "initialize"),
    "open": ("lancewal.table", "open_table"),
    "share": ("lancewal.gateway", "share"),
    "restore": ("lancewal.initialization", "restore"),
    "uninitialize": ("lancewal.initialization", "uninitialize"),
}

__all__ = [
    "AsyncTable",
    "AsyncWriter",
    "Checkpoint",
    "Gateway",
    "LookupResult",
    "PutId",
    "RemoteTable",
    "RemoteWriter",
    "Scan",
    "ShardInfo",
    "ShardRouter",
    "ShardWriter",
    "ShardWriterConfig",
    "SharedTable",
    "Table",
    "TableView",
    "TableWriteResult",
    "TableWriter",
    "UpkeepPlan",
    "UpkeepReport",
    "UpkeepSettings",
    "WalAppender",
    "WalEntry",
    "WalTailer",
    "WriteResult",
    "__version__",
    "connect",
    "create",
    "errors",
    "initialize",
    "open",
    "restore",
    "share",
    "uninitialize",
]


def _version() -> str:
    """The installed version; read on demand, because that takes longer than the rest of the import."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lancewal")
    except PackageNotFoundError:  # a source tree that was not installed
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
