"""Computes samples ahead of time in threads."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Computes the next ``count`` results in background threads. All methods are thread-safe.

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
        """Return the oldest result and start computing new ones in its place.

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
        """Wait for all pending results and return them, oldest first, without removing them."""
        with self._lock:
            futures = list(self._queue)
        return [future.result() for future in futures]  # without the lock: others may go on meanwhile

    def replace(self, results: list[T]) -> None:
        """Discard the pending results and queue ``results`` instead."""
        self.clear()
        with self._lock:
            for result in results:
                future: Future[T] = Future()
                future.set_result(result)
                self._queue.append(future)

    def wait(self) -> None:
        """Block until no thread is computing a result."""
        with self._lock:
            futures = list(self._queue)
        wait(futures)

    def clear(self) -> None:
        """Discard the pending results."""
        with self._lock:
            for future in self._queue:
                future.cancel()
            self._queue.clear()
            self._cleared += 1
