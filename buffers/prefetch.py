"""Samples made ahead, in threads."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Keeps ``count`` results under way.

    Args:
        count: results made ahead, and threads that make them.
        begin: called in the caller's thread, in order; returns what a thread has to finish.
    """

    def __init__(self, count: int, begin: Callable[[], Callable[[], T]]) -> None:
        self._count = count
        self._begin = begin
        self._pool: ThreadPoolExecutor | None = None
        self._queue: deque[Future[T]] = deque()

    def next(self) -> T:
        """The oldest result; starts others in its place."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, "flatroll-prefetch")
        while len(self._queue) <= self._count:
            self._queue.append(self._pool.submit(self._begin()))
        return self._queue.popleft().result()

    def results(self) -> list[T]:
        """All results under way, oldest first; waits for them."""
        return [future.result() for future in self._queue]

    def replace(self, results: list[T]) -> None:
        """Have these results under way, and no others."""
        self.clear()
        for result in results:
            future: Future[T] = Future()
            future.set_result(result)
            self._queue.append(future)

    def wait(self) -> None:
        """Until no thread is at work; one at work may draw again, if its rows are overwritten meanwhile."""
        wait(self._queue)

    def clear(self) -> None:
        """Forget the results under way."""
        for future in self._queue:
            future.cancel()
        self._queue.clear()

    def close(self) -> None:
        """Forget the results and let the threads end."""
        self.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
