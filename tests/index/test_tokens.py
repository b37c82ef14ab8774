"""The memory of words gives exactly what Lance's tokenizer gives for each whole text."""

from __future__ import annotations

from dataclasses import replace

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.index import tokens
from lancewal.index.kinds import FullTextParams
from lancewal.index.tokens import Tokenizer

PARAMS = {
    "default": FullTextParams(),
    "whitespace": FullTextParams(base_tokenizer="whitespace"),
    "only splits": FullTextParams(stem=False, remove_stop_words=False, lower_case=False, ascii_folding=False),
    "german": FullTextParams(language="German"),
    "own stop words": FullTextParams(custom_stop_words=("fox", "0", "x", "zqx")),
    "short tokens": FullTextParams(max_token_length=3),
    "any length": FullTextParams(max_token_length=None),
    "raw": FullTextParams(base_tokenizer="raw"),
    "ngram": FullTextParams(base_tokenizer="ngram", stem=False, remove_stop_words=False),
    "prefixes": FullTextParams(
        base_tokenizer="ngram", min_ngram_length=2, max_ngram_length=4, prefix_only=True, stem=False
    ),
    "icu": FullTextParams(base_tokenizer="icu"),
    "code": FullTextParams(base_tokenizer="code", split_identifiers=True, index_operators=True, stem=False),
}
WORDS = [
    "the",
    "Foxes",
    "foxes",
    "running",
    "x",
    "0",
    "naïve",
    "Straße",
    "日本語",
    "don't",
    "a-b",
    "getUserName",
    "w" * 41,
]
SPACES = [" ", ", ", "\n", "\x0b", "\x1f", "\x00", "—", "\u3000", "é", "==", ""]
texts = st.lists(st.sampled_from(WORDS) | st.sampled_from(SPACES) | st.text(max_size=3), max_size=10).map(
    "".join
)


def by_lance(text: str | None, params: FullTextParams) -> list[tuple[str, int]]:
    if text is None:
        return []
    return [(t.text, t.position) for t in lance.tokenize(text, **params.tokenizer_options())]


def ours(tokenizer: Tokenizer, column: pa.Array) -> list[list[tuple[str, int]]]:
    found: list[list[tuple[str, int]]] = [[] for _ in column]
    batch = tokenizer.batch(column)
    names = {number: token for token, number in tokenizer._numbers.items()}
    for number, text, place in zip(*(array.tolist() for array in batch), strict=True):
        found[text].append((names[number], place))
    # Places count from the first token that is left, as Lance gives them.
    return [[(token, place - entries[0][1]) for token, place in entries] for entries in found]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@settings(max_examples=40)
@given(batches=st.lists(st.lists(st.none() | texts, max_size=4), max_size=3))
def test_batches_have_the_tokens_that_lance_gives_each_text(
    params: FullTextParams, batches: list[list[str | None]]
) -> None:
    tokenizer = Tokenizer(params)
    for batch in batches:
        for type_ in (pa.string(), pa.large_string()):
            column = pa.array([None, *batch], type_).slice(1)
            assert ours(tokenizer, column) == [by_lance(text, params) for text in batch]


def test_every_distinct_word_goes_to_the_tokenizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(FullTextParams())
    seen: list[str] = []
    tokenize = tokenizer._tokenize

    def note(text: str) -> list[lance.lance.FtsToken]:
        seen.append(text)
        return tokenize(text)

    monkeypatch.setattr(tokenizer, "_tokenize", note)
    for _ in range(3):
        tokenizer.batch(pa.array(["red fox", "blue fox"] * 10))
    assert len(seen) == 1
    assert sorted(seen[0].split()[1:]) == ["blue", "fox", "red"]


def test_forgetting_words_changes_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_MAX_REMEMBERED_WORDS", 5)
    params = replace(FullTextParams(), stem=False)
    tokenizer = Tokenizer(params)
    for start in range(0, 40, 4):
        batch = [f"w{i} w{i + 1} w{i % 7} the" for i in range(start, start + 4)]
        assert ours(tokenizer, pa.array(batch)) == [by_lance(text, params) for text in batch]
    assert tokenizer.number("w39") >= 0
    assert tokenizer.number("nowhere") == -1


def test_terms_at_one_place_are_counted_once_and_repetitions_elsewhere_again() -> None:
    assert [tuple(t) for t in Tokenizer(FullTextParams()).query_terms("fox and fox")] == [
        ("fox", 0),
        ("fox", 2),
    ]
    ngrams = Tokenizer(PARAMS["ngram"]).query_terms("aaaa")
    assert [tuple(t) for t in ngrams] == [("aaa", 0)]
