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

    Results that nobody took yet are bounded by ``workers``; an error surfaces at its
    item's turn. When the iterator is exhausted or closed, calls that have not begun are
    dropped, and the threads end with the calls that are under way.
    """
    if workers <= 1:
        yield from map(call, items)
        return
    source = iter(items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="lancewal-io")
    try:
        ahead: deque[Future[R]] = deque(pool.submit(call, item) for item in islice(source, workers))
        while ahead:
            result = ahead.popleft().result()
            ahead.extend(pool.submit(call, item) for item in islice(source, 1))
            yield result
        # All calls have returned: the threads are idle and end at once.
        pool.shutdown()
    finally:
        # Without waiting: an iterator that was left half-way may be closed by the garbage
        # collector, in any thread and inside of any lock.
        pool.shutdown(wait=False, cancel_futures=True)
