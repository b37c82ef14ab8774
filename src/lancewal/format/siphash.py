"""SipHash-1-3 with key (0, 0) over many messages at once.

There is one round for every 8-byte word of a message, and three rounds to finish. The last
byte of the last word is the message's length. All rows go through a round together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lancewal.format.spans import ByteSpans, longest_first, row_slices, unaligned_words

Hashes = npt.NDArray[np.uint64]

_START = np.array(
    [[0x736F6D6570736575], [0x646F72616E646F6D], [0x6C7967656E657261], [0x7465646279746573]], np.uint64
)
_MASK = 0xFFFFFFFFFFFFFFFF
_WORD = 8
_FINISH_MARK = 0xFF
_FINISH_ROUNDS = 3

#: Below this many rows, Python's own integers are faster than numpy's cost per call.
_FEW_ROWS = 8


def siphash13_words(messages: npt.NDArray[np.uint64]) -> Hashes:
    """Hashes of equally long messages: one row each, padded, length byte included."""
    hashes = np.empty(len(messages), np.uint64)
    if len(messages) <= _FEW_ROWS:
        hashes[:] = [_hash_one(_START[:, 0].tolist(), row) for row in messages.tolist()]
        return hashes
    for rows in row_slices(len(messages)):
        part = messages[rows]
        state = np.repeat(_START, len(part), axis=1)
        for word in range(part.shape[1]):
            _absorb(state, part[:, word])
        hashes[rows] = _finish(state)
    return hashes


def siphash13_spans(spans: ByteSpans) -> Hashes:
    """Hashes of messages of any length."""
    hashes = np.empty(len(spans), np.uint64)
    # The last word of a message may reach past its end: pad the last message.
    words = unaligned_words(np.append(spans.data, np.zeros(_WORD, np.uint8)), np.uint64)
    for rows, piece in spans.pieces():
        whole = piece.lengths // _WORD
        order, having = longest_first(whole)
        starts, whole, lengths = piece.starts[order], whole[order], piece.lengths[order]
        rest = (lengths % _WORD).astype(np.uint64) * np.uint64(8)
        last = words[starts + _WORD * whole] & ((np.uint64(1) << rest) - np.uint64(1))
        last |= lengths.astype(np.uint64) << np.uint64(56)
        state = np.repeat(_START, len(piece), axis=1)
        together = [count for count in having if count > _FEW_ROWS]
        for i, count in enumerate(together):
            _absorb(state[:, :count], words[starts[:count] + _WORD * i])
        # The counts only decrease: the first rows still have words when the others have none left.
        alone = next((count for count in [len(piece), *having] if count <= _FEW_ROWS), 0)
        result = np.empty(len(piece), np.uint64)
        for row in range(alone):
            first, end = starts[row] + _WORD * len(together), starts[row] + _WORD * whole[row]
            remaining = [*words[first:end:_WORD].tolist(), int(last[row])]
            result[row] = _hash_one(state[:, row].tolist(), remaining)
        if alone < len(piece):
            _absorb(state[:, alone:], last[alone:])
            result[alone:] = _finish(state[:, alone:])
        hashes[rows][order] = result
    return hashes


def _absorb(state: Hashes, words: Hashes) -> None:
    state[3] ^= words
    _round(state)
    state[0] ^= words


def _finish(state: Hashes) -> Hashes:
    state[2] ^= np.uint64(_FINISH_MARK)
    for _ in range(_FINISH_ROUNDS):
        _round(state)
    hashes: Hashes = state[0] ^ state[1] ^ state[2] ^ state[3]
    return hashes


def _round(state: Hashes) -> None:
    v0, v1, v2, v3 = state
    spare = np.empty_like(v0)
    v0 += v1
    _rotate_left(v1, 13, spare)
    v1 ^= v0
    _rotate_left(v0, 32, spare)
    v2 += v3
    _rotate_left(v3, 16, spare)
    v3 ^= v2
    v0 += v3
    _rotate_left(v3, 21, spare)
    v3 ^= v0
    v2 += v1
    _rotate_left(v1, 17, spare)
    v1 ^= v2
    _rotate_left(v2, 32, spare)


def _rotate_left(values: Hashes, bits: int, spare: Hashes) -> None:
    np.right_shift(values, np.uint64(64 - bits), out=spare)
    values <<= np.uint64(bits)
    values |= spare


def _hash_one(state: list[int], words: list[int]) -> int:
    """Finish the hash of one message from ``state`` on, in plain integers."""
    v0, v1, v2, v3 = state
    for word in words:
        v0, v1, v2, v3 = _round_one(v0, v1, v2, v3 ^ word)
        v0 ^= word
    v2 ^= _FINISH_MARK
    for _ in range(_FINISH_ROUNDS):
        v0, v1, v2, v3 = _round_one(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


def _round_one(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0 = (v0 + v1) & _MASK
    v1 = ((v1 << 13 | v1 >> 51) & _MASK) ^ v0
    v0 = (v0 << 32 | v0 >> 32) & _MASK
    v2 = (v2 + v3) & _MASK
    v3 = ((v3 << 16 | v3 >> 48) & _MASK) ^ v2
    v0 = (v0 + v3) & _MASK
    v3 = ((v3 << 21 | v3 >> 43) & _MASK) ^ v0
    v2 = (v2 + v1) & _MASK
    v1 = ((v1 << 17 | v1 >> 47) & _MASK) ^ v2
    v2 = (v2 << 32 | v2 >> 32) & _MASK
    return v0, v1, v2, v3
