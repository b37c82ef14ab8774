"""Garbage collection, one module for each resource."""

from lancewal.maintenance.gc.collect import collect_garbage
from lancewal.maintenance.gc.report import Collected, GcReport, Kept
from lancewal.maintenance.gc.retention import Resource, Retention

__all__ = ["Collected", "GcReport", "Kept", "Resource", "Retention", "collect_garbage"]
