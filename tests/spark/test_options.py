from __future__ import annotations

from uuid import UUID

import pytest

from lancewal.errors import InvalidInputError
from lancewal.spark.options import Options

SHARD = "02c4dbd5-02e0-5e2a-b6a4-86ca43ae2e65"


def test_names_are_found_whatever_their_case() -> None:
    options = Options.parse(
        {"path": "/t", "PrimaryKey": "a, b", "numbuckets": "4", "createIfMissing": "TRUE"}
    )
    assert options.uri == "/t"
    assert options.names("primaryKey") == ["a", "b"]
    assert options.number("numBuckets") == 4
    assert options.flag("createIfMissing")


def test_storage_options_are_passed_through_with_and_without_their_prefix() -> None:
    given = {"path": "s3://b/t", "storage.endpoint": "http://x", "aws_region": "eu", "allow_http": "true"}
    assert Options.parse(given).storage == {"endpoint": "http://x", "aws_region": "eu", "allow_http": "true"}


def test_a_misspelt_option_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidInputError, match="did you mean primaryKey"):
        Options.parse({"path": "/t", "primarykeys": "id"})


@pytest.mark.parametrize("name", ["version", "timestampAsOf"])
def test_time_travel_to_any_moment_is_refused_with_what_works(name: str) -> None:
    with pytest.raises(InvalidInputError, match="versionAsOf=NAME"):
        Options.parse({"path": "/t", name: "3"})


def test_what_spark_adds_itself_is_no_option_of_the_table() -> None:
    assert Options.parse({"path": "/t", "checkpointLocation": "/c"}).values == {"path": "/t"}


def test_parsing_again_what_was_parsed_changes_nothing() -> None:
    once = Options.parse({"path": "/t", "storage.region": "x", "txnAppId": "a"})
    assert Options.parse(once.values) == once


def test_names_with_commas_are_written_as_json() -> None:
    assert Options.parse({"path": "/t", "columns": '["a,b", "c"]'}).names("columns") == ["a,b", "c"]


def test_positions_are_words_or_a_map() -> None:
    def position(text: str) -> object:
        return Options.parse({"path": "/t", "startingPosition": text}).position("startingPosition", "latest")

    assert position("Earliest") == "earliest"
    assert position(f'{{"{SHARD}": 7}}') == {UUID(SHARD): 7}
    assert position(f'{{"positions": {{"{SHARD}": 7}}}}') == {UUID(SHARD): 7}, "a query's offset"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("startingPosition", "yesterday"),
        ("startingPosition", "[1]"),
        ("startingPosition", '{"no shard": 1}'),
        ("startingPosition", f'{{"{SHARD}": 0}}'),
        ("startingPosition", f'{{"{SHARD}": true}}'),
        ("numBuckets", "0"),
        ("numBuckets", "many"),
        ("createIfMissing", "yes"),
        ("columns", "[1]"),
        ("vectorDimensions", "v"),
        ("vectorDimensions", "v:0"),
    ],
)
def test_values_that_mean_nothing_are_refused(name: str, value: str) -> None:
    options = Options.parse({"path": "/t", name: value})
    with pytest.raises(InvalidInputError, match=name):
        {
            "startingPosition": lambda: options.position(name, "latest"),
            "numBuckets": lambda: options.number(name),
            "createIfMissing": lambda: options.flag(name),
            "columns": lambda: options.names(name),
            "vectorDimensions": options.dimensions,
        }[name]()


def test_a_table_needs_a_place() -> None:
    with pytest.raises(InvalidInputError, match="place"):
        _ = Options.parse({}).uri
