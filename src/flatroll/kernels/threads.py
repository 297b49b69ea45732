"""Shares the blocks of one call among threads: copies of large samples, compressed columns."""

from _thread import start_new_thread
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def run_blocks(run: Callable[[int, int], T], bounds: Sequence[int], threads: int) -> list[T]:
    """Return ``run(first, stop)`` for each pair of adjacent ``bounds``, called by at most ``threads`` threads.

    The calling thread is one of them. The others live for this call only: nothing is left that a fork would break, and
    importing flatroll starts no thread. Each thread takes one block after another, and a thread for which no core is
    free finds none left: the call does not wait for it.

    Args:
        run: releases the GIL for most of its time. It must keep all memory that it uses alive: after Ctrl-C the other
            threads finish the blocks that they have begun.
        bounds: ascending; block i has the rows ``bounds[i] ... bounds[i + 1] - 1``.
        threads: 1 calls ``run`` in the calling thread only.

    Raises:
        the error of the first block that failed, after all blocks have ended.

    >>> run_blocks(lambda first, stop: list(range(first, stop)), [0, 2, 3], threads=2)
    [[0, 1], [2]]
    """
    open_ = list(enumerate(pairwise(bounds)))[::-1]  # the first block is taken first
    results: dict[int, T] = {}
    done: SimpleQueue[tuple[int, Exception | None]] = SimpleQueue()

    def take_blocks() -> None:
        while True:
            try:
                block, (first, stop) = open_.pop()
            except IndexError:
                return
            try:
                results[block] = run(first, stop)
            except Exception as error:  # raised by the calling thread
                done.put((block, error))
            else:
                done.put((block, None))

    blocks = len(open_)
    for _ in range(min(threads, blocks) - 1):
        try:
            # A `threading.Thread` would wait until it has begun: 0.1 ms.
            start_new_thread(take_blocks, ())
        except RuntimeError:  # the system allows no more threads
            break

    try:
        take_blocks()
        ended = sorted([done.get() for _ in range(blocks)], key=lambda block: block[0])
    finally:
        open_.clear()

    for _, error in ended:
        if error is not None:
            raise error
    return [results[block] for block in range(blocks)]
