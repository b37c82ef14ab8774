"""What most commands are run on."""

from __future__ import annotations

from pathlib import Path

import pytest

import lancewal
from tests.cli.support import new_table


@pytest.fixture
def table(tmp_path: Path) -> lancewal.Table:
    """Ids 0 to 9 in the base."""
    return new_table(tmp_path / "t", 10)
