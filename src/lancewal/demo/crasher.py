"""A writer that is going to be killed: ``python -m lancewal.demo.crasher URI FIRST``.

Puts documents one by one and prints each id once its put has returned.
"""

from __future__ import annotations

import itertools
import sys

import lancewal
from lancewal.demo.corpus import Corpus


def main(uri: str, first: int) -> None:
    corpus = Corpus.load()
    with lancewal.open(uri).writer() as writer:
        for document in itertools.count(first):
            row = corpus.slice(document % len(corpus), 1)
            row = row.set_column(0, row.schema.field(0), [[document]])
            writer.put(row)
            print(document, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
