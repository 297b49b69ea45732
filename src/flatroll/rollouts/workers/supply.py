"""`Supply`: gathers windows and delivers batches for a collector with workers."""

import os
import threading
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any

from tensordict import TensorDict

from flatroll.layout.keys import MASK
from flatroll.rollouts.progress import ProgressBar
from flatroll.rollouts.workers.delivery import Delivery, Tally
from flatroll.rollouts.workers.gather import Filled, Gatherer
from flatroll.rollouts.workers.team import Interrupts
from flatroll.rollouts.workers.transport import Transport, Wake


class Supply:
    """Gathers windows and delivers batches, in the caller's thread or in its own.

    It holds no reference to the collector, which may be garbage-collected while the thread runs.

    Args:
        gatherer: returns the windows of each batch.
        delivery: makes batches from windows.
        transport: transport of the workers.
        interrupts: delays Ctrl-C while rows are being handled.
        publish: called before each batch is requested, if not None.
        buffer: its ``note_failure``, if present, is called after an error in the thread; its ``note_waiting``, if
            present, with the number of rows that wait for the end of their trajectories, if these shall be complete.
        whole: whether trajectories shall be complete.
        progress: whether to show a bar.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        delivery: Delivery,
        transport: Transport,
        interrupts: Interrupts,
        *,
        publish: Callable[[], None] | None,
        buffer: Any,
        whole: bool,
        progress: bool,
    ) -> None:
        self.gatherer = gatherer
        self.delivery = delivery
        self.transport = transport
        self._interrupts = interrupts
        self._publish = publish

        if whole:
            self._note_waiting = getattr(buffer, "note_waiting", None)
        else:
            self._note_waiting = None

        self._note_failure = getattr(buffer, "note_failure", None)
        self._bar = ProgressBar(gatherer.total, gatherer.team.returns_key) if progress else None
        self.tallies = [Tally() for _ in gatherer.team.members]
        self._filled: list[Filled] = []  # gathered windows
        self._batch: TensorDict | None = None  # batch made of them
        self._made: tuple[TensorDict | None] | None = None  # delivered, but not yet returned
        self.owner = os.getpid()
        self.closed = self._workers_ended = self._ended = False
        self._thread: _Thread | None = None

        #: Held while weights are published, and while a batch is assembled and counted.
        self.lock = threading.RLock()

    def next(self, limited: bool, wake: Wake | None = None) -> tuple[TensorDict | None] | None:
        """Return the next batch in a tuple (None in it if a buffer took it); None at the end or once ``wake`` is set.

        Ctrl-C loses nothing: the next call continues from there. Any other error closes everything: rows of some
        workers are lost, and later batches would have gaps.
        """
        began = perf_counter()
        try:
            with self._interrupts:
                if self._made is None and not (self._filled or self._batch is not None):
                    with self.lock:
                        if self._publish is not None:
                            self._publish()

                    try:
                        filled = self.gatherer.next(limited, wake)
                    except Exception:
                        if self._workers_ended and threading.current_thread() is self._thread:
                            return None  # closed by a `close` that did not wait for this thread
                        raise

                    if not filled:
                        if self._bar is not None:
                            self._bar.close()
                        return None
                    self._count(filled)

                if self._made is None:
                    with self.lock:
                        self._made = (self._deliver(began),)
        except KeyboardInterrupt:
            raise
        except BaseException:
            self.close(0.3)
            raise

        made = self._made
        self._made = None
        return made

    def _count(self, filled: list[Filled]) -> None:
        """Count the gathered windows."""
        with self.lock:
            version = self.transport.version
            for member, window, fresh in filled:
                self.tallies[member.place].count(window.note, fresh, version)
            self._filled = filled
            if self._note_waiting is not None:
                self._note_waiting(sum(tally.held for tally in self.tallies))

    def _deliver(self, began: float) -> TensorDict | None:
        """Deliver the gathered windows. Each step is recorded only once it is done, so it can be retried."""
        if self._bar is None and self.delivery.takes_windows():
            while self._filled and self.delivery.extend(self._filled[0]):
                self._filled.pop(0).window.release()
            if not self._filled:
                return None

        if self._filled:
            before = self.gatherer.team.frames - sum(fresh for _, _, fresh in self._filled)
            self._batch = self.delivery.batch(self._filled)
            self._filled = []

            if self._bar is not None:
                mask = self._batch.get(MASK, None)
                if mask is None:
                    rows = self._batch.reshape(-1)
                else:
                    rows = self._batch[mask]
                self._bar.show(rows, before, began)

        assert self._batch is not None
        made = self.delivery.hand_over(self._batch)
        self._batch = None
        return made

    def start(self) -> None:
        """Deliver in a thread until everything is collected."""
        self.stop()  # stops a thread whose start was interrupted by Ctrl-C, and which may still begin
        self._thread = _Thread(lambda wake: self.next(True, wake) is not None, self._note_failure)
        self._thread.start()  # only after registering it: an unknown thread could run beside the next one

    @property
    def is_running(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float | None = None) -> None:
        """Stop the thread after the current batch; windows gathered so far come next."""
        if self._thread is not None:
            self._thread.stop(timeout)

    def raise_error(self) -> None:
        """Raise the error that ended the thread, once."""
        if self._thread is not None:
            self._thread.raise_error()

    def close(self, timeout: float, keep_transport: bool = False) -> None:
        """Stop thread and workers within about ``timeout`` seconds; does nothing in a forked copy of the owner.

        A second call does nothing, or finishes what Ctrl-C interrupted.
        """
        if os.getpid() != self.owner:
            return

        self.closed = True
        began = monotonic()
        self.stop(timeout)  # the thread may be closing
        if self._ended:
            return

        self._workers_ended = True
        self.gatherer.team.end(max(0.0, timeout - (monotonic() - began)))
        if not keep_transport:
            self.transport.close()
        if self._bar is not None:
            self._bar.close()
        self._ended = True


class _Thread(threading.Thread):
    """Calls ``step(wake)`` until it returns False, raises, or `stop` is called.

    A daemon thread that keeps only ``step`` alive. After an error it calls ``tell(raise_error)``, if given.
    """

    def __init__(
        self, step: Callable[[Wake], bool], tell: Callable[[Callable[[], None]], None] | None
    ) -> None:
        super().__init__(name="collector", daemon=True)
        self._step = step
        self._tell = tell
        self._wake = Wake()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._wake.is_set() and self._step(self._wake):
                pass
        except BaseException as error:  # raised in the thread that calls next
            self._error = error
            if self._tell is not None:
                self._tell(self.raise_error)

    def stop(self, timeout: float | None = None) -> None:
        """Stop the thread and wait at most ``timeout`` seconds; a second call does nothing."""
        self._wake.set()
        if self is not threading.current_thread() and self.is_alive():
            self.join(timeout)

    def raise_error(self) -> None:
        """Raise its error, once."""
        error = self._error
        self._error = None
        if error is not None:
            raise error
