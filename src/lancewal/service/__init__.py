"""Who writes to a table, and how others reach it."""

from lancewal.service.owners import Owner, TakeOver, checked_take_over, look_at_owners
from lancewal.service.presence import Presence, open_owned, presence_at
from lancewal.service.requests import (
    adopt_by_owners,
    delete_through_owners,
    flush_one_through_owner,
    flush_through_owners,
    is_owned,
    publish_through_owners,
    seal_through_owner,
)

__all__ = [
    "Owner",
    "Presence",
    "TakeOver",
    "adopt_by_owners",
    "checked_take_over",
    "delete_through_owners",
    "flush_one_through_owner",
    "flush_through_owners",
    "is_owned",
    "look_at_owners",
    "open_owned",
    "presence_at",
    "publish_through_owners",
    "seal_through_owner",
]
