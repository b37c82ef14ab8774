"""What the guarantees say about a history of puts and reads, whatever order the world ran them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


@dataclass
class History:
    """All puts of a world, and what was read."""

    puts: dict[int, Put] = field(default_factory=dict)
    reads: int = 0

    def begin(self, step: int) -> Put:
        put = Put(len(self.puts) + 1, step)
        self.puts[put.number] = put
        return put

    def acknowledged(self) -> frozenset[int]:
        return frozenset(number for number, put in self.puts.items() if put.acknowledged is not None)

    def check(self, rows: Iterable[tuple[int, int]], must_show: frozenset[int]) -> frozenset[int]:
        """Check what a read found, which began when ``must_show`` was there; the puts that it shows."""
        self.reads += 1
        found = list(rows)
        values = dict(found)
        if len(values) < len(found):
            raise BrokenError(f"a key is there twice: {sorted(found)}")
        shown = frozenset(key - OWN for key in values if key >= OWN)
        if missing := sorted(must_show - shown):
            raise BrokenError(f"rows of puts {missing} are lost; {sorted(shown)} are there")
        for number in shown:
            put = self.puts.get(number)
            if put is None or values[OWN + number] != number:
                raise BrokenError(f"a row that nobody put: {number}")
            if put.refused:
                raise BrokenError(f"put {number} was refused, and its row is there")
        self._check_registers(values, shown)
        return shown

    def _check_registers(self, values: Mapping[int, int], shown: frozenset[int]) -> None:
        one, other = (values.get(key) for key in REGISTERS)
        if one != other:
            raise BrokenError(f"half a put is there: the registers are {one} and {other}")
        if one is None:
            if shown:
                raise BrokenError(f"half a put is there: rows of {sorted(shown)} without their registers")
            return
        if one not in shown:
            raise BrokenError(f"half a put is there: the registers are of {one}, its row is missing")
        ended = self.puts[one].acknowledged
        for number in shown:
            if ended is not None and ended < self.puts[number].began:
                raise BrokenError(f"put {number} came after put {one}, and the registers are of {one}")
