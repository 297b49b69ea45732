"""Samples made ahead of time, by threads."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Keeps ``count`` results under way. Its methods may be called from several threads.

    Args:
        count: results made ahead, and threads that make them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ThreadPoolExecutor | None = None
        self._queue: deque[Future[T]] = deque()
        self._cleared = 0
        self._lock = threading.Lock()  # of the three above; never held while a result is begun

    def next(self, begin: Callable[[], Callable[[], T]]) -> T:
        """The oldest result; starts others in its place.

        ``begin`` is called in this thread, in order, and returns what a thread has to finish.
        """
        while True:
            with self._lock:
                # One more than count: the oldest is taken, and as many as there are threads stay under way.
                if len(self._queue) > self._count:
                    future = self._queue.popleft()
                    break
                cleared = self._cleared
            finish = begin()
            with self._lock:
                if cleared == self._cleared:  # else what was begun is to be forgotten, too
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(self._count, "flatroll-prefetch")
                    self._queue.append(self._pool.submit(finish))
        return future.result()

    def results(self) -> list[T]:
        """All results under way, oldest first; waits for them."""
        with self._lock:
            futures = list(self._queue)
        return [future.result() for future in futures]  # without the lock: others may go on meanwhile

    def replace(self, results: list[T]) -> None:
        """Have these results under way, and no others."""
        self.clear()
        with self._lock:
            for result in results:
                future: Future[T] = Future()
                future.set_result(result)
                self._queue.append(future)

    def wait(self) -> None:
        """Block until all threads are idle; a thread may draw again, if its rows are overwritten meanwhile."""
        with self._lock:
            futures = list(self._queue)
        wait(futures)

    def clear(self) -> None:
        """Forget the results under way."""
        with self._lock:
            for future in self._queue:
                future.cancel()
            self._queue.clear()
            self._cleared += 1
