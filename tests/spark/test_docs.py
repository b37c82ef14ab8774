"""Every block of Python in the guide runs, in the order in which it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lancewal.spark
from tests.spark.conftest import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GUIDE = ROOT / "docs" / "spark.md"


#: What the table beside other formats says of lancewal, and the tests that run it.
FEATURES = {
    "column pruning, filters, limit": [
        "test_a_query_reads_the_columns_it_names_and_no_other",
        "test_filters_limits_and_counts_are_told_to_the_table",
    ],
    "`count(*)` without reading columns": ["test_filters_limits_and_counts_are_told_to_the_table"],
    "`CREATE`, `DESCRIBE`, `DROP`": [
        "test_a_table_is_created_described_changed_merged_and_dropped",
        "test_show_create_table_said_what_create_refused",
    ],
    "`INSERT`": ["test_a_table_is_created_described_changed_merged_and_dropped"],
    "`UPDATE`, `DELETE`, `MERGE INTO`": [
        "test_a_table_is_created_described_changed_merged_and_dropped",
        "test_the_same_changes_by_calls",
    ],
    "`REPLACE`, `INSERT OVERWRITE`, `ALTER TABLE`": [
        "test_replace_dropped_a_table_before_it_made_another",
        "test_what_cannot_be_done_is_refused_for_what_it_is_and_changes_nothing",
    ],
    "`CALL` for maintenance": ["test_a_table_is_created_described_changed_merged_and_dropped"],
    "exactly-once streaming sink": ["test_a_stream_lands_exactly_once_while_tasks_and_commits_die"],
    "change feed as a stream": ["test_a_stream_is_applied_to_another_table_which_ends_up_the_same"],
    "change feed of some shards, changes or keys": [
        "test_a_feed_of_some_shards_or_some_changes_leaves_the_others_out",
        "test_a_feed_of_a_range_of_keys_reads_the_shards_that_can_hold_them",
    ],
    "change feed with the values before a change": [],
    "events in the order of a sequence, across micro-batches": [
        "test_an_event_that_comes_late_loses_in_a_later_micro_batch_too"
    ],
    "batches of a `foreachBatch` once each": [
        "test_one_query_fills_two_tables_each_micro_batch_once",
        "test_the_same_transaction_is_written_once_and_another_application_is_not_affected",
    ],
    "flush, compaction, collection, checks, upkeep, backup as jobs": [
        "test_rows_go_all_the_way_to_the_base_table_and_the_rest_is_collected",
        "test_a_verification_finds_what_is_wrong_in_a_shard_and_between_shards",
        "test_a_table_with_many_sstables_and_an_old_log_is_in_shape_afterwards",
        "test_a_table_is_backed_up_beside_its_writer_and_restored",
    ],
    "what executors lack is told": [
        "test_workers_have_environments_of_their_own_and_the_doctor_names_the_one_that_lacks_lancewal",
        "test_each_problem_is_named_with_its_executor",
    ],
    "rows readable by others before a commit to the table": [
        "test_each_reads_what_the_other_has_just_written_and_pylance_both"
    ],
    "writers beside Spark are not stopped": [
        "test_changes_beside_a_live_writer_go_through_it_and_do_not_fence_it",
        "test_a_write_lands_once_between_what_the_owner_took_before_and_after",
    ],
    "vector search for a DataFrame of queries": ["test_the_nearest_rows_are_those_of_an_exact_model"],
    "full-text search for a DataFrame of queries": ["test_words_are_scored_against_the_whole_table"],
}


def test_every_cell_of_ours_names_the_files_of_tests_that_run_it() -> None:
    _, _, rest = GUIDE.read_text().partition("## Beside other table formats")
    lines = [line.split("|") for line in rest.split("\n## ")[0].splitlines() if line.startswith("|")][2:]
    cells = {line[1].strip(): line[2].strip() for line in lines}
    assert list(cells) == list(FEATURES)
    for feature, cell in cells.items():
        files = {name: (GUIDE.parents[1] / f"tests/spark/{name}.py").read_text() for name in named_in(cell)}
        assert bool(files) == (cell != "no"), feature
        for test in FEATURES[feature]:
            assert any(f"def {test}(" in text for text in files.values()), f"{feature}: {test}"
        for name, text in files.items():
            assert any(f"def {test}(" in text for test in FEATURES[feature]), f"{feature}: none of {name}"


def named_in(cell: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", cell)


def test_the_guide_runs(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Relative paths are the guide's alone; Spark's own begin where the session was started.
    place = f"{tmp_path}/"
    monkeypatch.setattr(lancewal.spark, "session", lambda *args, **kwargs: spark)
    namespace: dict[str, Any] = {}
    # What the page itself says is not run is run by the test that it names.
    blocks = re.findall(r"(?<! -->\n)```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for number, block in enumerate(blocks):
        code = re.sub(
            r'(["\'`])(?:\./)?(documents|replica|checkpoints/|incoming|in-sql)', rf"\1{place}\2", block
        )
        code = code.replace(f"'{place}documents-from-json'", "'documents-from-json'")
        exec(compile(code, f"{GUIDE.name} block {number}", "exec"), namespace)
    assert len(blocks) >= 12
    found = {
        row.id: row.text
        for row in namespace["documents"]
        .sparkSession.read.format("lancewal")
        .load(f"{place}documents")
        .collect()
    }
    assert found == {2: "two", 3: "three", 4: "four", 5: "five"}
    replica = spark.read.format("lancewal").load(f"{place}replica")
    assert {row.id for row in replica.collect()} == set(found)
