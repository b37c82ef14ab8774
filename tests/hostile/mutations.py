"""Damaged copies of files, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_Mutation = Callable[[random.Random, bytearray], bytes]


def _flip_bits(random: random.Random, data: bytearray) -> bytes:
    for _ in range(random.choice([1, 1, 1, 2, 8, 64])):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def _cut(random: random.Random, data: bytearray) -> bytes:
    return bytes(data[: random.randrange(len(data))])


def _drop_span(random: random.Random, data: bytearray) -> bytes:
    start, length = _span(random, data)
    return bytes(data[:start] + data[start + length :])


def _double_span(random: random.Random, data: bytearray) -> bytes:
    start, length = _span(random, data)
    return bytes(data[: start + length] + data[start : start + length] + data[start + length :])


def _move_span(random: random.Random, data: bytearray) -> bytes:
    start, length = _span(random, data)
    to = random.randrange(len(data))
    return bytes(data[:to] + data[start : start + length] + data[to + length :])


def _blow_up_a_number(random: random.Random, data: bytearray) -> bytes:
    """A length or an offset that is far too large, at the places where formats keep them."""
    width = random.choice([1, 2, 4, 8])
    start = random.randrange(max(len(data) - width, 1)) & -random.choice([1, 4, 8])
    value = random.choice([0x7F, 0xFF, 0x80])
    data[start : start + width] = bytes([0xFF] * (width - 1) + [value])
    return bytes(data)


def _random_bytes(random: random.Random, data: bytearray) -> bytes:
    return random.randbytes(random.choice([0, 1, 7, 8, 16, 100, len(data)]))


def _zeros(random: random.Random, data: bytearray) -> bytes:
    start, length = _span(random, data)
    data[start : start + length] = bytes(len(data[start : start + length]))
    return bytes(data)


def _append(random: random.Random, data: bytearray) -> bytes:
    return bytes(data) + random.randbytes(random.choice([1, 8, 64]))


def _span(random: random.Random, data: bytearray) -> tuple[int, int]:
    start = random.randrange(len(data))
    return start, random.choice([1, 2, 4, 8, 16, 64, max(len(data) // 3, 1)])


_MUTATIONS: Sequence[_Mutation] = (
    _flip_bits,
    _flip_bits,
    _flip_bits,
    _cut,
    _drop_span,
    _double_span,
    _move_span,
    _blow_up_a_number,
    _blow_up_a_number,
    _random_bytes,
    _zeros,
    _append,
)


def mutated(random: random.Random, data: bytes) -> bytes:
    """``data``, damaged once or a few times."""
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        if not data:
            break
        data = random.choice(_MUTATIONS)(random, bytearray(data))
    return data
