"""What tests of a shard's log and manifest share."""

from __future__ import annotations

import pytest

from lancewal.storage import ObjectStore
from tests.faults import FaultyStore
from tests.shard.support import ManualClock


@pytest.fixture
def faulty(memory_store: ObjectStore) -> FaultyStore:
    return FaultyStore(memory_store)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
