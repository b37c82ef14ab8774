"""Which processes write to a table, and how other processes reach them."""

from lancewal.service.duties import Duty, duties_in, is_done_elsewhere, note_duty, read_duties
from lancewal.service.owners import (
    Owner,
    TakeOver,
    checked_take_over,
    look_at_clock,
    look_at_owners,
    owners_in,
)
from lancewal.service.presence import Presence, open_owned, presence_at
from lancewal.service.requests import (
    delete_through_owners,
    flush_one_through_owner,
    flush_through_owners,
    is_owned,
    may_claim,
    publish_through_owners,
    seal_through_owner,
)

__all__ = [
    "Duty",
    "Owner",
    "Presence",
    "TakeOver",
    "checked_take_over",
    "delete_through_owners",
    "duties_in",
    "flush_one_through_owner",
    "flush_through_owners",
    "is_done_elsewhere",
    "is_owned",
    "look_at_clock",
    "look_at_owners",
    "may_claim",
    "note_duty",
    "open_owned",
    "owners_in",
    "presence_at",
    "publish_through_owners",
    "read_duties",
    "seal_through_owner",
]
