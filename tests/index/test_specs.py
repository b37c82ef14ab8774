"""Reading the base's indexes: real parameters, and what cannot be maintained."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from lancewal.errors import InvalidInputError
from lancewal.index import specs as specs_module
from lancewal.index.kinds import (
    BTreeParams,
    FullTextParams,
    IndexSpec,
    Metric,
    VectorParams,
)
from lancewal.index.specs import maintained_specs

ROWS = 300


def vectors(type_: pa.DataType, dimension: int = 8) -> pa.Array:
    numbers = np.random.default_rng(0).integers(0, 100, ROWS * dimension)
    values = pa.array(numbers.astype(type_.to_pandas_dtype()), type_)
    return pa.FixedSizeListArray.from_arrays(values, dimension)


def table() -> pa.Table:
    words = [f"the cats number {i % 9}" for i in range(ROWS)]
    return pa.table(
        {
            "id": pa.array(range(ROWS)),
            "colour": pa.array([f"c{i % 5}" for i in range(ROWS)]),
            "text": words,
            "more": words,
            "tags": pa.array([["a", "b"]] * ROWS),
            "v": vectors(pa.float32()),
            "w": vectors(pa.float32()),
            "half": vectors(pa.float16()),
            "bytes": vectors(pa.uint8()),
            "price": pa.array([None] * ROWS, pa.decimal128(10, 2)),
            "nested": pa.array([{"x": i} for i in range(ROWS)]),
        }
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    dataset = lance.write_dataset(table(), tmp_path_factory.mktemp("base") / "t")
    dataset.create_scalar_index("id", "BTREE", name="by_id")
    dataset.create_scalar_index("colour", "BITMAP", name="by_colour")
    dataset.create_scalar_index("text", "INVERTED", name="words", with_position=True)
    dataset.create_scalar_index(
        "more",
        "INVERTED",
        name="pieces",
        base_tokenizer="ngram",
        min_ngram_length=2,
        max_ngram_length=4,
        prefix_only=True,
        custom_stop_words=["cats"],
    )
    dataset.create_scalar_index("tags", "LABEL_LIST", name="labels")
    dataset.create_scalar_index("nested.x", "BTREE", name="inside")
    dataset.create_scalar_index("price", "BTREE", name="prices")
    dataset.create_index("v", "IVF_PQ", name="near", num_partitions=1, num_sub_vectors=4, metric="cosine")
    dataset.create_index(
        "w", "IVF_HNSW_SQ", name="near_w", num_partitions=1, m=13, ef_construction=77, metric="dot"
    )
    dataset.create_index("half", "IVF_FLAT", name="near_half", num_partitions=1)
    dataset.create_index("bytes", "IVF_FLAT", name="hamming", num_partitions=1, metric="hamming")
    return dataset


UNMAINTAINABLE = {"labels", "inside", "prices", "hamming"}


def named(dataset: lance.LanceDataset, name: str, **options: Any) -> IndexSpec:
    (spec,) = maintained_specs(dataset, [name], False, **options)
    assert spec.name == name
    return spec


def test_all_means_all_that_can_be_maintained_with_a_warning_for_the_rest(
    dataset: lance.LanceDataset, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        specs = maintained_specs(dataset, [], True)
    assert {spec.name for spec in specs} == {
        *("by_id", "by_colour", "words", "pieces", "near", "near_w", "near_half")
    }
    assert {name for name in UNMAINTAINABLE if f"'{name}'" in caplog.text} == UNMAINTAINABLE


@pytest.mark.parametrize("name", sorted(UNMAINTAINABLE))
def test_an_index_asked_for_by_name_that_cannot_be_maintained_is_refused(
    dataset: lance.LanceDataset, name: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"'{name}'.*cannot be maintained"):
        maintained_specs(dataset, ["by_id", name], False)


def test_an_index_that_does_not_exist_is_refused(dataset: lance.LanceDataset) -> None:
    with pytest.raises(InvalidInputError, match="'nowhere'"):
        maintained_specs(dataset, ["nowhere"], False)


def test_none_means_none(dataset: lance.LanceDataset) -> None:
    assert maintained_specs(dataset, [], False) == []


def test_columns_and_field_ids_are_those_of_the_base(dataset: lance.LanceDataset) -> None:
    assert named(dataset, "by_id") == IndexSpec("by_id", "id", 0, BTreeParams())
    bitmap = named(dataset, "by_colour")
    assert (bitmap.column, bitmap.field_id, bitmap.params) == ("colour", 1, BTreeParams())


def test_tokenizer_settings_are_those_of_the_base(dataset: lance.LanceDataset) -> None:
    assert named(dataset, "words").params == FullTextParams(with_position=True)
    assert named(dataset, "pieces").params == FullTextParams(
        base_tokenizer="ngram",
        min_ngram_length=2,
        max_ngram_length=4,
        prefix_only=True,
        stem=False,
        remove_stop_words=False,
        custom_stop_words=("cats",),
    )


def test_metrics_and_graph_parameters_are_those_of_the_base(dataset: lance.LanceDataset) -> None:
    assert named(dataset, "near").params == VectorParams(8, Metric.COSINE)
    assert named(dataset, "near_w").params == VectorParams(8, Metric.DOT, m=13, ef_construction=77)
    assert named(dataset, "near_half").params == VectorParams(8, Metric.L2)


def test_the_tables_stored_overrides_win(dataset: lance.LanceDataset, tmp_path: Path) -> None:
    copy = lance.write_dataset(dataset.to_table(columns=["id", "v"]), tmp_path / "t")
    copy.create_index("v", "IVF_FLAT", name="near", num_partitions=1)
    copy.initialize_mem_wal(unsharded=True, hnsw_params={"near": {"num_edges": 9, "ef_construction": 55}})
    details = copy.mem_wal_index_details()
    specs = maintained_specs(copy, [], details["maintain_all_indexes"], details["writer_config_defaults"])
    assert [spec.params for spec in specs] == [VectorParams(8, Metric.L2, m=9, ef_construction=55)]
    for bad in ("many", "0"):
        with pytest.raises(InvalidInputError, match="near"):
            named(copy, "near", writer_defaults={"hnsw.near.num_edges": bad})


def test_indexes_of_an_empty_table_have_their_parameters(tmp_path: Path) -> None:
    dataset = lance.write_dataset(table().schema.empty_table(), tmp_path / "t")
    dataset.create_scalar_index("text", "INVERTED", name="words", language="German", stem=False)
    dataset.create_index("v", "IVF_PQ", name="near", num_partitions=1, num_sub_vectors=4, metric="cosine")
    assert named(dataset, "words").params == FullTextParams(language="German", stem=False)
    assert named(dataset, "near").params == VectorParams(8, Metric.COSINE)


def test_a_tokenizer_that_does_not_work_here_does_not_make_the_table_unwritable(
    dataset: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing_model(params: FullTextParams) -> None:
        raise OSError("language model not found")

    monkeypatch.setattr(specs_module, "Tokenizer", missing_model)
    names = {spec.name for spec in maintained_specs(dataset, [], True)}
    assert "by_id" in names
    assert "words" not in names
    assert "language model not found" in caplog.text


def test_specs_travel_between_processes(dataset: lance.LanceDataset) -> None:
    specs = maintained_specs(dataset, [], True)
    assert pickle.loads(pickle.dumps(specs)) == specs
