"""Whatever happens to a table, every read gives what a dictionary would."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import TableMachine
from tests.model.table_model import NO_KEYS, NUMBER_KEYS, PAIR_KEYS


class NumberKeyMachine(TableMachine):
    keys = NUMBER_KEYS


class PairKeyMachine(TableMachine):
    keys = PAIR_KEYS


class AppendOnlyMachine(TableMachine):
    """Without a key every row counts: one that is read twice or not at all shows."""

    keys = NO_KEYS
    append_only = True


_SHARED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}


# An example that fails is made small for up to five minutes; what came of it should be seen.
@pytest.mark.parametrize(
    ("machine", "examples"),
    [(NumberKeyMachine, 12), (PairKeyMachine, 7), (AppendOnlyMachine, 7)],
)
def test_reads_equal_a_dictionary_after_every_step(machine: type[TableMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=20, **_SHARED)
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [NumberKeyMachine, PairKeyMachine, AppendOnlyMachine])
def test_reads_equal_a_dictionary_after_every_step_of_many(machine: type[TableMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=250, stateful_step_count=50, **_SHARED))
