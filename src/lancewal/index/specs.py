"""The indexes of the base table that MemTables maintain, with the base's parameters."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileReader

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, StorageError
from lancewal.index.btree import is_supported as is_ordered
from lancewal.index.exact import is_vector
from lancewal.index.full_text import is_text
from lancewal.index.kinds import (
    BTreeParams,
    FullTextParams,
    IndexSpec,
    Metric,
    VectorParams,
)
from lancewal.index.tokens import Tokenizer
from lancewal.storage import layout

logger = logging.getLogger(__name__)

#: Index types that answer equality, sets, ranges or nulls of one column; in memory a BTree replaces them all.
_ORDERED_TYPES = frozenset(["BTree", "Bitmap", "ZoneMap", "BloomFilter"])
_FULL_TEXT_TYPE = "Inverted"
_VECTOR_PREFIX = "IVF_"
_SYSTEM_PREFIX = "__lance"
_WHOLE_ROW = "row"
_INDEXES_DIR = "_indices"
_FULL_TEXT_METADATA = "metadata.lance"


def maintained_specs(
    dataset: lance.LanceDataset,
    maintained: Sequence[str],
    maintain_all: bool,
    writer_defaults: Mapping[str, str] | None = None,
    *,
    strict: bool = True,
) -> list[IndexSpec]:
    """The indexes that writers of this table maintain in memory.

    ``writer_defaults`` is the table's persisted writer configuration; only
    ``hnsw.<index>.num_edges`` and ``hnsw.<index>.ef_construction`` are used here.

    With ``maintain_all`` an index that cannot be maintained is left out with a warning: the table
    must stay writable, and searches work without it. An index in ``maintained`` is refused if it
    cannot be maintained or does not exist. Without ``strict`` it is left out too, because an index whose
    name the table stores may have been dropped since.
    """
    with lance_errors("read the indexes of the table"):
        found = list(dataset.describe_indices())
    existing = {each.name: each for each in found if not each.name.startswith(_SYSTEM_PREFIX)}
    specs = []
    for name in existing if maintain_all else dict.fromkeys(maintained):
        try:
            if name not in existing:
                raise InvalidInputError(f"the table has no index named {name!r}; it has {sorted(existing)}")
            specs.append(_spec(dataset, existing[name], writer_defaults or {}))
        except InvalidInputError as error:
            if strict and not maintain_all:
                raise
            logger.warning("%s; it is not maintained in memory, searches there go without it", error)
    return specs


def _spec(dataset: lance.LanceDataset, description: Any, writer_defaults: Mapping[str, str]) -> IndexSpec:
    name, base_type = str(description.name), str(description.index_type)

    def refuse(reason: str) -> InvalidInputError:
        return InvalidInputError(f"index {name!r} ({base_type}) cannot be maintained while writing: {reason}")

    if len(description.fields) != 1:
        raise refuse("it is not an index of one column")
    column = str(description.field_names[0])
    if column not in dataset.schema.names:
        raise refuse(f"{column!r} is not a top-level column")
    type_ = dataset.schema.field(column).type
    details = dict(description.details)
    params: BTreeParams | FullTextParams | VectorParams
    if base_type in _ORDERED_TYPES:
        if not is_ordered(type_):
            raise refuse(f"values of type {type_} are not supported")
        params = BTreeParams()
    elif base_type == _FULL_TEXT_TYPE:
        if not is_text(type_):
            raise refuse(f"columns of type {type_} are not supported, only text")
        if details.get("document_granularity", _WHOLE_ROW) != _WHOLE_ROW:
            raise refuse("its documents are not whole rows")
        try:
            with lance_errors(f"use the tokenizer of index {name!r}"):
                params = _full_text_params(dataset, description)
                Tokenizer(params)
        except Exception as error:  # pylance raises many kinds, for example for a missing language model
            raise refuse(f"its tokenizer does not work here: {error.__cause__ or error}") from error
    elif base_type.startswith(_VECTOR_PREFIX):
        if not is_vector(type_):
            raise refuse(f"columns of type {type_} are not supported, only float vectors of one size")
        metric = str(details.get("metric_type", "")).lower()
        if metric not in [known.value for known in Metric]:
            raise refuse(f"the metric {metric!r} is not supported")
        params = _vector_params(name, type_, Metric(metric), details, writer_defaults)
    else:
        raise refuse("this kind of index is not supported")
    return IndexSpec(name, column, int(description.fields[0]), params)


def full_text_params(dataset: lance.LanceDataset, column: str) -> FullTextParams | None:
    """The tokenizer settings of the column's full-text index; ``None`` if none works here."""
    for description in dataset.describe_indices():
        if str(description.index_type) == _FULL_TEXT_TYPE and list(description.field_names) == [column]:
            try:
                return _full_text_params(dataset, description)
            except TypeError:
                continue
    return None


def _full_text_params(dataset: lance.LanceDataset, description: Any) -> FullTextParams:
    # The description lacks custom stop words, which the index stores in a file.
    details = {**description.details, **_stored_params(dataset, description)}
    stop_words = details.get("custom_stop_words")
    details["custom_stop_words"] = None if stop_words is None else tuple(stop_words)
    known = FullTextParams.__dataclass_fields__
    return FullTextParams(**{key: value for key, value in details.items() if key in known})


def _stored_params(dataset: lance.LanceDataset, description: Any) -> Mapping[str, Any]:
    """The settings that a full-text index stores; empty if the index has no segment yet.

    Lance's statistics have them too, but Lance loads the whole index for that, file after file.
    """
    segments = list(description.segments)
    if not segments:
        return {}
    # All segments have the same settings: Lance copies those of the first.
    file = layout.child_uri(dataset.uri, f"{_INDEXES_DIR}/{segments[-1].uuid}/{_FULL_TEXT_METADATA}")
    try:
        with lance_errors(f"read the settings of index {description.name!r}"):
            metadata = LanceFileReader(file, dataset._storage_options).metadata().schema.metadata or {}
        stored = json.loads(metadata[b"params"])
    except (StorageError, KeyError, ValueError):
        # The file is elsewhere, as in a shallow clone, or has the format of an earlier release.
        statistics = dataset.stats.index_stats(str(description.name))
        stored = {}
        for segment in statistics["indices"]:
            stored.update(segment.get("params", {}))
    return dict(stored)


def _vector_params(
    name: str,
    type_: pa.DataType,
    metric: Metric,
    details: Mapping[str, Any],
    writer_defaults: Mapping[str, str],
) -> VectorParams:
    params = VectorParams(int(type_.list_size), metric)
    base = details.get("hnsw") or {}
    m = writer_defaults.get(f"hnsw.{name}.num_edges", base.get("max_connections", params.m))
    beam = writer_defaults.get(
        f"hnsw.{name}.ef_construction", base.get("construction_ef", params.ef_construction)
    )
    try:
        chosen = VectorParams(params.dimension, metric, int(m), int(beam))
    except ValueError as error:
        raise InvalidInputError(f"the HNSW parameters of index {name!r} are not numbers: {error}") from error
    if chosen.m < 2 or chosen.ef_construction < 1:
        raise InvalidInputError(
            f"index {name!r} needs num_edges of at least 2 and ef_construction of at least 1, "
            f"not {chosen.m} and {chosen.ef_construction}"
        )
    return chosen
