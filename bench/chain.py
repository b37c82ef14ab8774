"""Where the round trips of a compaction go: ``python -m bench.chain`` lists its longest chain of requests.

Each request of the chain is shown with the call of pylance that made it: those are a floor, because pylance
makes them one after the other and offers no other way. ``--write`` stores the sums and writes them to
``docs/cost.md``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import lance
from lance.dataset import DatasetOptimizer, LanceStats, MergeInsertBuilder
from lance.optimize import Compaction, CompactionTask

from bench.far import FarStorage
from bench.operations import OPERATIONS, Lab, Operation
from bench.proxy import Recording, Request

STORED = Path(__file__).parent / "compaction_chain.json"
OURS = "lancewal"
#: Well above what a busy machine takes between two requests.
LATENCY = 0.120
TRIES = 3
#: The calls of pylance that a compaction makes, as a reader of its code would name them.
_CALLS: Sequence[tuple[Any, str, str]] = (
    (lance, "dataset", "lance.dataset"),
    (lance.LanceDataset, "checkout_latest", "checkout_latest"),
    (MergeInsertBuilder, "execute", "merge_insert.execute"),
    (DatasetOptimizer, "optimize_indices", "optimize_indices"),
    (LanceStats, "index_stats", "index_stats"),
    (lance.LanceDataset, "get_ivf_model", "get_ivf_model"),
    (DatasetOptimizer, "compact_files", "compact_files"),
    (CompactionTask, "execute", "CompactionTask.execute"),
    (Compaction, "commit", "Compaction.commit"),
)


@dataclass
class Calls:
    """When each call of pylance began and ended, by the clock of the proxy."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def noted(self) -> Iterator[None]:
        with ExitStack() as patches:
            for owner, attribute, name in _CALLS:
                patches.enter_context(
                    mock.patch.object(owner, attribute, self._timed(getattr(owner, attribute), name))
                )
            yield

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*arguments, **named)
            finally:
                self.spans.append((name, began, time.monotonic()))

        return timed

    def of(self, request: Request) -> str:
        """The call that a request belongs to; ours where there is none."""
        if "/_mem_wal/_lancewal/" in request.path or "/manifest/" in request.path:
            return OURS
        inside = [
            (began, name)
            for name, began, ended in self.spans
            if began <= request.began and request.began < ended
        ]
        return max(inside)[1] if inside else OURS


@dataclass(frozen=True)
class Link:
    """One request of a chain, and who made it."""

    request: Request
    by: str


def longest_chain(requests: Sequence[Request], calls: Calls) -> list[Link]:
    """Of the longest chains the one that changes least between callers: others happened to run beside it."""
    links = [Link(request, calls.of(request)) for request in sorted(requests, key=lambda each: each.began)]
    depths: list[int] = []
    before: list[int | None] = []
    for place, link in enumerate(links):
        earlier = [i for i in range(place) if links[i].request.ended <= link.request.began]
        deepest = max((depths[i] for i in earlier), default=0)
        depths.append(deepest + 1)
        candidates = [i for i in earlier if depths[i] == deepest]
        candidates.sort(key=lambda i: (links[i].by == link.by, links[i].by == OURS, links[i].request.ended))
        before.append(candidates[-1] if candidates else None)
    last = max(range(len(links)), key=lambda i: (depths[i], links[i].request.ended), default=None)
    chain = []
    while last is not None:
        chain.append(links[last])
        last = before[last]
    return chain[::-1]


def traced(lab: Lab, prepare: Callable[[Lab], Callable[[], object]], tries: int = TRIES) -> list[Link]:
    """The shortest of some tries: other work on the machine only adds."""
    best: list[Link] | None = None
    for _ in range(tries):
        call, calls = prepare(lab), Calls()
        lab.far.proxy.set(latency=LATENCY)
        recording = Recording()
        try:
            with calls.noted(), lab.far.proxy.recording() as recording:
                call()
        finally:
            lab.far.proxy.set(latency=0.0)
        chain = longest_chain(recording.requests, calls)
        best = chain if best is None or len(chain) < len(best) else best
    assert best is not None
    return best


def summed(chain: Sequence[Link]) -> list[tuple[str, int]]:
    """Round trips by caller, in the order of the chain."""
    return [(by, len(list(run))) for by, run in groupby(link.by for link in chain)]


# ---------------------------------------------------------------------- the page


def table(chains: Mapping[str, Sequence[Sequence[Any]]]) -> list[str]:
    lines = ["| operation | round trips | in this order |", "|---|--:|---|"]
    for name, parts in chains.items():
        total = sum(number for _, number in parts)
        in_order = ", ".join(f"{number} {by if by == OURS else f'`{by}`'}" for by, number in parts)
        lines.append(f"| {name} | {total} | {in_order} |")
    return lines


def stored() -> Mapping[str, Sequence[Sequence[Any]]]:
    found: Mapping[str, Sequence[Sequence[Any]]] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def _compactions() -> list[Operation]:
    return [each for each in OPERATIONS if each.name.startswith("compact ")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.chain", description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the sums and write docs/cost.md")
    options = parser.parse_args(arguments)
    sums: dict[str, list[tuple[str, int]]] = {}
    with FarStorage() as far, Lab(far) as lab:
        for operation in _compactions():
            for suffix, prepare in (("", operation.prepare), (", plain Lance", operation.peer)):
                if prepare is None:
                    continue
                chain = traced(lab, prepare)
                sums[operation.name + suffix] = summed(chain)
                print(f"\n{operation.name}{suffix}")
                for depth, link in enumerate(chain, 1):
                    path = link.request.path.split("/table", 1)[-1]
                    print(f"  {depth:3} {link.by:24} {link.request.kind:5} {path[:90]}")
    if options.write:
        lines = [f"  {json.dumps(name)}: {json.dumps(parts)}" for name, parts in sums.items()]
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        from bench.requests import PAGE, with_tables

        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
