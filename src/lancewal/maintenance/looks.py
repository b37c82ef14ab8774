"""What earlier collections saw, and how long ago that was by clocks that nobody can set.

The stamps of objects come from a clock that may step by hours: of a storage server, or of this
machine where the table is on its disk. By stamps alone a slot could be emptied that was filled a
moment ago, while a writer still takes it for free. So nothing goes by its stamp alone. Each
collection leaves a record of what there was (a *look*), and garbage goes only after a look
which saw it has aged as much as the garbage must.

The age of a look is what machines have measured themselves, each by its clock since boot. A record
states, for each clock, a reading by which the look had been made: who finds an own reading knows
the span since then. Who does not, because it is another machine or has booted since, takes the age
that was proven so far, and counts on from there. So ages may come out too small, never too large.

A record holds statements that stay true. It does not matter which of two collectors writes last.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from lancewal.storage import HostClock, ObjectInfo, ObjectStore, layout

logger = logging.getLogger(__name__)

#: Machines whose readings a record keeps. One that was dropped counts on from what is proven.
_MAX_CLOCKS = 8
#: How much older than its next but one a look may be before the one between them has to stay.
_SPREAD = 1.25


@dataclass(frozen=True)
class Extent:
    """How far a shard had come: each number only grows.

    ``covered``: the WAL positions up to here are in SSTables. ``version``: of the newest manifest.
    ``compacted``: the generations up to here are in the base table.
    """

    covered: int = 0
    version: int = 0
    compacted: int = 0

    def reaches(self, other: Extent) -> bool:
        return all(ours >= theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True))


@dataclass
class _Look:
    """``names`` are files and directories that no younger look was the first to see, with what they held."""

    extent: Extent
    names: dict[str, str] = field(default_factory=dict)
    #: Seconds that are proven.
    age: float = 0.0
    #: By clock: a reading at which the look had been made.
    made_by: dict[str, float] = field(default_factory=dict)

    def measure(self, clock: str, reading: float) -> None:
        made = min(self.made_by.pop(clock, math.inf), reading - self.age)
        self.age = reading - made
        self.made_by[clock] = made
        while len(self.made_by) > _MAX_CLOCKS:
            del self.made_by[next(iter(self.made_by))]


class Looks:
    """The looks at one shard, or at the files of none, oldest first. Not thread-safe."""

    def __init__(self, path: str, extent: Extent, clock: HostClock, looks: list[_Look]) -> None:
        self._path = path
        self._extent = extent
        self._clock = clock
        # A look that saw more than there is now saw another life of the shard, before a restore.
        self._looks = [look for look in looks if extent.reaches(look.extent)]
        self._measure()

    @classmethod
    def read(cls, store: ObjectStore, shard_id: UUID | None, extent: Extent, clock: HostClock) -> Looks:
        """The earlier looks at a shard which has come to ``extent``; ``None``: at what is no shard's."""
        path = f"{layout.LOOKS_DIR}/{'table' if shard_id is None else shard_id}.json"
        looks: list[_Look] = []
        try:
            looks = [_parsed(each) for each in json.loads(store.get(path))["looks"]]
        except FileNotFoundError:
            logger.debug("nobody has looked at %s before", path)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # Nothing goes too early without it.
            logger.warning("%s is damaged and begins anew: %s", path, error)
        return cls(path, extent, clock, looks)

    def record(self, store: ObjectStore, names: Mapping[str, str] | None) -> None:
        """Add a look to the record: what is there now, and has been seen before this call.

        ``names`` are all that are unlisted, with what they hold; ``None`` where nobody asked.
        """
        if names is not None:
            self._keep_names(names)
        known = {name for look in self._looks for name in look.names}
        new = {name: held for name, held in (names or {}).items() if name not in known}
        if new or not self._looks or self._looks[-1].extent != self._extent:
            self._looks.append(_Look(self._extent, new))
        self._measure()
        self._thin_out()
        data = json.dumps({"looks": [_plain(look) for look in self._looks]})
        # Lost in a power cut it is made again; all that takes is time.
        store.put(self._path, data.encode(), durable=False)

    def reach(self, which: str, age: timedelta) -> float:
        """How far the shard had come when it was last looked at ``age`` ago or earlier."""
        if age <= timedelta(0):
            return math.inf
        needed = age.total_seconds()
        return max((getattr(look.extent, which) for look in self._looks if look.age >= needed), default=0)

    def age_of(self, which: str, number: int) -> timedelta:
        """How long ago the shard is known to have come as far as ``number``."""
        ages = (look.age for look in self._looks if getattr(look.extent, which) >= number)
        return timedelta(seconds=max(ages, default=0.0))

    def age_of_name(self, name: str, held: str) -> timedelta:
        """For how long a file or directory is known to have held the same."""
        ages = (look.age for look in self._looks if look.names.get(name) == held)
        return timedelta(seconds=max(ages, default=0.0))

    def _measure(self) -> None:
        reading = self._clock.read()
        least = 0.0
        for look in reversed(self._looks):
            look.age = max(look.age, least)
            look.measure(self._clock.name, reading)
            least = look.age

    def _keep_names(self, names: Mapping[str, str]) -> None:
        for look in self._looks:
            look.names = {name: held for name, held in look.names.items() if names.get(name) == held}

    def _thin_out(self) -> None:
        """Few of the older ones are needed: garbage waits at most a quarter longer than it must."""
        place = 1
        while place < len(self._looks) - 1:
            older, look, younger = self._looks[place - 1 : place + 2]
            if older.age <= _SPREAD * younger.age:
                younger.names |= look.names
                del self._looks[place]
            else:
                place += 1


def held(infos: Sequence[ObjectInfo]) -> str:
    """What a directory holds, in few words: other words when somebody wrote to it."""
    newest = max((info.modified.isoformat() for info in infos), default="")
    return f"{len(infos)} files, {sum(info.size for info in infos)} bytes, {newest}"


def unseen(age: timedelta, needed: timedelta) -> str:
    """Why something stays that no look of the needed age has seen."""
    since = f"{_rounded(age)} ago" if age >= timedelta(seconds=1) else "by this collection"
    return f"first seen {since}; goes in a collection {_rounded(needed - age)} from now or later"


def _rounded(span: timedelta) -> timedelta:
    return timedelta(seconds=math.ceil(span.total_seconds()))


def _plain(look: _Look) -> dict[str, Any]:
    return {**asdict(look.extent), "names": look.names, "age": look.age, "made_by": look.made_by}


def _parsed(stored: Mapping[str, Any]) -> _Look:
    extent = Extent(*(int(stored[name]) for name in ("covered", "version", "compacted")))
    names = {str(name): str(held) for name, held in stored["names"].items()}
    made_by = {str(clock): float(reading) for clock, reading in stored["made_by"].items()}
    age = float(stored["age"])
    if not all(map(math.isfinite, (age, *made_by.values()))):
        raise ValueError(f"a look of age {age} with readings {made_by}")
    return _Look(extent, names, age, made_by)
