"""Memory, threads, handles and disk stay flat in an hour of mixed work (LANCEWAL_ENDURANCE_MINUTES)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.endurance.run import Endurance
from tests.report import store

_MINUTES = float(os.environ.get("LANCEWAL_ENDURANCE_MINUTES", "60"))


@pytest.mark.soak
@pytest.mark.timeout(3 * 60 * _MINUTES + 600)
def test_an_hour_of_mixed_work_takes_no_more_than_its_first_minutes(tmp_path: Path) -> None:
    endurance = Endurance(str(tmp_path / "table"), _MINUTES * 60)
    endurance.run()
    store("endurance", endurance.report())
    growth = endurance.growth()
    assert max(growth.values()) < 1.25, growth
