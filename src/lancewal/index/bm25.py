"""BM25 as Lance computes it.

    score = Σ over query terms  idf · tf · (k1 + 1) / (tf + k1 · (1 - b + b · length / average))
    idf   = ln(1 + (documents - df + 0.5) / (df + 0.5))

with k1 = 1.2 and b = 0.75. A document is a row with at least one token; ``length`` is
its number of tokens after all token filters, ``df`` the number of documents that
contain the term. A term that a query repeats at another place counts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

K1 = 1.2
B = 0.75


@dataclass(frozen=True)
class CorpusStatistics:
    """What BM25 needs to know of all documents; several sources' add up to one corpus.

    >>> CorpusStatistics(2, 6, {"fox": 1}) + CorpusStatistics(1, 3, {"fox": 1, "dog": 1})
    CorpusStatistics(documents=3, tokens=9, document_frequency={'fox': 2, 'dog': 1})
    """

    documents: int = 0
    tokens: int = 0
    document_frequency: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: CorpusStatistics) -> CorpusStatistics:
        frequency = dict(self.document_frequency)
        for token, count in other.document_frequency.items():
            frequency[token] = frequency.get(token, 0) + count
        return CorpusStatistics(self.documents + other.documents, self.tokens + other.tokens, frequency)

    @classmethod
    def combined(cls, parts: Iterable[CorpusStatistics]) -> CorpusStatistics:
        total = cls()
        for part in parts:
            total += part
        return total

    @property
    def average_length(self) -> float:
        return self.tokens / self.documents if self.documents else 0.0

    def inverse_frequency(self, token: str) -> float:
        """How much a token says about a document that contains it."""
        frequency = self.document_frequency.get(token, 0)
        return float(np.log(1 + (self.documents - frequency + 0.5) / (frequency + 0.5)))


def term_scores(
    statistics: CorpusStatistics,
    token: str,
    term_counts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
) -> npt.NDArray[np.float64]:
    """What one term adds to the scores of documents that contain it ``term_counts`` times."""
    relative = lengths / (statistics.average_length or 1.0)
    damping = K1 * (1 - B + B * relative)
    scores: npt.NDArray[np.float64] = (
        statistics.inverse_frequency(token) * (K1 + 1) * term_counts / (term_counts + damping)
    )
    return scores
