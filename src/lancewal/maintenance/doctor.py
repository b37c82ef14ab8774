"""Tests by experiment whether a table's storage does what the write path needs.

The safety of a shard rests on put-if-absent: if several processes create an object, one succeeds and the
others are told that they did not. A store that treats a second put as an overwrite, as some gateways in
front of object storage do, loses rows without an error. So :func:`examine` creates an object many times at
once and counts how many calls report success.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lancewal.errors import LanceWalError
from lancewal.storage import ObjectStore, PutOutcome, layout, ordered_map

#: How many threads try to create one object at the same time.
_RIVALS = 8
#: A larger difference between clocks makes logs hard to compare; nothing in lancewal depends on it.
_CLOCK_SECONDS = 60.0
#: SSTables are made in the temporary directory before they are uploaded.
_SPACE = 1 << 30


@dataclass(frozen=True)
class Check:
    """The result of one test; ``ok`` is ``None`` if the result is only for information."""

    name: str
    ok: bool | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "text": self.text}


def examine(store: ObjectStore) -> Iterator[Check]:
    """Test what writers, readers and maintenance need of the storage. Leaves nothing behind."""
    directory = f"{layout.OWN_DIR}/doctor/{secrets.token_hex(8)}"
    checks: list[tuple[str, Callable[[ObjectStore, str], tuple[bool | None, str]]]] = [
        ("create", _creates_once),
        ("read", _reads_back),
        ("list", _lists),
        ("clock", _clock),
        ("delete", _deletes),
    ]
    try:
        for name, check in checks:
            try:
                yield Check(name, *check(store, directory))
            except LanceWalError as error:
                yield Check(name, False, f"{type(error).__name__}: {error}")
    finally:
        _clean_up(store, directory)
    yield _space(store)


def _creates_once(store: ObjectStore, directory: str) -> tuple[bool, str]:
    """Test put-if-absent. The contents differ, or a call could take another's object for its own."""

    def create(rival: int) -> PutOutcome:
        return store.put_if_absent(f"{directory}/one", f"{rival} {secrets.token_hex(8)}".encode())

    outcomes = list(ordered_map(create, range(_RIVALS), _RIVALS))
    made = outcomes.count(PutOutcome.CREATED)
    if made == 1:
        return True, f"of {_RIVALS} who created one object at once, one was told that it did"
    return False, (
        f"of {_RIVALS} who created one object at once, {made} were told that they did: this storage does not "
        "honour put-if-absent, and rows would be lost; do not write to it"
    )


def _reads_back(store: ObjectStore, directory: str) -> tuple[bool, str]:
    data = secrets.token_bytes(1 << 16)
    store.put(f"{directory}/two", data)
    whole, part = store.get(f"{directory}/two"), store.get_range(f"{directory}/two", 100, 50)
    if (whole, part) == (data, data[100:150]):
        return True, "what is written is read back at once, in whole and in part"
    return False, "what was written just now is read back differently"


def _lists(store: ObjectStore, directory: str) -> tuple[bool, str]:
    listed = {info.path for info in store.list(directory)}
    if listed == {f"{directory}/one", f"{directory}/two"}:
        return True, "what is written is listed at once"
    return False, f"of two objects that are there, {len(listed)} are listed: listings lag behind"


def _clock(store: ObjectStore, directory: str) -> tuple[bool | None, str]:
    info = store.head(f"{directory}/two")
    if info is None:
        return False, "an object that is there is not found"
    seconds = (datetime.now(UTC) - info.modified).total_seconds()
    ahead = f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the storage's"
    if abs(seconds) <= _CLOCK_SECONDS:
        return True, "this machine's clock and the storage's agree"
    return None, f"this machine's clock is {ahead}; nothing depends on it, times in logs will differ"


def _deletes(store: ObjectStore, directory: str) -> tuple[bool, str]:
    store.delete_many([f"{directory}/one", f"{directory}/two"])
    left = store.list(directory)
    return not left, "deleted objects are gone at once" if not left else "deleted objects are still listed"


def _space(store: ObjectStore) -> Check:
    where = store.local_path(layout.MEM_WAL_DIR) if store.is_local else None
    place = where or tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:.1f} GB free " + ("on the table's disk" if where else "for temporary files")
    return Check("space", True if free > _SPACE else None, text)


def _clean_up(store: ObjectStore, directory: str) -> None:
    try:
        store.delete_prefix(directory)
    except LanceWalError:
        return  # the check that could not delete the object has reported it
