"""The demo's documents are real, and each has one name."""

from __future__ import annotations

import numpy as np

from demo.corpus import LIBRARY_KINDS, SCHEMA, embed, library, remarks, rows
from demo.incoming import Incoming


def test_every_document_has_a_name_of_its_own() -> None:
    documents = [*library(300), *remarks()]
    assert len({(each.kind, each.name) for each in documents}) == len(documents) > 1_000
    assert {each.kind for each in library(300)} == set(LIBRARY_KINDS)


def test_rows_fit_the_table() -> None:
    found = rows([each.edition(1) for each in remarks(3)])
    assert found.schema.equals(SCHEMA)
    assert found.num_rows == 3
    assert rows([]).num_rows == 0


def test_texts_with_the_same_words_are_close() -> None:
    query = embed("cancel a running task")
    assert query @ embed("a task that is running was cancelled") > query @ embed("bytes of a socket address")
    assert np.isclose(np.linalg.norm(query), 1.0)


def test_the_stream_brings_all_documents_and_withdraws_private_ones() -> None:
    documents = library(400)
    incoming = Incoming(documents, rows_per_file=50)
    private = {(each.kind, each.name) for each in documents if each.name.split(".")[-1].startswith("_")}
    last = incoming.last()
    assert private
    assert set(last) == {(each.kind, each.name) for each in documents} - private
    assert all(text == each.text for each in documents if (text := last.get((each.kind, each.name))))
    assert incoming.changes == len(documents) + len(private)
