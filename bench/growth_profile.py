"""Where a point of a growth curve spends its time: ``python -m bench.growth_profile growth_shards compact``.

Without ``--size`` it is the largest point. All Python threads that the call starts are included; what
Lance's own threads do shows as time of the call that waits for them. ``--keep before`` (or ``after``)
stores the excerpt for docs/scale.md.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.context import Context
from bench.growth import Measure, growths
from bench.registry import load_workloads
from bench.scratch import scratch_directory

PROFILES = Path(__file__).parent / "results" / "profiles"
_CHECKOUT = Path(__file__).parents[1]
_ROOTS = ("/src/", "/site-packages/", "/lib/python3")
#: Where threads of ours only wait for each other.
_WAITING = ("'acquire' of '_thread.lock'", "'get' of '_queue.SimpleQueue'")


def profile(name: str, measure: str, size: int | None, top: int, quick: bool) -> str:
    """The functions that took most, with their own and their whole time in milliseconds."""
    load_workloads()
    this = growths[name]
    with scratch_directory() as scratch:
        context = Context(scratch.new_place(), quick)
        wanted = size or this.sizes_of(context)[-1]
        for reached, measures in this.steps(context, [wanted]):
            for each in measures:
                if each.name == measure:
                    if each.samples > 1:
                        _prepared(each)()
                    call = _prepared(each)
                    stats, seconds = _profiled(call)
                    head = f"{name}: {measure} at {reached:,} {this.axis}, {seconds * 1e3:,.0f} ms of CPU"
                    return "\n".join([head, *_lines(stats, top)])
        known = ", ".join(each.name for each in measures)
    raise SystemExit(f"{name} measures {known}")


def keep(text: str, name: str, measure: str, label: str) -> Path:
    """Store a profile under the curve's name; the page shows "before" and "after" together."""
    PROFILES.mkdir(parents=True, exist_ok=True)
    curve = re.sub(r"[^a-z0-9]+", "-", f"{name}-{measure}".lower())
    path = PROFILES / f"{curve}.{label}.txt"
    path.write_text(f"{label}, {text}\n", encoding="utf-8")
    return path


def _prepared(measure: Measure) -> Callable[[], object]:
    if measure.before is not None:
        measure.before()
    return measure.call


def _profiled(call: Callable[[], object]) -> tuple[pstats.Stats, float]:
    profiles = [cProfile.Profile()]

    def begin(*_: object) -> None:
        profiles.append(cProfile.Profile())
        profiles[-1].enable()

    threading.setprofile(begin)
    started = time.process_time()
    profiles[0].enable()
    try:
        call()
    finally:
        profiles[0].disable()
        threading.setprofile(None)
    seconds = time.process_time() - started
    stats = pstats.Stats(profiles[0], stream=io.StringIO())
    for other in profiles[1:]:
        other.create_stats()
        if other.getstats():
            stats.add(other)
    return stats, seconds


def _lines(stats: pstats.Stats, top: int) -> list[str]:
    table: dict[Any, Any] = stats.stats  # type: ignore[attr-defined]
    working = [each for each in table.items() if not any(wait in each[0][2] for wait in _WAITING)]
    ranked = sorted(working, key=lambda item: -item[1][2])[:top]
    lines = [f"{'own ms':>9} {'whole ms':>9} {'calls':>9}  function"]
    for (file, line, function), (_, calls, own, whole, _) in ranked:
        lines.append(f"{own * 1e3:>9,.1f} {whole * 1e3:>9,.1f} {calls:>9,}  {_shown(file, line, function)}")
    return lines


def _shown(file: str, line: int, function: str) -> str:
    if file == "~":
        return function
    place = Path(file)
    if place.is_relative_to(_CHECKOUT):
        file = str(place.relative_to(_CHECKOUT))
    for root in _ROOTS:
        if root in file:
            file = file.rsplit(root, 1)[1]
    # Wherever else it lies, the machine's directories are nobody's business.
    return f"{file if not Path(file).is_absolute() else Path(file).name}:{line} {function}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.growth_profile")
    parser.add_argument("growth", help="such as growth_shards")
    parser.add_argument("measure", help="such as compact")
    parser.add_argument("--size", type=int)
    parser.add_argument("--top", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", choices=["before", "after"])
    options = parser.parse_args()
    found = profile(options.growth, options.measure, options.size, options.top, options.quick)
    print(found)
    if options.keep:
        keep(found, options.growth, options.measure, options.keep)
