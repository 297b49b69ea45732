"""Computes samples ahead of time in threads."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class _Once(Generic[R]):
    """Calls ``function`` once, in the first thread that needs it; others wait."""

    def __init__(self, function: Callable[[], R]) -> None:
        self._function: Callable[[], R] | None = function
        self._outcome: Future[R] = Future()
        self._lock = threading.Lock()

    def run(self) -> "Future[R]":
        """Run the call if necessary; return its result or error."""
        with self._lock:
            if self._function is not None:
                try:
                    self._outcome.set_result(self._function())
                except Exception as error:  # not Ctrl-C, after which the next call starts over
                    self._outcome.set_exception(error)
                self._function = None
        return self._outcome

    def then(self, finish: Callable[[R], T]) -> T:
        """Return ``finish(result)``, or raise the error."""
        return finish(self.run().result())


class Prefetcher(Generic[T]):
    """Computes the next ``count`` results in background threads. All methods are thread-safe.

    Args:
        count: number of prefetched results, and of threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ThreadPoolExecutor | None = None
        self._queue: deque[tuple[Future[T], _Once[Any]]] = deque()  # futures of results, and their readers
        self._cleared = 0
        self._lock = threading.Lock()  # guards the fields above; not held while a result is begun

    def next(self, begin: Callable[[], tuple[Callable[[], R], Callable[[R], T]]]) -> T:
        """Return the oldest result and start computing new ones in its place.

        ``begin`` is called in this thread, in order, and returns ``(read, finish)``: a thread computes
        ``finish(read())``. Writes do not change what ``finish`` makes of it.
        """
        while True:
            with self._lock:
                # count + 1: the oldest is returned, and one per thread stays pending.
                if len(self._queue) > self._count:
                    future, _ = self._queue.popleft()
                    break
                cleared = self._cleared

            read, finish = begin()
            rows = _Once(read)

            with self._lock:
                if cleared == self._cleared:  # otherwise drop what was just begun
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(self._count, "flatroll-prefetch")
                    self._queue.append((self._pool.submit(rows.then, finish), rows))

        return future.result()

    def read_all(self) -> None:
        """Read the rows of all pending results, in this thread unless another one has begun.

        Later writes do not change these results. An error is raised by the result that it belongs to.
        """
        with self._lock:
            pending = [rows for _, rows in self._queue]

        for rows in pending:
            rows.run()

    def results(self) -> list[T]:
        """Wait for all pending results and return them, oldest first, without removing them."""
        with self._lock:
            futures = [future for future, _ in self._queue]
        return [future.result() for future in futures]  # without the lock, so that other threads can continue

    def replace(self, results: list[T]) -> None:
        """Discard the pending results and queue ``results`` instead."""
        self.clear()
        with self._lock:
            for result in results:
                future: Future[T] = Future()
                future.set_result(result)
                self._queue.append((future, _Once(lambda: None)))

    def wait(self) -> None:
        """Block until no thread is computing a result."""
        with self._lock:
            futures = [future for future, _ in self._queue]
        wait(futures)

    def clear(self) -> None:
        """Discard the pending results."""
        with self._lock:
            for future, _ in self._queue:
                future.cancel()
            self._queue.clear()
            self._cleared += 1
