"""What the guarantees say about a history of writes and reads, whatever order the world ran them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: Keys that every put writes: of one shard, so that one snapshot shows the same put in both.
REGISTERS = (0, 1)
#: The key that a put alone writes is this above its number.
OWN = 100


class BrokenError(AssertionError):
    """A guarantee does not hold."""


@dataclass
class Put:
    """One put of the registers and of a row of its own; the times are steps of the world."""

    number: int
    began: int
    #: When it was acknowledged; ``None`` while nobody knows whether it happened.
    acknowledged: int | None = None
    #: It was refused, and did not happen.
    refused: bool = False
    #: It was written again, without an id, by a writer that came back: the log may have it twice.
    is_repeated: bool = False


@dataclass
class Delete:
    """Of the row that a put alone wrote; nobody writes that row again."""

    put: int
    acknowledged: bool = False


@dataclass
class Seen:
    """What one reader was shown so far."""

    shown: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()


@dataclass
class History:
    """All writes of a world, and what was read."""

    #: Tables without a key have no registers, and show a row as often as it was put.
    has_key: bool = True
    puts: dict[int, Put] = field(default_factory=dict)
    deletes: dict[int, Delete] = field(default_factory=dict)
    reads: int = 0
    fed: int = 0
    #: Raised whenever more must be there, or must not.
    version: int = 0
    #: The puts that the last read showed.
    shown: frozenset[int] = frozenset()

    def begin(self, step: int) -> Put:
        put = Put(len(self.puts) + 1, step)
        self.puts[put.number] = put
        return put

    def acknowledge(self, put: Put, step: int) -> None:
        put.acknowledged = step
        self.version += 1

    def acknowledge_delete(self, delete: Delete) -> None:
        delete.acknowledged = True
        self.version += 1

    def begin_delete(self, put: int) -> Delete:
        return self.deletes.setdefault(put, Delete(put))

    def acknowledged(self) -> frozenset[int]:
        """What must be there, whatever goes on."""
        return frozenset(
            number
            for number, put in self.puts.items()
            if put.acknowledged is not None and number not in self.deletes
        )

    def deleted(self) -> frozenset[int]:
        """What must not be there any more."""
        return frozenset(number for number, delete in self.deletes.items() if delete.acknowledged)

    def check(
        self,
        rows: Iterable[tuple[int, int]],
        must_show: frozenset[int],
        must_hide: frozenset[int] = frozenset(),
    ) -> frozenset[int]:
        """Check what a read found, which began when ``must_show`` was there; the puts that it shows."""
        self.reads += 1
        found = list(rows)
        values = dict(found)
        if len(values) < len(found):
            raise BrokenError(f"a key is there twice: {sorted(found)}")
        shown = frozenset(key - OWN for key in values if key >= OWN)
        if missing := sorted(must_show - shown - self.deletes.keys()):
            raise BrokenError(f"rows of puts {missing} are lost; {sorted(shown)} are there")
        if back := sorted(must_hide & shown):
            raise BrokenError(f"rows of puts {back} were deleted, and are there")
        for number in shown:
            self._check_origin(number, values[OWN + number])
        if self.has_key:
            self._check_registers(values, shown)
        self.shown = shown
        return shown

    def check_reader(self, rows: Iterable[tuple[int, int]], seen: Seen, must: Seen) -> Seen:
        """The same for a reader that was shown something before, and must not be shown less."""
        shown = self.check(rows, seen.shown | must.shown, seen.gone | must.gone)
        return Seen(shown, seen.gone | must.gone | (seen.shown - shown))

    def now(self) -> Seen:
        """What whoever begins to read now must be shown, and must not."""
        return Seen(self.acknowledged(), self.deleted())

    def _check_origin(self, number: int, value: int) -> None:
        put = self.puts.get(number)
        if put is None or value != number:
            raise BrokenError(f"a row that nobody put: {number}")
        if put.refused:
            raise BrokenError(f"put {number} was refused, and its row is there")

    def _check_registers(self, values: Mapping[int, int], shown: frozenset[int]) -> None:
        one, other = (values.get(key) for key in REGISTERS)
        if one != other:
            raise BrokenError(f"half a put is there: the registers are {one} and {other}")
        if one is None:
            if shown:
                raise BrokenError(f"half a put is there: rows of {sorted(shown)} without their registers")
            return
        if one not in shown and one not in self.deletes:
            raise BrokenError(f"half a put is there: the registers are of {one}, its row is missing")
        ended = self.puts[one].acknowledged
        for number in shown:
            if ended is not None and ended < self.puts[number].began:
                raise BrokenError(f"put {number} came after put {one}, and the registers are of {one}")

    def check_feed(self, changes: Sequence[tuple[int, int | None]], must_show: frozenset[int]) -> None:
        """Check all changes that a follower got from the beginning of the log, keys with values or ``None``.

        Each put once and whole, acknowledged ones all of them, in the order in which they were put.
        """
        self.fed += 1
        order: list[int] = []
        place = 0
        while place < len(changes):
            _, value = changes[place]
            if value is None:
                place += 1
                continue
            number = value
            whole = {*REGISTERS, OWN + number} if self.has_key else {OWN + number}
            width = len(whole)
            group = changes[place : place + width]
            if {each for each, _ in group} != whole or {each for _, each in group} != {number}:
                raise BrokenError(f"the feed has half of put {number}: {group}")
            self._check_origin(number, number)
            order.append(number)
            place += width
        if any(order.count(number) > 1 and not self.puts[number].is_repeated for number in set(order)):
            raise BrokenError(f"the feed has a put twice: {order}")
        if missing := sorted(must_show - set(order)):
            raise BrokenError(f"the feed lacks puts {missing}; it has {order}")
        latest = 0
        for number in reversed(order):
            put = self.puts[number]
            if latest and put.began > latest and not put.is_repeated:
                raise BrokenError(
                    f"the feed has put {number} before one that was acknowledged earlier: {order}"
                )
            if put.acknowledged is not None:
                latest = min(latest, put.acknowledged) if latest else put.acknowledged
