"""When a snapshot could not be taken because the table moved on meanwhile."""

from __future__ import annotations

from lancewal.errors import ConflictError


class SnapshotMovedError(ConflictError):
    """What a reader listed is no longer all there is; reading again from the start helps."""
