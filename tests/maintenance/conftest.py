"""What tests of several kinds of maintenance share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lancewal.maintenance import at_crash_points
from tests.maintenance.support import Site, three_generations


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Three flushed generations, of which nothing is compacted."""
    return three_generations(tmp_path / "table")


@pytest.fixture
def at_point() -> Iterator[Callable[[str, Callable[[], object]], None]]:
    """Run something once, when a point is reached for the first time."""

    def install(point: str, action: Callable[[], object]) -> None:
        def hook(reached: str) -> None:
            if reached == point:
                at_crash_points(None)
                action()

        at_crash_points(hook)

    yield install
    at_crash_points(None)
