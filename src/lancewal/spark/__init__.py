"""lancewal on Spark: tables as sources and sinks, the change feed, and maintenance as jobs.

``spark.read``, ``df.write``, ``spark.readStream`` and ``df.writeStream`` take
``format("lancewal")`` without any registration. This package has what they cannot express:

>>> from lancewal.spark import changes, compact, flush, gc, route, session, stream, write
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lancewal.spark.columns import spark_schema
    from lancewal.spark.debezium import from_debezium
    from lancewal.spark.diagnosis import Diagnosis, doctor
    from lancewal.spark.feed_source import changes
    from lancewal.spark.jobs import JobFailedError, ShardOutcome, backup, compact, flush, gc, upkeep, verify
    from lancewal.spark.low_latency import batch_writer, route, stream, write
    from lancewal.spark.progress import BatchReport, feed_lag, sink_report
    from lancewal.spark.row_changes import delete, merge, update
    from lancewal.spark.search import full_text_search, vector_search
    from lancewal.spark.search_functions import register_functions
    from lancewal.spark.sequence import apply_changes
    from lancewal.spark.spark_session import session

#: Modules are loaded at first use: executors import this package for every data source of the session.
_HOMES = {
    "BatchReport": "progress",
    "Diagnosis": "diagnosis",
    "JobFailedError": "jobs",
    "ShardOutcome": "jobs",
    "apply_changes": "sequence",
    "backup": "jobs",
    "batch_writer": "low_latency",
    "changes": "feed_source",
    "compact": "jobs",
    "doctor": "diagnosis",
    "feed_lag": "progress",
    "flush": "jobs",
    "delete": "row_changes",
    "full_text_search": "search",
    "from_debezium": "debezium",
    "gc": "jobs",
    "merge": "row_changes",
    "register_functions": "search_functions",
    "route": "low_latency",
    "session": "spark_session",
    "sink_report": "progress",
    "spark_schema": "columns",
    "stream": "low_latency",
    "update": "row_changes",
    "upkeep": "jobs",
    "vector_search": "search",
    "verify": "jobs",
    "write": "low_latency",
}

__all__ = [
    "BatchReport",
    "Diagnosis",
    "JobFailedError",
    "ShardOutcome",
    "apply_changes",
    "backup",
    "batch_writer",
    "changes",
    "compact",
    "delete",
    "doctor",
    "feed_lag",
    "flush",
    "from_debezium",
    "full_text_search",
    "gc",
    "merge",
    "register_functions",
    "route",
    "session",
    "sink_report",
    "spark_schema",
    "stream",
    "update",
    "upkeep",
    "vector_search",
    "verify",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
