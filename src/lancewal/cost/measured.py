"""The requests of every operation, counted in front of an S3 server.

``python -m bench.requests --write`` in a source checkout writes ``requests.json``. A test counts the requests
again and fails if an operation needs more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

#: Requests that S3 does not charge for.
FREE = frozenset({"DELETE", "DELETE MANY"})
#: The more expensive requests; all others have the price of GET.
WRITES_AND_LISTS = frozenset({"PUT", "POST", "COPY", "LIST"})


@dataclass(frozen=True)
class Measured:
    """One operation: its requests by kind, the longest chain of dependent requests, and the bytes of bodies.

    ``plain`` is the number of requests and the depth for the same operation in plain Lance, if it has one.
    """

    name: str
    shards: int
    kinds: Mapping[str, int]
    depth: int
    bytes_read: int
    bytes_written: int
    plain: tuple[int, int] | None = None

    @property
    def requests(self) -> int:
        return sum(self.kinds.values())

    def to_dict(self) -> dict[str, object]:
        document: dict[str, object] = {
            "name": self.name,
            "shards": self.shards,
            "kinds": dict(self.kinds),
            "depth": self.depth,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
        }
        return document if self.plain is None else {**document, "plain": list(self.plain)}


@lru_cache(maxsize=1)
def measured() -> Mapping[str, Measured]:
    """Every operation by name, in the order of the table in the documentation.

    >>> measured()["durable put"].kinds
    {'PUT': 1}
    """
    text = files("lancewal.cost").joinpath("requests.json").read_text("utf-8")
    found = {}
    for each in json.loads(text):
        plain = each.pop("plain", None)
        found[each["name"]] = Measured(**each, plain=None if plain is None else (plain[0], plain[1]))
    return found
