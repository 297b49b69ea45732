"""`Supply`: all that a collector with workers consists of once its arguments are checked, without its front."""

from collections.abc import Callable, Sequence
from threading import RLock
from time import monotonic, perf_counter
from typing import Any

from tensordict import TensorDict

from flatroll.layout.keys import MASK
from flatroll.rollouts.progress import ProgressBar
from flatroll.rollouts.workers.delivery import Delivery
from flatroll.rollouts.workers.drain import Drain
from flatroll.rollouts.workers.gather import Filled, Gatherer
from flatroll.rollouts.workers.stats import Tally
from flatroll.rollouts.workers.wake import Wake
from flatroll.sharing.nursery import Nursery


class Supply:
    """Gathers windows and delivers them, in the caller's thread or in one of its own.

    The front, which users hold, may be forgotten while that thread runs: nothing here refers to it.

    Args:
        gatherer: gives the windows of each batch.
        delivery: makes batches of them.
        nursery: that started the workers.
        owns_nursery: whether to close it at the end.
        version: gives the policy's version.
        publish: called before each batch is asked for.
        buffer: that hears of an error in the thread, if it has ``note_failure``; and how many rows wait in workers
            for the end of their trajectories, if these are to be complete and it has ``note_waiting``.
        whole: whether trajectories are to be complete.
        progress: whether to show a bar.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        delivery: Delivery,
        nursery: Nursery,
        *,
        owns_nursery: bool,
        version: Callable[[], int],
        publish: Callable[[], Any],
        buffer: Any,
        whole: bool,
        progress: bool,
    ) -> None:
        self.gatherer, self.delivery = gatherer, delivery
        self._nursery, self._owns_nursery = nursery, owns_nursery
        self._version, self._publish = version, publish
        self._note_waiting = getattr(buffer, "note_waiting", None) if whole else None
        self._note_failure = getattr(buffer, "note_failure", None)
        self._bar = ProgressBar(gatherer.total, gatherer.team.returns_key) if progress else None
        self.tallies = [Tally() for _ in gatherer.team.members]
        self.closed = False
        self.drain: Drain | None = None
        #: Held while weights are published, and while a batch is made of what was gathered, and counted.
        self.lock = RLock()

    def next(self, limited: bool, wake: Wake | None = None) -> tuple[TensorDict | None] | None:
        """The next batch, in a tuple (of None if a buffer took it); None at the end, or once ``wake`` is set.

        After an error, Ctrl-C included, all is closed: rows of some workers are lost, what followed would have gaps.
        """
        began = perf_counter()
        try:
            with self.lock:
                self._publish()
            filled = self.gatherer.next(limited, wake)
            if not filled:
                if self._bar is not None:
                    self._bar.close()
                return None
            with self.lock:
                return (self._deliver(filled, began),)
        except BaseException:
            self.close(0.3)
            raise

    def _deliver(self, filled: Sequence[Filled], began: float) -> TensorDict | None:
        version = self._version()
        for member, window, fresh in filled:
            self.tallies[member.place].count(window.note, fresh, version)
        before = self.gatherer.frames - sum(fresh for _, _, fresh in filled)
        if self._note_waiting is not None:
            self._note_waiting(sum(tally.held for tally in self.tallies))
        if self._bar is None and self.delivery.extend(filled):
            return None
        batch = self.delivery.batch(filled)
        if self._bar is not None:
            mask = batch.get(MASK, None)
            self._bar.show(batch.reshape(-1) if mask is None else batch[mask], before, began)
        return self.delivery.hand_over(batch)

    def start(self) -> None:
        """Let a thread deliver until all is collected."""
        self.drain = Drain(lambda wake: self.next(True, wake) is not None, self._note_failure)

    @property
    def is_running(self) -> bool:
        """Whether that thread is at work."""
        return self.drain is not None and self.drain.is_running

    def stop(self, timeout: float | None = None) -> None:
        """Let the thread end after the batch at work; what it gathered so far comes next."""
        if self.drain is not None:
            self.drain.stop(timeout)

    def raise_error(self) -> None:
        """Raise what ended the thread, once."""
        if self.drain is not None:
            self.drain.raise_error()

    def close(self, timeout: float, keep_nursery: bool = False) -> None:
        """End thread and workers within about ``timeout`` seconds; a second call does nothing."""
        if self.closed:
            self.stop(timeout)  # which may be closing
            return
        self.closed = True
        began = monotonic()
        self.stop(timeout)
        left = max(0.0, timeout - (monotonic() - began))
        self.gatherer.team.end(left)
        if self._owns_nursery and not keep_nursery:
            self._nursery.close(0)
        if self._bar is not None:
            self._bar.close()
