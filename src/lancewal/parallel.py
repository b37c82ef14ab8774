"""Several storage round trips at once, results in the order asked.

Threads, because every call spends its time in the object store with the GIL released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ordered_map(call: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """Yield ``call(item)`` in order, with up to ``workers`` calls ahead of the consumer.

    Results that nobody took yet are bounded by ``workers``. The threads end when the
    iterator is exhausted or closed; an error surfaces at its item's turn.
    """
    if workers <= 1:
        yield from map(call, items)
        return
    source = iter(items)
    with ThreadPoolExecutor(workers, thread_name_prefix="lancewal-io") as pool:
        ahead: deque[Future[R]] = deque(pool.submit(call, item) for item in islice(source, workers))
        try:
            while ahead:
                result = ahead.popleft().result()
                ahead.extend(pool.submit(call, item) for item in islice(source, 1))
                yield result
        finally:
            for future in ahead:
                future.cancel()
