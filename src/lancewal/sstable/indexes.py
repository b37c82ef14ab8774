"""The table's maintained indexes inside one SSTable, as ordinary Lance indexes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import lance
import numpy as np

from lancewal.errors import StorageError
from lancewal.index.specs import FullTextParams, IndexSpec, VectorParams
from lancewal.lance_errors import lance_errors

logger = logging.getLogger(__name__)

# One partition of scalar-quantised vectors, searched from end to end. Lance's own flush
# builds an HNSW graph here. At 100,000 rows of 128 dimensions that takes 30 s against
# 0.25 s, and with Lance's default beam it finds fewer of the true neighbours.
_VECTOR_INDEX = "IVF_SQ"


def build_indexes(dataset: lance.LanceDataset, indexes: Sequence[IndexSpec]) -> None:
    """Build every index of ``indexes`` in ``dataset``, each in a commit of its own.

    An index that cannot be built is left out with a warning. Rows are then found by
    reading them all; a flush that failed for ever instead would make the shard unwritable.
    """
    for spec in indexes:
        try:
            with lance_errors(f"build index {spec.name!r}"):
                _build(dataset, spec)
        except StorageError as error:
            logger.warning(
                "SSTable %s has no index on column %r, and searches of it read every row: %s",
                dataset.uri,
                spec.column,
                error,
            )


def _build(dataset: lance.LanceDataset, spec: IndexSpec) -> None:
    if isinstance(spec.params, VectorParams):
        # A centroid that is given need not be trained: that works from the first row on,
        # and also when there is no vector at all.
        dataset.create_index(
            spec.column,
            _VECTOR_INDEX,
            name=spec.name,
            metric=spec.params.metric.value,
            num_partitions=1,
            ivf_centroids=np.zeros((1, spec.params.dimension), np.float32),
        )
    elif isinstance(spec.params, FullTextParams):
        dataset.create_scalar_index(
            spec.column,
            "INVERTED",
            name=spec.name,
            with_position=spec.params.with_position,
            **spec.params.tokenizer_options(),
        )
    else:
        dataset.create_scalar_index(spec.column, "BTREE", name=spec.name)
