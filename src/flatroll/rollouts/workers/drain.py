"""`Drain`: a thread that brings what workers deliver into the replay buffer, while the caller trains."""

import threading
from collections.abc import Callable

from flatroll.rollouts.workers.wake import Wake


class Drain:
    """Calls ``step(wake)`` again and again, until it returns False, raises, or `stop` is called.

    The thread keeps ``step`` alive and nothing else, and no program waits for it at its end. After an error
    ``tell(raise_error)`` is called, if it is given.
    """

    def __init__(
        self, step: Callable[[Wake], bool], tell: Callable[[Callable[[], None]], None] | None
    ) -> None:
        self._step, self._tell, self._wake = step, tell, Wake()
        #: What ``step`` raised.
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._wake.is_set() and self._step(self._wake):
                pass
        except BaseException as error:  # told to the thread that asks next
            self.error = error
            if self._tell is not None:
                self._tell(self.raise_error)

    @property
    def is_running(self) -> bool:
        """Whether it goes on."""
        return self._thread.is_alive()

    def stop(self, timeout: float | None = None) -> None:
        """Let it end, and wait until it has, ``timeout`` seconds at most; a second call does nothing."""
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def raise_error(self) -> None:
        """Raise what ended it, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error
