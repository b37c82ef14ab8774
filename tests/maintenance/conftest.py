"""What tests of several kinds of maintenance share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lancewal.maintenance import points
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
                points.on_reached(None)
                action()

        points.on_reached(hook)

    yield install
    points.on_reached(None)
