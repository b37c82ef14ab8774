"""The only door to object storage: put-if-absent, get, head, list and delete below one table."""

from __future__ import annotations

from lancewal.objects.backend import ObjectInfo
from lancewal.objects.store import ObjectStore, Observer, PutOutcome, observe_all

__all__ = ["ObjectInfo", "ObjectStore", "Observer", "PutOutcome", "observe_all"]
