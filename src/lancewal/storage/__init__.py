"""Object storage and the layout of its paths: the only access to stored bytes."""

from lancewal.storage import layout
from lancewal.storage.backend import DELETED_AT_ONCE, ObjectInfo, numbered
from lancewal.storage.cache import Cache, Lease, Shelf, lance_cache_bytes, process_cache
from lancewal.storage.clock import MIN_DELETION_AGE, RECHECK_AFTER, Clock, HostClock, boot_time, host_clock
from lancewal.storage.forks import check_process, in_forked_child, is_forked, note_use
from lancewal.storage.layout import is_plain_name
from lancewal.storage.location import path_text
from lancewal.storage.measures import LATENCY_BOUNDS, process_totals, read_times
from lancewal.storage.memory import RowMemory, memory_bytes, row_memory
from lancewal.storage.parallel import (
    LOOK_AGAIN_SECONDS,
    Bell,
    Crew,
    Once,
    Room,
    Task,
    Worker,
    beside,
    both,
    in_thread,
    lazy_property,
    ordered_map,
    run_in_background,
    start_thread,
)
from lancewal.storage.scratch import scratch_directory
from lancewal.storage.secrets import is_panic, remember_password, scrub_error, scrubbed
from lancewal.storage.store import ObjectStore, PutOutcome, observe_all, sync_file_system
from lancewal.storage.tracing import span, trace_headers

__all__ = [
    "DELETED_AT_ONCE",
    "LATENCY_BOUNDS",
    "LOOK_AGAIN_SECONDS",
    "MIN_DELETION_AGE",
    "RECHECK_AFTER",
    "Bell",
    "Cache",
    "Clock",
    "Crew",
    "HostClock",
    "Lease",
    "ObjectInfo",
    "ObjectStore",
    "Once",
    "PutOutcome",
    "Room",
    "RowMemory",
    "Shelf",
    "Task",
    "Worker",
    "beside",
    "boot_time",
    "both",
    "check_process",
    "host_clock",
    "in_forked_child",
    "in_thread",
    "is_forked",
    "is_panic",
    "is_plain_name",
    "lance_cache_bytes",
    "layout",
    "lazy_property",
    "memory_bytes",
    "note_use",
    "numbered",
    "observe_all",
    "ordered_map",
    "path_text",
    "process_cache",
    "process_totals",
    "read_times",
    "remember_password",
    "row_memory",
    "run_in_background",
    "scratch_directory",
    "scrub_error",
    "scrubbed",
    "span",
    "start_thread",
    "sync_file_system",
    "trace_headers",
]
