"""`Wake`: lets one thread end the wait of another."""

import os


class Wake:
    """Like a ``threading.Event``, with a descriptor that others than threads' locks can wait for.

    >>> wake = Wake()
    >>> wake.set()
    >>> wake.is_set()
    True
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._set = False

    def set(self) -> None:
        """Let `fileno` be ready for reading, for good."""
        if not self._set:
            self._set = True
            os.write(self._write, b".")

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._set

    def fileno(self) -> int:
        """The descriptor."""
        return self._read

    def __del__(self) -> None:
        os.close(self._read)
        os.close(self._write)
