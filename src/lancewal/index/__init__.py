"""Indexes of rows in memory: BTree, full text, vector."""

from lancewal.index.exact import (
    NOTHING,
    ColumnPart,
    Vector,
    checked_query,
    is_vector,
    search_rows,
)
from lancewal.index.full_text import OPERATORS, CorpusStatistics, FullTextIndex, index_of, is_text
from lancewal.index.kinds import (
    FullTextParams,
    IndexSpec,
    Metric,
    VectorParams,
)
from lancewal.index.specs import full_text_params, maintained_specs
from lancewal.index.store import IndexStore, Narrowed
from lancewal.index.tokens import QueryTerm, Tokenizer

__all__ = [
    "NOTHING",
    "OPERATORS",
    "ColumnPart",
    "CorpusStatistics",
    "FullTextIndex",
    "FullTextParams",
    "IndexSpec",
    "IndexStore",
    "Metric",
    "Narrowed",
    "QueryTerm",
    "Tokenizer",
    "Vector",
    "VectorParams",
    "checked_query",
    "full_text_params",
    "index_of",
    "is_text",
    "is_vector",
    "maintained_specs",
    "search_rows",
]
