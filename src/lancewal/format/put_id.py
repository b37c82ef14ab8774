"""Put ids, which identify a put that is sent again, and their form in WAL entries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lancewal.errors import InvalidInputError

#: The tag of a WAL entry that holds the ids of its puts.
PUT_IDS_TAG = "puts"

_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class PutId:
    """The id of one put of one client.

    ``session`` is the client's random name. ``number`` counts its puts from 1. Numbers up to
    ``settled`` are never sent again.

    >>> PutId("a1b2", 3, settled=2)
    PutId(session='a1b2', number=3, settled=2)
    """

    session: str
    number: int
    settled: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.session, str) and _SESSION.fullmatch(self.session)):
            raise InvalidInputError(
                f"the session of a put id is {str(self.session)[:80]!r}; it takes 1 to 64 letters, digits, - "
                "and _"
            )
        if type(self.number) is not int or type(self.settled) is not int:
            raise InvalidInputError(
                f"a put id counts in whole numbers, got number {self.number!r} and settled {self.settled!r}"
            )
        if not 0 <= self.settled < self.number < 1 << 63:
            raise InvalidInputError(
                f"a put id counts from 1 and above what is settled, got number {self.number} and settled "
                f"{self.settled}"
            )


def check_put_id(put_id: object) -> None:
    """Refuse what is no put id, before anything is done for the put."""
    if not (put_id is None or isinstance(put_id, PutId)):
        raise InvalidInputError(f"put_id is {put_id!r}; pass a lancewal.PutId")


def put_ids_tag(ids: Iterable[PutId]) -> str:
    """Encode ids for the tag of an entry.

    >>> put_ids_tag([PutId("a", 3, 2), PutId("b", 1)])
    'a:3:2 b:1:0'
    """
    return " ".join([f"{each.session}:{each.number}:{each.settled}" for each in ids])


def put_ids_of(text: str) -> Iterator[PutId]:
    """Decode the ids of an entry's tag, in the order of its puts; skips text that is not an id.

    >>> list(put_ids_of("a:3:2 damaged b:1:0"))
    [PutId(session='a', number=3, settled=2), PutId(session='b', number=1, settled=0)]
    """
    for part in text.split():
        session, _, numbers = part.partition(":")
        number, _, settled = numbers.partition(":")
        if number.isdecimal() and settled.isdecimal() and len(part) <= 128:
            try:
                yield PutId(session, int(number), int(settled))
            except InvalidInputError:
                continue
