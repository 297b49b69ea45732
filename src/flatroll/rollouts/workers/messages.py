"""What the owner of workers and a worker tell each other: kinds of messages, and numbers in shared memory."""

from math import inf
from typing import Any, NamedTuple

from flatroll.sharing.block import Block, Column, Table

GO, READY, END = "collect", "ready", "end"  # kinds of messages, besides those of the mailbox


class Note(NamedTuple):
    """What comes with a window, or, without rows, with the word that there will be no more.

    Attributes:
        frames: rows that the worker has collected so far.
        rows: rows of this window as they were collected, before ``postproc``.
        shape: batch size of what the worker yielded.
        held: rows that it has collected and keeps for later windows.
        waited: seconds that it has waited so far, for a request or for a free slot.
        versions: of the policy in the steps made for this window: oldest, mean and newest; None if none was made.
    """

    frames: int
    rows: int
    shape: tuple[int, ...]
    held: int
    waited: float
    versions: tuple[int, float, int] | None


class Signals:
    """What a worker looks at before each vector step, and what it shows there, without a system call.

    Args:
        block: the memory, of another process's `Signals`. Default: new memory.
    """

    def __init__(self, block: Block | None = None) -> None:
        made = block is None
        self._block = (
            Block([Table(1, {"numbers": Column("int64", (2,)), "beat": Column("float64", ())})])
            if block is None
            else block
        )
        arrays = self._block.arrays()
        #: int64 [2]: the last window that is to be delivered with the rows there are; whether to stop (0 or 1).
        self.numbers = arrays["numbers"][0]
        #: float64 [1]: when the step under way began (``time.monotonic()``), inf while none is.
        self.beat = arrays["beat"]
        if made:
            self.beat[0] = inf

    def cut(self, window: int) -> None:
        """Let the worker deliver window number ``window``, counted from 1, with the rows that there are."""
        self.numbers[0] = window

    def stop(self) -> None:
        """Let the worker end at its next step."""
        self.numbers[1] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return Signals, (self._block,)
