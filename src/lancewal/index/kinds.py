"""What an index of a MemTable is to be: kind, column and the parameters of the base's index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class IndexKind(Enum):
    """How a MemTable serves an index of the base table."""

    BTREE = "btree"
    FULL_TEXT = "full_text"
    VECTOR = "vector"


class Metric(Enum):
    """How far two vectors are apart, as Lance's ``_distance`` gives it; smaller is nearer."""

    #: The squared Euclidean distance.
    L2 = "l2"
    #: One minus the cosine of the angle; undefined, so never a hit, for a zero vector.
    COSINE = "cosine"
    #: One minus the inner product.
    DOT = "dot"


@dataclass(frozen=True)
class BTreeParams:
    """A BTree has no parameters that matter in memory."""


@dataclass(frozen=True)
class FullTextParams:
    """Tokenizer settings, by the names and with the defaults of Lance's inverted index."""

    base_tokenizer: str = "simple"
    language: str = "English"
    max_token_length: int | None = 40
    lower_case: bool = True
    stem: bool = True
    remove_stop_words: bool = True
    custom_stop_words: tuple[str, ...] | None = None
    ascii_folding: bool = True
    min_ngram_length: int = 3
    max_ngram_length: int = 3
    prefix_only: bool = False
    split_identifiers: bool = False
    split_on_numerics: bool = False
    preserve_original: bool = False
    index_operators: bool = False
    #: Positions allow phrase queries; they are no matter of the tokenizer.
    with_position: bool = False

    def tokenizer_options(self) -> dict[str, Any]:
        """Keyword arguments for ``lance.tokenize``, and for an inverted index beside ``with_position``."""
        options = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "with_position"}
        if self.custom_stop_words is not None:
            options["custom_stop_words"] = list(self.custom_stop_words)
        return options


@dataclass(frozen=True)
class VectorParams:
    """A vector index: ``m`` links per row and level, built with a beam of ``ef_construction``."""

    dimension: int
    metric: Metric = Metric.L2
    m: int = 16
    ef_construction: int = 100


@dataclass(frozen=True)
class IndexSpec:
    """One index that MemTables maintain; ``base_type`` is its type in the base table."""

    name: str
    column: str
    field_id: int
    kind: IndexKind
    params: BTreeParams | FullTextParams | VectorParams
    base_type: str = ""


#: What one row costs beside the rows themselves, roughly; text is taken to be short.
_BTREE_ROW_BYTES = 32
_FULL_TEXT_ROW_BYTES = 256
_VECTOR_ROW_BYTES = 32


def memory_estimate(specs: Iterable[IndexSpec], rows: int) -> int:
    """Roughly how many bytes the indexes take at ``rows`` rows, to set limits before writing.

    >>> memory_estimate([IndexSpec("v_idx", "v", 1, IndexKind.VECTOR, VectorParams(128))], 1000)
    672000
    """
    return rows * sum(_row_bytes(spec) for spec in specs)


def _row_bytes(spec: IndexSpec) -> int:
    if isinstance(spec.params, VectorParams):
        return 4 * spec.params.dimension + 8 * spec.params.m + _VECTOR_ROW_BYTES
    return _FULL_TEXT_ROW_BYTES if isinstance(spec.params, FullTextParams) else _BTREE_ROW_BYTES
