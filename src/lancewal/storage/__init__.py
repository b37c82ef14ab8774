"""Object storage, and the names of what lies there: the only door to bytes."""

from lancewal.storage import layout
from lancewal.storage.backend import ObjectInfo
from lancewal.storage.clock import MIN_DELETION_AGE, RECHECK_AFTER, Clock, HostClock, boot_time, host_clock
from lancewal.storage.forks import check_process, in_forked_child, is_forked
from lancewal.storage.layout import is_plain_name
from lancewal.storage.parallel import (
    LOOK_AGAIN_SECONDS,
    Bell,
    Crew,
    Room,
    Task,
    in_thread,
    ordered_map,
    start_thread,
)
from lancewal.storage.secrets import is_panic, remember_password, scrub_error, scrubbed
from lancewal.storage.store import ObjectStore, Observer, PutOutcome, observe_all

__all__ = [
    "LOOK_AGAIN_SECONDS",
    "MIN_DELETION_AGE",
    "RECHECK_AFTER",
    "Bell",
    "Clock",
    "Crew",
    "HostClock",
    "ObjectInfo",
    "ObjectStore",
    "Observer",
    "PutOutcome",
    "Room",
    "Task",
    "boot_time",
    "check_process",
    "host_clock",
    "in_forked_child",
    "in_thread",
    "is_forked",
    "is_panic",
    "is_plain_name",
    "layout",
    "observe_all",
    "ordered_map",
    "remember_password",
    "scrub_error",
    "scrubbed",
    "start_thread",
]
