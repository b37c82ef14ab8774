"""Convert texts to token numbers, with Lance's own tokenizer behind a cache of words.

A call of the tokenizer for one text takes about 15 microseconds. If the tokenizer splits at fixed
characters and treats each word separately, this module splits a whole batch, and the tokenizer
gets every distinct word once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import chain, repeat
from typing import NamedTuple

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.index.kinds import FullTextParams

Numbers = npt.NDArray[np.int32]

#: Tokenizers that split at single characters, independent of the characters around them.
_SPLITTING = ("simple", "whitespace")
#: Never part of UTF-8, so it can separate texts.
_BETWEEN = b"\xff"
#: The characters at which ``bytes.split`` splits by default.
_PYTHON_SPACE = b" \t\n\r\x0b\x0c"
_REMOVED = -1
#: A word that the tokenizer splits further: its whole text goes to the tokenizer.
_COMPOUND = -2
_UNKNOWN = -3
#: Words for the marker: no list of stop words and no length limit removes all of them.
_MARKERS = (b"0", b"x", b"zqx")
_MAX_REMEMBERED_WORDS = 200_000
#: Bytes of a remembered word or token: dictionary entry, number and text header.
_ENTRY_BYTES = 180


class Tokens(NamedTuple):
    """Occurrences of tokens, text after text: token number, text number, position in the text."""

    tokens: Numbers
    texts: Numbers
    places: Numbers


class QueryTerm(NamedTuple):
    """A token of a query; terms at the same position are alternatives of each other."""

    text: str
    place: int


class Tokenizer:
    """Assigns numbers to the tokens of texts; one thread tokenizes, any thread may look up numbers."""

    def __init__(self, params: FullTextParams) -> None:
        self._options = params.tokenizer_options()
        self._numbers: dict[str, int] = {}
        self._token_bytes = 0
        self._words: dict[bytes, int] = {}
        self._word_bytes = 0
        self._separators = _separators(params.base_tokenizer) if params.base_tokenizer in _SPLITTING else None
        self._marker = next((word for word in _MARKERS if len(self._tokenize(word.decode())) == 1), b"")

    @property
    def memory_bytes(self) -> int:
        return self._token_bytes + self._word_bytes

    def number(self, token: str) -> int:
        """The number of a token; -1 if no text contained it."""
        return self._numbers.get(token, _REMOVED)

    def query_terms(self, query: str) -> list[QueryTerm]:
        """The terms of a query, as Lance counts them: a repetition at another position counts again."""
        terms = (QueryTerm(token.text, token.position) for token in self._tokenize(query))
        return list(dict.fromkeys(terms))

    def batch(self, column: pa.Array) -> Tokens:
        """The tokens of every text of ``column``; a null has none."""
        if self._separators is not None and self._marker:
            tokens = self._split_batch(column, self._separators)
            if tokens is not None:
                return tokens
        return self._tokenize_each(column)

    def _tokenize(self, text: str) -> list[lance.lance.FtsToken]:
        tokens: list[lance.lance.FtsToken] = lance.tokenize(text, **self._options)
        return tokens

    def _tokenize_each(self, column: pa.Array) -> Tokens:
        tokenized = [[] if text is None else self._tokenize(text) for text in column.to_pylist()]
        flat = list(chain.from_iterable(tokenized))
        return Tokens(
            np.fromiter((self._number(token.text) for token in flat), np.int32, len(flat)),
            np.repeat(np.arange(len(tokenized), dtype=np.int32), [len(tokens) for tokens in tokenized]),
            np.fromiter((token.position for token in flat), np.int32, len(flat)),
        )

    def _split_batch(self, column: pa.Array, separators: _Separators) -> Tokens | None:
        texts = column.view(_binary_type(column.type)).to_pylist()
        joined = _BETWEEN.join(texts if column.null_count == 0 else [text or b"" for text in texts])
        if separators.hazards and any(hazard in joined for hazard in separators.hazards):
            return None
        words = list(map(bytes.split, joined.translate(separators.table).split(_BETWEEN)))
        flat = list(chain.from_iterable(words))
        numbers = self._word_numbers(flat)
        lengths = np.fromiter(map(len, words), np.int32, len(words))
        text_of = np.repeat(np.arange(len(words), dtype=np.int32), lengths)
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        place = np.arange(len(flat), dtype=np.int32) - np.repeat(starts, lengths)
        kept = np.flatnonzero(numbers >= 0)
        if len(kept) == len(flat):
            return Tokens(numbers, text_of, place)
        whole = np.unique(text_of[numbers == _COMPOUND])
        if not len(whole):
            return Tokens(numbers[kept], text_of[kept], place[kept])
        kept = kept[~np.isin(text_of[kept], whole)]
        rest = self._tokenize_each(column.take(pa.array(whole)))
        return _in_text_order(
            Tokens(numbers[kept], text_of[kept], place[kept]),
            Tokens(rest.tokens, whole[rest.texts], rest.places),
        )

    def _word_numbers(self, words: list[bytes]) -> Numbers:
        numbers = np.fromiter(map(self._words.get, words, repeat(_UNKNOWN)), np.int32, len(words))
        unknown = np.flatnonzero(numbers == _UNKNOWN)
        if len(unknown):
            missing = [words[at] for at in unknown.tolist()]
            if len(self._words) + len(missing) > _MAX_REMEMBERED_WORDS:
                self._words.clear()
                self._word_bytes = 0
            learned = self._learn(dict.fromkeys(missing, _REMOVED))
            numbers[unknown] = np.fromiter(map(learned.__getitem__, missing), np.int32, len(missing))
        return numbers

    def _learn(self, learned: dict[bytes, int]) -> dict[bytes, int]:
        """Put the tokens of new words into ``learned``, and remember them."""
        plain = [word for word in learned if word.isascii()]
        # One call for all words: the position of a token, counted from the marker, identifies its word.
        joined = b" ".join([self._marker, *plain]).decode()
        for token in self._tokenize(joined)[1:]:
            learned[plain[token.position - 1]] = self._number(token.text)
        if len(plain) < len(learned):
            for word in learned:
                if not word.isascii():
                    learned[word] = self._learn_one(word.decode(errors="replace"))
        self._words.update(learned)
        self._word_bytes += sum(map(len, learned)) + len(learned) * _ENTRY_BYTES
        return learned

    def _learn_one(self, word: str) -> int:
        """The number of a word that may contain separators outside ASCII."""
        whole = lance.tokenize(word, **_unfiltered(str(self._options["base_tokenizer"])))
        if len(whole) != 1:
            return _COMPOUND
        tokens = self._tokenize(word)
        return self._number(tokens[0].text) if tokens else _REMOVED

    def _number(self, token: str) -> int:
        number = self._numbers.get(token)
        if number is None:
            number = self._numbers[token] = len(self._numbers)
            self._token_bytes += len(token) + _ENTRY_BYTES
        return number


class _Separators(NamedTuple):
    """A byte table that turns separators into spaces, and the bytes at which only Python splits."""

    table: bytes
    hazards: tuple[bytes, ...]


@cache
def _separators(base_tokenizer: str) -> _Separators:
    """The ASCII characters at which the tokenizer splits, found by trying each."""
    options = _unfiltered(base_tokenizer)
    splits = [code for code in range(128) if len(lance.tokenize(f"a{chr(code)}b", **options)) == 2]
    table = bytes.maketrans(bytes(splits), b" " * len(splits))
    return _Separators(table, tuple(bytes([c]) for c in _PYTHON_SPACE if c not in splits))


def _unfiltered(base_tokenizer: str) -> dict[str, object]:
    """Options with which a tokenizer only splits."""
    return {
        "base_tokenizer": base_tokenizer,
        "max_token_length": None,
        **dict.fromkeys(("lower_case", "stem", "remove_stop_words", "ascii_folding"), False),
    }


def _binary_type(type_: pa.DataType) -> pa.DataType:
    return pa.large_binary() if type_ == pa.large_string() else pa.binary()


def _in_text_order(first: Tokens, second: Tokens) -> Tokens:
    together = Tokens(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))
    order = np.argsort(together.texts, kind="stable")
    return Tokens(*(numbers[order] for numbers in together))


def distinct_texts(terms: Iterable[QueryTerm]) -> list[str]:
    """The distinct tokens of terms."""
    return list(dict.fromkeys(term.text for term in terms))
