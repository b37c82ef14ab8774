"""A streaming write path for Lance tables: durable, searchable at once, compacted by Spark.

>>> import lancewal
>>> table = lancewal.initialize(uri, bucket=("id", 8))  # doctest: +SKIP
>>> with table.writer() as writer:  # doctest: +SKIP
...     writer.put(rows)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lancewal.errors import (
        ClosedError as ClosedError,
    )
