"""The only door to object storage: put-if-absent, get, head, list and delete below one table."""

from __future__ import annotations

from lancewal.objects.backend import ObjectInfo
from lancewal.objects.secrets import is_panic, remember_password, scrub_error, scrubbed
from lancewal.objects.store import ObjectStore, Observer, PutOutcome, observe_all

__all__ = [
    "ObjectInfo",
    "ObjectStore",
    "Observer",
    "PutOutcome",
    "is_panic",
    "observe_all",
    "remember_password",
    "scrub_error",
    "scrubbed",
]
