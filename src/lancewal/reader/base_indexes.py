"""What a Lance dataset's indexes say about a column, asked once per dataset."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import lance

from lancewal.index.kinds import FullTextParams, Metric
from lancewal.index.specs import full_text_params
from lancewal.lance_errors import lance_errors

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A handle stays at its version, so what was found stays true.
_known: weakref.WeakKeyDictionary[lance.LanceDataset, dict[Any, Any]] = weakref.WeakKeyDictionary()


def once(dataset: lance.LanceDataset, what: object, find: Callable[[], T]) -> T:
    """``find()`` the first time, what it gave ever after. Two threads may both be the first."""
    known = _known.setdefault(dataset, {})
    if what not in known:
        known[what] = find()
    return cast("T", known[what])


def vector_metric(dataset: lance.LanceDataset, column: str) -> Metric | None:
    """The metric of the column's vector index; ``None`` when it has none that we know."""
    return once(dataset, ("metric", column), lambda: _metric(dataset, column))


def text_params(dataset: lance.LanceDataset, column: str) -> FullTextParams | None:
    """The tokenizer settings of the column's full-text index; ``None`` when it has none."""

    def find() -> FullTextParams | None:
        with lance_errors("read the indexes of a table"):
            return full_text_params(dataset, column)

    return once(dataset, ("words", column), find)


def hint(dataset: lance.LanceDataset, message: str, *args: object) -> None:
    """Say in the log, once per dataset, why a search is slow."""
    once(dataset, ("hint", message, args), lambda: logger.info(message, *args))


def _metric(dataset: lance.LanceDataset, column: str) -> Metric | None:
    known = [each.value for each in Metric]
    with lance_errors("read the indexes of a table"):
        for description in dataset.describe_indices():
            if list(description.field_names) == [column] and str(description.index_type).startswith("IVF"):
                named = dict(description.details).get("metric_type")
                # Older versions of Lance left it out of the description.
                segments = [] if named else dataset.stats.index_stats(description.name)["indices"]
                metric = str(named or next((part.get("metric_type") for part in segments), "")).lower()
                if metric in known:
                    return Metric(metric)
    return None
