"""What a buffer or an ensemble knows of its saves, and the thread that saves it."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from flatroll.buffers.checkpointers.row_log import RowLog

#: What is saved along with a buffer: plain values by name, made when the buffer's own state is.
Others: TypeAlias = Callable[[], Mapping[str, Any]]
#: Loads what was read and checked.
Apply: TypeAlias = Callable[[], None]


class Saves:
    """What a buffer knows of its saves: its rows in each folder, and the save that is under way on a thread.

    A copy of the buffer, or one in another process, knows nothing.
    """

    def __init__(self) -> None:
        self.logs: dict[Path, RowLog] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[type["Saves"], tuple[()]]:
        return Saves, ()

    def log(self, path: Path) -> RowLog:
        """The log of the rows in a folder."""
        return self.logs.setdefault(path.resolve(), RowLog(path))

    def join(self) -> None:
        """Wait for the save on a thread; raise its error if it had one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def dumps(self, save: Callable[[], Any], wait: bool) -> None:
        """Call ``save``; without ``wait`` on a thread, of which there is one at a time."""
        self.join()
        if wait:
            save()
            return

        def run() -> None:
            try:
                save()
            except BaseException as error:  # kept for the caller's thread, whatever it is
                self._error = error

        self._thread = threading.Thread(target=run, name="flatroll save")
        self._thread.start()

    def loads(self, load: Callable[[], tuple[dict[str, Any], Apply]]) -> None:
        """Load what ``load`` has read and checked, after the save that is under way."""
        self.join()
        load()[1]()
